/* Matrix-vector and matrix-matrix products over weights as they lie in a package.
 *
 * The functions below are templates in the C way: `scheme` and the like are constants at every
 * call, and what does not apply folds away. Sums run over groups of 32 inputs in order, group by
 * group, in every variant of one scheme, so a row's result depends neither on how many rows or
 * tokens are computed beside it nor on the number of threads.
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

/* Activations of one group as floats: as they are, or what their int8 form stands for. */
DN_INLINE void group_inputs(const dn_input *in, int64_t row, int64_t g, int int8, v16f *low, v16f *high)
{
    if (int8) {
        const int8_t *q = in->q + row * in->k + g * 32;
        v16f s = v_set1(in->s[row * (in->k / 32) + g]);
        *low = v_mul(v_load_i8(q), s);
        *high = v_mul(v_load_i8(q + 16), s);
    } else {
        const float *x = in->x + row * in->k + g * 32;
        *low = v_load(x);
        *high = v_load(x + 16);
    }
}

/* Rows of weights as they come in a file, one output after the other. */
static void row_products(const dn_weight *w, const dn_input *in, float *y, int32_t from, int32_t to,
                         int int8)
{
    int64_t groups = w->k / 32, scales = w->k / w->group;
    for (int32_t n = from; n < to; n++) {
        for (int64_t row = 0; row < in->rows; row++) {
            v16f total = v_set1(0);
            float offset = 0;
            for (int64_t g = 0; g < groups; g++) {
                v16f low, high, a, b;
                group_inputs(in, row, g, int8, &low, &high);
                if (w->scheme == DN_Q4) {
                    v_load_u4((const uint8_t *)w->q + ((int64_t)n * groups + g) * 16, &a, &b);
                } else {
                    const int8_t *q = (const int8_t *)w->q + (int64_t)n * w->k + g * 32;
                    a = v_load_i8(q);
                    b = v_load_i8(q + 16);
                }
                /* groups of 16 inputs have a scale for each half */
                int64_t at = n * scales + g * 32 / w->group;
                int64_t next = n * scales + (g * 32 + 16) / w->group;
                float d = scale_at(w->d, w->scale_f32, at), e = scale_at(w->d, w->scale_f32, next);
                total = v_fma(v_set1(d), v_mul(a, low), total);
                total = v_fma(v_set1(e), v_mul(b, high), total);
                if (w->m || w->zero) {
                    float m = w->m ? scale_at(w->m, w->scale_f32, at) : 0;
                    float l = w->m ? scale_at(w->m, w->scale_f32, next) : 0;
                    offset += (m - (float)w->zero * d) * v_sum(low) + (l - (float)w->zero * e) * v_sum(high);
                }
            }
            y[row * w->n + n] = v_sum(total) + offset;
        }
    }
}

/* Groups before outputs: 16 outputs are 16 neighbouring bytes of each input. */
static void blocked_products(const dn_weight *w, const dn_input *in, float *y, int32_t first,
                             int32_t last, int int8)
{
    int64_t groups = w->k / 32, n = w->n;
    for (int32_t r = first; r < last; r++) {
        int64_t at = 16 * (int64_t)r;
        int32_t width = at + 16 <= n ? 16 : (int32_t)(n - at);
        for (int64_t row = 0; row < in->rows; row++) {
            v16f total = v_set1(0);
            for (int64_t g = 0; g < groups; g++) {
                v16f low, high, part[2] = {v_set1(0), v_set1(0)};
                float x[32], d[2][16] = {{0}}, m[2][16] = {{0}};
                group_inputs(in, row, g, int8, &low, &high);
                v_store(x, low);
                v_store(x + 16, high);
                for (int i = 0; i < 16; i++) {
                    uint8_t edge[16] = {0};
                    if (w->scheme == DN_Q4) {
                        const uint8_t *p = (const uint8_t *)w->q + (g * 16 + i) * n + at;
                        v16f a, b;
                        if (width < 16) p = memcpy(edge, p, (size_t)width);
                        v_load_u4(p, &a, &b);
                        part[0] = v_fma(a, v_set1(x[i]), part[0]);
                        part[1] = v_fma(b, v_set1(x[i + 16]), part[1]);
                    } else {
                        for (int half = 0; half < 2; half++) {
                            const int8_t *p = (const int8_t *)w->q + (g * 32 + 16 * half + i) * n + at;
                            if (width < 16) p = memcpy(edge, p, (size_t)width);
                            part[half] = v_fma(v_load_i8(p), v_set1(x[i + 16 * half]), part[half]);
                        }
                    }
                }
                for (int half = 0; half < 2; half++) {
                    int64_t scale = (g * 32 + 16 * half) / w->group * n + at;
                    for (int lane = 0; lane < width; lane++) {
                        d[half][lane] = scale_at(w->d, w->scale_f32, scale + lane);
                        if (w->m) m[half][lane] = scale_at(w->m, w->scale_f32, scale + lane);
                    }
                    v16f sum = v_set1(v_sum(half ? high : low));
                    v16f plain = v_sub(part[half], v_mul(v_set1((float)w->zero), sum));
                    total = v_fma(v_load(d[half]), plain, total);
                    total = v_fma(v_load(m[half]), sum, total);
                }
            }
            put(y + row * n, total, w->n, r);
        }
    }
}

DN_INLINE v16f v_load_float(int scheme, const void *p, int64_t i)
{
    if (scheme == DN_F32) return v_load((const float *)p + i);
    return scheme == DN_F16 ? v_load_f16((const uint16_t *)p + i) : v_load_bf16((const uint16_t *)p + i);
}
DN_INLINE float one_float(int scheme, const void *p, int64_t i)
{
    if (scheme == DN_F32) return ((const float *)p)[i];
    if (scheme == DN_F16) return half_to_float(((const uint16_t *)p)[i]);
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Unquantised rows; four at a time share the activations. */
DN_INLINE void plain_products(int scheme, const dn_weight *w, const dn_input *in, float *y,
                              int32_t from, int32_t to)
{
    int64_t k = w->k;
    for (int32_t n = from; n < to;) {
        int count = to - n >= 4 ? 4 : 1;
        const uint8_t *p[4];
        for (int i = 0; i < count; i++) p[i] = (const uint8_t *)w->q + (n + i) * k * (scheme == DN_F32 ? 4 : 2);
        for (int64_t row = 0; row < in->rows; row++) {
            const float *x = in->x + row * k;
            v16f total[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)};
            int64_t j = 0;
            if (count == 4) {
                for (; j + 16 <= k; j += 16) {
                    v16f a = v_load(x + j);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) total[i] = v_fma(v_load_float(scheme, p[i], j), a, total[i]);
                }
            } else {
                for (; j + 16 <= k; j += 16) total[0] = v_fma(v_load_float(scheme, p[0], j), v_load(x + j), total[0]);
            }
            for (int i = 0; i < count; i++) {
                float sum = v_sum(total[i]);
                for (int64_t z = j; z < k; z++) sum += one_float(scheme, p[i], z) * x[z];
                y[row * w->n + n + i] = sum;
            }
        }
        n += count;
    }
}

#define QUANTISED(SCHEME) \
    static void int8_##SCHEME(const dn_weight *w, const dn_input *in, float *y, int32_t a, int32_t b) \
    { int8_products(SCHEME, w, in, y, a, b); } \
    static void float_##SCHEME(const dn_weight *w, const dn_input *in, float *y, int32_t a, int32_t b, \
                               int32_t flags, float *tile) \
    { float_products(SCHEME, w, in, y, a, b, flags, tile); }
QUANTISED(DN_Q4)
QUANTISED(DN_Q8)
QUANTISED(DN_Q4K)
QUANTISED(DN_Q5K)
QUANTISED(DN_Q6K)

static void linear(const dn_weight *w, const dn_input *in, float *y, int32_t first, int32_t last,
                   int32_t flags, float *tile)
{
    int int8 = (flags & DN_INT8) != 0;
    int32_t to = 16 * last < w->n ? 16 * last : w->n;
    if (first >= last) return;
    if (w->scheme == DN_F32) { plain_products(DN_F32, w, in, y, 16 * first, to); return; }
    if (w->scheme == DN_F16) { plain_products(DN_F16, w, in, y, 16 * first, to); return; }
    if (w->scheme == DN_BF16) { plain_products(DN_BF16, w, in, y, 16 * first, to); return; }
    if (w->layout == DN_ROW) { row_products(w, in, y, 16 * first, to, int8); return; }
    if (w->layout == DN_BLOCKED) { blocked_products(w, in, y, first, last, int8); return; }
    int8 = int8 && !(flags & DN_DEQUANTISE);
#define CASE(SCHEME) \
    case SCHEME: \
        if (int8) int8_##SCHEME(w, in, y, first, last); \
        else float_##SCHEME(w, in, y, first, last, flags, tile); \
        break;
    switch (w->scheme) { CASE(DN_Q4) CASE(DN_Q8) CASE(DN_Q4K) CASE(DN_Q5K) CASE(DN_Q6K) }
#undef CASE
}

/* --- one row of a weight as floats: the embedding ------------------------------------------- */

DN_INLINE float interleaved_value(const dn_weight *w, int64_t row, int64_t i)
{
    dn_block b = block_at(w->scheme, w, (int32_t)(row / 16));
    int64_t lane = row % 16, g = i / 32, in_group = i % 32;
    int64_t half = in_group / 16, c = in_group % 16 / 4, j = in_group % 4, byte = lane * 4 + j;
    if (w->scheme == DN_Q4 || w->scheme == DN_Q8) {
        int64_t at = i / w->group * 16 + lane;
        float d = scale_at(b.d, w->scale_f32, at), m = b.m ? scale_at(b.m, w->scale_f32, at) : 0;
        if (w->scheme == DN_Q8) return d * (float)((const int8_t *)b.q)[g * 512 + (half * 4 + c) * 64 + byte] + m;
        int32_t q = b.q[g * 256 + c * 64 + byte] >> (4 * half) & 15;
        return d * (float)(q - w->zero) + m;
    }
    int32_t q = b.q[g * 256 + c * 64 + byte] >> (4 * half) & 15;
    float d = half_to_float(((const uint16_t *)b.d)[i / 256 * 16 + lane]);
    if (w->scheme == DN_Q6K) {
        q |= (b.h[g * 128 + c / 2 * 64 + byte] >> (c % 2 * 4 + 2 * half) & 3) << 4;
        return d * (float)((const int8_t *)b.s)[(2 * g + half) * 16 + lane] * (float)(q - 32);
    }
    if (w->scheme == DN_Q5K) q |= (b.h[g * 64 + byte] >> (2 * c + half) & 1) << 4;
    float m = half_to_float(((const uint16_t *)b.m)[i / 256 * 16 + lane]);
    return d * (float)b.s[g * 16 + lane] * (float)q - m * (float)b.mn[g * 16 + lane];
}

static void embed(const dn_weight *w, int64_t row, float *out)
{
    int64_t groups = w->k / 32;
    for (int64_t i = 0; i < w->k; i++) {
        if (w->scheme <= DN_BF16) {
            out[i] = one_float(w->scheme, w->q, row * w->k + i);
        } else if (w->layout == DN_INTERLEAVED) {
            out[i] = interleaved_value(w, row, i);
        } else {
            int is_row = w->layout == DN_ROW;
            int64_t g = i / 32, in_group = i % 32;
            int64_t at = is_row ? row * (w->k / w->group) + i / w->group : i / w->group * w->n + row;
            float d = scale_at(w->d, w->scale_f32, at), m = w->m ? scale_at(w->m, w->scale_f32, at) : 0;
            float q;
            if (w->scheme == DN_Q8) {
                q = ((const int8_t *)w->q)[is_row ? row * w->k + i : i * w->n + row];
            } else {
                int64_t byte = is_row ? (row * groups + g) * 16 + in_group % 16 : (g * 16 + in_group % 16) * w->n + row;
                q = (float)((((const uint8_t *)w->q)[byte] >> (in_group / 16 * 4) & 15) - w->zero);
            }
            out[i] = d * q + m;
        }
    }
}
