/* Matrix-vector and matrix-matrix products over weights as they lie in a package.
 *
 * The functions below are templates in the C way: `scheme` and the like are constants at every
 * call, and what does not apply folds away. Sums run over groups of 32 inputs in order, group by
 * group, in every variant of one scheme, so a row's result depends neither on how many rows are
 * computed beside it nor on the number of threads; nor, with int8 activations, on how many tokens
 * there are. With float ones, one token is multiplied by codes and several by widened weights,
 * which rounds differently.
 */

DN_INLINE float scale_at(const void *p, int32_t is_f32, int64_t i)
{
    return is_f32 ? ((const float *)p)[i] : half_to_float(((const uint16_t *)p)[i]);
}
DN_INLINE v16f v_scale(const void *p, int32_t is_f32, int64_t i)
{
    return is_f32 ? v_load((const float *)p + i) : v_load_f16((const uint16_t *)p + i);
}

/* Where the parts of one block of 16 rows begin. */
typedef struct {
    const uint8_t *q, *h, *s, *mn;
    const uint8_t *d, *m; /* float16 or float32 */
} dn_block;

DN_INLINE dn_block block_at(int scheme, const dn_weight *w, int32_t r)
{
    int64_t groups = w->k / 32, row = r;
    dn_block b = {0};
    b.q = (const uint8_t *)w->q + row * w->stride;
    int64_t scales = (scheme == DN_Q4 || scheme == DN_Q8) ? w->k / w->group : w->k / 256;
    int64_t bytes = w->scale_f32 ? 64 : 32;
    b.d = (const uint8_t *)w->d + row * scales * bytes;
    if (scheme == DN_Q4 || scheme == DN_Q8) b.m = w->m ? (const uint8_t *)w->m + row * scales * bytes : 0;
    if (scheme == DN_Q4K || scheme == DN_Q5K) {
        b.m = (const uint8_t *)w->dm + row * scales * 32;
        b.s = (const uint8_t *)w->s + row * groups * 16;
        b.mn = (const uint8_t *)w->mn + row * groups * 16;
    }
    if (scheme == DN_Q5K) b.h = (const uint8_t *)w->h + row * groups * 64;
    if (scheme == DN_Q6K) {
        b.h = (const uint8_t *)w->h + row * groups * 128;
        b.s = (const uint8_t *)w->s + row * groups * 32;
    }
    return b;
}

enum { Q4_BYTES = 256, Q8_BYTES = 512 };

/* Inputs 4c..4c+3 (low) and 16+4c..16+4c+3 (high) of group g for 16 rows. */
DN_INLINE void chunk(int scheme, const dn_block *b, int64_t g, int c, w64 *low, w64 *high)
{
    if (scheme == DN_Q8) {
        const uint8_t *p = b->q + g * Q8_BYTES + c * 64;
        *low = w_load(p);
        *high = w_load(p + 256);
        return;
    }
    w64 w = w_load(b->q + g * Q4_BYTES + c * 64);
    *low = w_low(w);
    *high = w_high(w);
    if (scheme == DN_Q5K) {
        w64 fifth = w_load(b->h + g * 64);
        *low = w_or(*low, w_field(fifth, 2 * c, 1, 4));
        *high = w_or(*high, w_field(fifth, 2 * c + 1, 1, 4));
    }
    if (scheme == DN_Q6K) {
        w64 upper = w_load(b->h + g * 128 + (c / 2) * 64);
        *low = w_or(*low, w_field(upper, (c % 2) * 4, 3, 4));
        *high = w_or(*high, w_field(upper, (c % 2) * 4 + 2, 3, 4));
    }
}

DN_INLINE v16i dot(int scheme, v16i acc, w64 w, const int8_t *x)
{
    return scheme == DN_Q8 ? dot4s(acc, w, x) : dot4(acc, w, x);
}

/* What the integer products count too much of each activation: taken off before they start. The
 * zero point of q4 is taken off with the offset, in `group_scales`. */
DN_INLINE int32_t excess(int scheme) { return scheme == DN_Q8 ? DN_SIGNED_BIAS : scheme == DN_Q6K ? 32 : 0; }

/* How a group's integer sums become numbers: 16 rows at a time, the same for all activations. */
typedef struct { v16f first, second, offset; } dn_scales;

DN_INLINE dn_scales group_scales(int scheme, const dn_weight *w, const dn_block *b, int64_t g, int64_t per)
{
    dn_scales r;
    if (scheme == DN_Q6K) {
        v16f d = v_load_f16((const uint16_t *)b->d + g / 8 * 16);
        r.first = v_mul(d, v_load_i8((const int8_t *)b->s + g * 32));
        r.second = v_mul(d, v_load_i8((const int8_t *)b->s + g * 32 + 16));
        r.offset = v_set1(0);
        return r;
    }
    if (scheme == DN_Q4K || scheme == DN_Q5K) {
        r.first = v_mul(v_load_f16((const uint16_t *)b->d + g / 8 * 16), v_load_u8(b->s + g * 16));
        v16f m = v_mul(v_load_f16((const uint16_t *)b->m + g / 8 * 16), v_load_u8(b->mn + g * 16));
        r.offset = v_sub(v_set1(0), m);
    } else {
        r.first = v_scale(b->d, w->scale_f32, g / per * 16);
        r.offset = b->m ? v_scale(b->m, w->scale_f32, g / per * 16) : v_set1(0);
        if (scheme == DN_Q4) r.offset = v_fma(r.first, v_set1((float)-w->zero), r.offset);
    }
    r.second = r.first;
    return r;
}

/* Whether `offset` may be other than zero. */
DN_INLINE int shifted(int scheme, const dn_weight *w)
{
    if (scheme == DN_Q8) return w->m != NULL;
    return scheme != DN_Q6K;
}

/* total += the group's integer sums times their scales. `low` and `high` are the sums over inputs
 * 0..15 and 16..31; all schemes but q6k scale both alike. `s` is the activations' scale, `u` that
 * times their sum. */
DN_INLINE v16f scaled(int scheme, int shift, dn_scales w, v16f total, v16i low, v16i high, float s, float u)
{
    v16f sx = v_set1(s);
    if (scheme == DN_Q6K) {
        total = v_fma(v_mul(w.first, sx), v_from_i(low), total);
        return v_fma(v_mul(w.second, sx), v_from_i(high), total);
    }
    total = v_fma(v_mul(w.first, sx), v_from_i(i_add(low, high)), total);
    return shift ? v_fma(w.offset, v_set1(u), total) : total;
}

DN_INLINE void put(float *y, v16f value, int32_t n, int32_t r)
{
    if (16 * r + 16 <= n) {
        v_store(y + 16 * r, value);
    } else {
        float rest[16];
        v_store(rest, value);
        memcpy(y + 16 * r, rest, sizeof(float) * (size_t)(n - 16 * r));
    }
}

/* Scales lie in streams of their own, which the hardware alone does not follow well. */
DN_INLINE void prefetch_scales(int scheme, const dn_block *b, int64_t g)
{
    if (scheme == DN_Q4 || scheme == DN_Q8) {
        __builtin_prefetch(b->d + g * 32 + DN_PREFETCH / 4);
        if (b->m) __builtin_prefetch(b->m + g * 32 + DN_PREFETCH / 4);
        return;
    }
    __builtin_prefetch(b->s + g * (scheme == DN_Q6K ? 32 : 16) + DN_PREFETCH / 4);
    if (scheme == DN_Q6K) {
        __builtin_prefetch(b->h + g * 128 + DN_PREFETCH / 2);
        __builtin_prefetch(b->h + g * 128 + 64 + DN_PREFETCH / 2);
        return;
    }
    __builtin_prefetch(b->mn + g * 16 + DN_PREFETCH / 4);
    if (scheme == DN_Q5K) __builtin_prefetch(b->h + g * 64 + DN_PREFETCH / 4);
}

/* One row of activations, `streams` blocks side by side at distance `apart`. */
DN_INLINE void one_row(int scheme, int streams, const dn_weight *w, const dn_input *in, int64_t row,
                       float *y, int32_t r, int32_t apart)
{
    int64_t groups = w->k / 32, per = w->group / 32 ? w->group / 32 : 1;
    const int8_t *x = in->q + row * in->k;
    const float *s = in->s + row * (in->k / 32);
    const int32_t *t = in->t + row * (in->k / 16);
    const float *u = in->u + row * (in->k / 32);
    int shift = shifted(scheme, w);
    dn_block b[DN_STREAMS];
    v16f total[DN_STREAMS];
#pragma GCC unroll 8
    for (int i = 0; i < streams; i++) {
        b[i] = block_at(scheme, w, r + i * apart);
        total[i] = v_set1(0);
    }
    for (int64_t g = 0; g < groups; g++, x += 32) {
        v16i low[DN_STREAMS], high[DN_STREAMS];
#pragma GCC unroll 8
        for (int i = 0; i < streams; i++) {
            low[i] = high[i] = i_set1(0);
            if (excess(scheme)) {
                low[i] = i_set1(-excess(scheme) * t[2 * g]);
                high[i] = i_set1(-excess(scheme) * t[2 * g + 1]);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
#pragma GCC unroll 8
            for (int i = 0; i < streams; i++) {
                w64 first, second;
                if (scheme == DN_Q8) {
                    __builtin_prefetch(b[i].q + g * Q8_BYTES + c * 64 + DN_PREFETCH);
                    __builtin_prefetch(b[i].q + g * Q8_BYTES + c * 64 + 256 + DN_PREFETCH);
                } else {
                    __builtin_prefetch(b[i].q + g * Q4_BYTES + c * 64 + DN_PREFETCH);
                }
                chunk(scheme, &b[i], g, c, &first, &second);
                low[i] = dot(scheme, low[i], first, x + 4 * c);
                high[i] = dot(scheme, high[i], second, x + 16 + 4 * c);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < streams; i++) {
            prefetch_scales(scheme, &b[i], g);
            total[i] = scaled(scheme, shift, group_scales(scheme, w, &b[i], g, per), total[i], low[i],
                              high[i], s[g], u[g]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < streams; i++) put(y + row * w->n, total[i], w->n, r + i * apart);
}

/* `tokens` rows of activations share each unpacked group of one block. */
DN_INLINE void several_rows(int scheme, int tokens, const dn_weight *w, const dn_input *in,
                            int64_t row, float *y, int32_t r)
{
    int64_t groups = w->k / 32, per = w->group / 32 ? w->group / 32 : 1;
    int shift = shifted(scheme, w);
    dn_block b = block_at(scheme, w, r);
    v16f total[DN_TOKENS];
#pragma GCC unroll 8
    for (int i = 0; i < tokens; i++) total[i] = v_set1(0);
    for (int64_t g = 0; g < groups; g++) {
        w64 first[4], second[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) chunk(scheme, &b, g, c, &first[c], &second[c]);
        dn_scales scales = group_scales(scheme, w, &b, g, per);
#pragma GCC unroll 8
        for (int i = 0; i < tokens; i++) {
            const int8_t *x = in->q + (row + i) * in->k + g * 32;
            v16i low = i_set1(0), high = i_set1(0);
            if (excess(scheme)) {
                const int32_t *t = in->t + (row + i) * (in->k / 16) + 2 * g;
                low = i_set1(-excess(scheme) * t[0]);
                high = i_set1(-excess(scheme) * t[1]);
            }
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                low = dot(scheme, low, first[c], x + 4 * c);
                high = dot(scheme, high, second[c], x + 16 + 4 * c);
            }
            int64_t at = (row + i) * (in->k / 32) + g;
            total[i] = scaled(scheme, shift, scales, total[i], low, high, in->s[at], in->u[at]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < tokens; i++) put(y + (row + i) * w->n, total[i], w->n, r);
}

DN_INLINE void int8_products(int scheme, const dn_weight *w, const dn_input *in, float *y,
                             int32_t first, int32_t last)
{
    if (in->rows == 1) {
        int32_t apart = (last - first) / DN_STREAMS, r = first;
        /* Streams a multiple of a page apart fall into the same cache sets and memory banks. */
        while (apart > 8 && apart * w->stride % 4096 < 512) apart--;
        for (int32_t i = 0; i < apart; i++) one_row(scheme, DN_STREAMS, w, in, 0, y, first + i, apart);
        for (r = first + apart * DN_STREAMS; r + DN_STREAMS <= last; r += DN_STREAMS)
            one_row(scheme, DN_STREAMS, w, in, 0, y, r, 1);
        for (; r < last; r++) one_row(scheme, 1, w, in, 0, y, r, 0);
        return;
    }
    for (int32_t r = first; r < last; r++) {
        int64_t row = 0;
        for (; row + DN_TOKENS <= in->rows; row += DN_TOKENS) several_rows(scheme, DN_TOKENS, w, in, row, y, r);
        for (; row < in->rows; row++) several_rows(scheme, 1, w, in, row, y, r);
    }
}

/* Float activations, one row: weights are widened in registers. */
DN_INLINE void float_row(int scheme, const dn_weight *w, const float *x, float *y, int32_t r)
{
    int64_t groups = w->k / 32, per = w->group / 32 ? w->group / 32 : 1;
    v16f zero = v_set1(scheme == DN_Q6K ? 32.0f : 0.0f); /* q4's is in the offset */
    dn_block b = block_at(scheme, w, r);
    v16f total = v_set1(0);
    for (int64_t g = 0; g < groups; g++, x += 32) {
        v16f part[2] = {v_set1(0), v_set1(0)};
        __builtin_prefetch(b.q + g * Q4_BYTES + DN_PREFETCH);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            w64 low, high;
            chunk(scheme, &b, g, c, &low, &high);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                v16f a = scheme == DN_Q8 ? v_byte_signed(low, j) : v_byte(low, j);
                v16f z = scheme == DN_Q8 ? v_byte_signed(high, j) : v_byte(high, j);
                part[0] = v_fma(a, v_set1(x[4 * c + j]), part[0]);
                part[1] = v_fma(z, v_set1(x[16 + 4 * c + j]), part[1]);
            }
        }
        dn_scales scales = group_scales(scheme, w, &b, g, per);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            v16f sum = v_set1(v_sum(v_load(x + 16 * half)));
            total = v_fma(half ? scales.second : scales.first, v_sub(part[half], v_mul(zero, sum)), total);
            total = v_fma(scales.offset, sum, total);
        }
    }
    put(y, total, w->n, r);
}

/* 16 rows as floats, input by input: tile [k][16]. */
DN_INLINE void widen(int scheme, const dn_weight *w, int32_t r, float *tile)
{
    int64_t groups = w->k / 32, per = w->group / 32 ? w->group / 32 : 1;
    v16f zero = v_set1(scheme == DN_Q6K ? 32.0f : 0.0f); /* q4's is in the offset */
    dn_block b = block_at(scheme, w, r);
    for (int64_t g = 0; g < groups; g++, tile += 512) {
        dn_scales scales = group_scales(scheme, w, &b, g, per);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            w64 q[2];
            chunk(scheme, &b, g, c, &q[0], &q[1]);
            for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    v16f a = scheme == DN_Q8 ? v_byte_signed(q[half], j) : v_byte(q[half], j);
                    v16f value = v_fma(half ? scales.second : scales.first, v_sub(a, zero), scales.offset);
                    v_store(tile + (16 * half + 4 * c + j) * 16, value);
                }
            }
        }
    }
}

DN_INLINE void tile_rows(int tokens, const float *tile, const float *x, int32_t k, float *y,
                         const dn_weight *w, int32_t r)
{
    v16f total[DN_TOKENS];
#pragma GCC unroll 8
    for (int i = 0; i < tokens; i++) total[i] = v_set1(0);
    for (int32_t j = 0; j < k; j++) {
        v16f column = v_load(tile + 16 * j);
#pragma GCC unroll 8
        for (int i = 0; i < tokens; i++) total[i] = v_fma(column, v_set1(x[(int64_t)i * k + j]), total[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < tokens; i++) put(y + (int64_t)i * w->n, total[i], w->n, r);
}

DN_INLINE void float_products(int scheme, const dn_weight *w, const dn_input *in, float *y,
                              int32_t first, int32_t last, int32_t flags, float *tile)
{
    for (int32_t r = first; r < last; r++) {
        if (in->rows == 1 && !(flags & DN_DEQUANTISE)) {
            float_row(scheme, w, in->x, y, r);
            continue;
        }
        widen(scheme, w, r, tile);
        int64_t row = 0;
        for (; row + DN_TOKENS <= in->rows; row += DN_TOKENS)
            tile_rows(DN_TOKENS, tile, in->x + row * in->k, in->k, y + row * w->n, w, r);
        for (; row < in->rows; row++) tile_rows(1, tile, in->x + row * in->k, in->k, y + row * w->n, w, r);
    }
}
