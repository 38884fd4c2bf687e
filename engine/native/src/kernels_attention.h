/* The KV cache and attention over it. A head's slots are rows of D, one behind the other (sd) or
 * with the other heads' rows between them (skd), or panels of 32 slots, each D × 32 (ds). All
 * arithmetic is in float32, whatever the cache holds. */

#include <float.h>

enum { PANEL = 32 };

DN_INLINE int64_t element_bytes_times_two(int scheme) /* int4 takes half a byte */
{
    return scheme == DN_KV_F32 ? 8 : scheme == DN_KV_F16 ? 4 : scheme == DN_KV_INT8 ? 2 : 1;
}

/* First byte of a head's region of a sequence. `start` is the sequence's first slot. */
DN_INLINE uint8_t *region(const dn_cache *c, int32_t layout, void *data, int64_t start, int32_t head)
{
    int64_t sequence = start / c->slots;
    int64_t elements = (sequence * c->kv_heads + head) * c->slots * c->head_dim;
    /* Plain arrays do not say where a sequence ends, and do not need to. */
    if (layout == DN_SKD) elements = (start * c->kv_heads + head) * c->head_dim;
    return (uint8_t *)data + elements * element_bytes_times_two(c->scheme) / 2;
}
/* Elements from a slot's row to the next. */
DN_INLINE int64_t pitch(const dn_cache *c, int32_t layout)
{
    return layout == DN_SKD ? (int64_t)c->kv_heads * c->head_dim : c->head_dim;
}
DN_INLINE uint16_t *scales_of(const dn_cache *c, uint16_t *scales, int64_t start, int32_t head)
{
    return scales + (start / c->slots * c->kv_heads + head) * c->slots;
}

static int32_t append(const dn_cache *c, int32_t is_value, int64_t slot, int32_t head, const float *x)
{
    int32_t dim = c->head_dim, layout = is_value ? c->value_layout : c->key_layout;
    int64_t start = slot / c->slots * c->slots, at = slot - start;
    uint8_t *data = region(c, layout, is_value ? c->v : c->k, start, head);
    float scale = 0, levels = c->scheme == DN_KV_INT8 ? 127.0f : c->scheme == DN_KV_INT4 ? 7.0f : 1.0f;
    float limit = c->scheme == DN_KV_F32 ? FLT_MAX : 65504.0f * levels;
    int32_t lost = 0;
    for (int32_t d = 0; d < dim; d++) lost += !(fabsf(x[d]) <= limit); /* NaN is not below anything */
    if (lost) return lost;
    if (c->scheme >= DN_KV_INT8) {
        float top = 0;
        for (int32_t d = 0; d < dim; d++) top = fabsf(x[d]) > top ? fabsf(x[d]) : top;
        uint16_t half = float_to_half(top / levels);
        scales_of(c, is_value ? c->v_scale : c->k_scale, start, head)[at] = half;
        scale = half_to_float(half);
    }
    for (int32_t d = 0; d < dim; d++) {
        int64_t i = layout == DN_DS ? (at / PANEL * dim + d) * PANEL + at % PANEL : at * pitch(c, layout) + d;
        switch (c->scheme) {
        case DN_KV_F32: ((float *)data)[i] = x[d]; break;
        case DN_KV_F16: ((uint16_t *)data)[i] = float_to_half(x[d]); break;
        case DN_KV_INT8: {
            float q = scale > 0 ? rintf(x[d] / scale) : 0;
            ((int8_t *)data)[i] = (int8_t)(q > 127 ? 127 : q < -127 ? -127 : q);
            break;
        }
        default: {
            float q = scale > 0 ? rintf(x[d] / scale) : 0;
            uint8_t nibble = (uint8_t)((q > 7 ? 7 : q < -7 ? -7 : q) + 8);
            int64_t byte = layout == DN_SD ? at * (dim / 2) + d % (dim / 2) : (at / PANEL * dim + d) * 16 + at % 16;
            int high = layout == DN_SD ? d >= dim / 2 : at % PANEL >= 16;
            data[byte] = high ? (uint8_t)((data[byte] & 15) | nibble << 4) : (uint8_t)((data[byte] & 0xf0) | nibble);
        }
        }
    }
    return 0;
}

/* 16 elements from index i, not yet scaled. int4 is loaded by pairs, see below. */
DN_INLINE v16f kv_load(int scheme, const uint8_t *data, int64_t i)
{
    if (scheme == DN_KV_F32) return v_load((const float *)data + i);
    if (scheme == DN_KV_F16) return v_load_f16((const uint16_t *)data + i);
    return v_load_i8((const int8_t *)data + i);
}
/* Ask for what comes DN_PREFETCH bytes behind element i. */
DN_INLINE void kv_prefetch(int scheme, const uint8_t *data, int64_t i)
{
    __builtin_prefetch(data + i * element_bytes_times_two(scheme) / 2 + DN_PREFETCH);
}
/* Ask for element i of what is read after this, into the second level: while the keys of a chunk
 * are read its values come, and while those are, the keys of the chunk behind it. */
DN_INLINE void kv_announce(int scheme, const uint8_t *then, int64_t i)
{
    __builtin_prefetch(then + i * element_bytes_times_two(scheme) / 2, 0, 2);
}
/* 16 bytes of int4: the two halves that share them */
DN_INLINE void kv_load_pair(const uint8_t *p, v16f *low, v16f *high)
{
    v16f eight = v_set1(8);
    v_load_u4(p, low, high);
    *low = v_sub(*low, eight);
    *high = v_sub(*high, eight);
}

/* scores[h][slot - from] for `heads` queries (heads, D); rows of D. `then`: see kv_announce. */
DN_INLINE void scores_rows(int scheme, int heads, const uint8_t *k, const uint8_t *then, int64_t row,
                           int32_t dim, const float *q, int32_t from, int32_t to, float *scores)
{
    for (int32_t slot = from; slot < to; slot++) {
        v16f sum[4];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h] = v_set1(0);
        if (scheme == DN_KV_INT4) {
            for (int32_t d = 0; d < dim / 2; d += 16) {
                v16f a, b;
                kv_announce(scheme, then, slot * row + 2 * d);
                kv_load_pair(k + slot * row / 2 + d, &a, &b);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) {
                    sum[h] = v_fma(a, v_load(q + h * dim + d), sum[h]);
                    sum[h] = v_fma(b, v_load(q + h * dim + dim / 2 + d), sum[h]);
                }
            }
        } else {
            for (int32_t d = 0; d < dim; d += 16) {
                kv_announce(scheme, then, slot * row + d);
                v16f a = kv_load(scheme, k, slot * row + d);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) sum[h] = v_fma(a, v_load(q + h * dim + d), sum[h]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) scores[h * DN_CHUNK + slot - from] = v_sum(sum[h]);
    }
}

/* The same over panels: lanes are slots. `from` is a multiple of 32; whole panels are computed. */
DN_INLINE void scores_panels(int scheme, int heads, const uint8_t *k, const uint8_t *then, int32_t dim,
                             const float *q, int32_t from, int32_t to, float *scores)
{
    for (int32_t slot = from; slot < to; slot += PANEL) {
        v16f sum[4][2];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h][0] = sum[h][1] = v_set1(0);
        int64_t at = (int64_t)(slot / PANEL) * dim * PANEL;
        for (int32_t d = 0; d < dim; d++, at += PANEL) {
            v16f a, b;
            kv_prefetch(scheme, k, at);
            kv_announce(scheme, then, at);
            if (scheme == DN_KV_INT4) {
                kv_load_pair(k + at / 2, &a, &b);
            } else {
                a = kv_load(scheme, k, at);
                b = kv_load(scheme, k, at + 16);
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                v16f x = v_set1(q[h * dim + d]);
                sum[h][0] = v_fma(a, x, sum[h][0]);
                sum[h][1] = v_fma(b, x, sum[h][1]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            v_store(scores + h * DN_CHUNK + slot - from, sum[h][0]);
            v_store(scores + h * DN_CHUNK + slot - from + 16, sum[h][1]);
        }
    }
}

/* o[h][d] = Σ_slot p[h][slot] v[slot][d]; rows of D, some vectors of D at a time. */
DN_INLINE void mix_rows(int scheme, int heads, const uint8_t *v, const uint8_t *then, int64_t row,
                        int32_t dim, const float *p, int32_t from, int32_t to, float *o, int64_t stride)
{
    if (scheme == DN_KV_INT4) {
        for (int32_t d = 0; d < dim / 2; d += 16) {
            v16f low[4], high[4];
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) low[h] = high[h] = v_set1(0);
            for (int32_t slot = from; slot < to; slot++) {
                v16f a, b;
                kv_announce(scheme, then, slot * row + 2 * d);
                kv_load_pair(v + slot * row / 2 + d, &a, &b);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) {
                    v16f weight = v_set1(p[h * DN_CHUNK + slot - from]);
                    low[h] = v_fma(a, weight, low[h]);
                    high[h] = v_fma(b, weight, high[h]);
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                v_store(o + h * stride + d, low[h]);
                v_store(o + h * stride + dim / 2 + d, high[h]);
            }
        }
        return;
    }
    int32_t d = 0;
    for (; d + 16 * DN_VECTORS <= dim; d += 16 * DN_VECTORS) {
        v16f sum[4][DN_VECTORS];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < DN_VECTORS; i++) sum[h][i] = v_set1(0);
        for (int32_t slot = from; slot < to; slot++) {
            v16f value[DN_VECTORS];
            for (int i = 0; i < DN_VECTORS; i += 2) kv_announce(scheme, then, slot * row + d + 16 * i);
#pragma GCC unroll 4
            for (int i = 0; i < DN_VECTORS; i++) value[i] = kv_load(scheme, v, slot * row + d + 16 * i);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                v16f weight = v_set1(p[h * DN_CHUNK + slot - from]);
#pragma GCC unroll 4
                for (int i = 0; i < DN_VECTORS; i++) sum[h][i] = v_fma(value[i], weight, sum[h][i]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < DN_VECTORS; i++) v_store(o + h * stride + d + 16 * i, sum[h][i]);
    }
    for (; d < dim; d += 16) {
        v16f sum[4];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h] = v_set1(0);
        for (int32_t slot = from; slot < to; slot++) {
            v16f value = kv_load(scheme, v, slot * row + d);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h] = v_fma(value, v_set1(p[h * DN_CHUNK + slot - from]), sum[h]);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) v_store(o + h * stride + d, sum[h]);
    }
}

/* The same over panels. Slots from `to` on may hold anything, NaN included: they are cut off. */
DN_INLINE void mix_panels(int scheme, int heads, const uint8_t *v, const uint8_t *then, int32_t dim,
                          const float *p, int32_t from, int32_t to, float *o, int64_t stride)
{
    for (int32_t d = 0; d < dim; d++) {
        v16f sum[4];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h] = v_set1(0);
        for (int32_t slot = from; slot < to; slot += PANEL) {
            int64_t at = ((int64_t)(slot / PANEL) * dim + d) * PANEL;
            v16f a, b;
            kv_announce(scheme, then, at);
            if (scheme == DN_KV_INT4) {
                kv_load_pair(v + at / 2, &a, &b);
            } else {
                a = kv_load(scheme, v, at);
                b = kv_load(scheme, v, at + 16);
            }
            if (slot + PANEL > to) {
                a = v_keep(a, to - slot, 0);
                b = v_keep(b, to - slot - 16, 0);
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                sum[h] = v_fma(a, v_load(p + h * DN_CHUNK + slot - from), sum[h]);
                sum[h] = v_fma(b, v_load(p + h * DN_CHUNK + slot - from + 16), sum[h]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) o[h * stride + d] = v_sum(sum[h]);
    }
}

/* Scales of up to 16 slots; those behind the last one may lie outside the block. */
DN_INLINE v16f some_scales(const uint16_t *p, int32_t n)
{
    if (n >= 16) return v_load_f16(p);
    uint16_t few[16] = {0};
    memcpy(few, p, sizeof(uint16_t) * (size_t)n);
    return v_load_f16(few);
}

/* Up to four heads that share a key/value head, over slots [from, to), from a multiple of 256. */
DN_INLINE void attend_heads(int scheme, int heads, const dn_cache *c, int64_t start, int32_t head,
                            const float *q, const float *prefix, int32_t keep, int32_t from,
                            int32_t to, float *scores, float *part)
{
    int32_t dim = c->head_dim, count = to - from, kept = 0;
    const uint8_t *k = region(c, c->key_layout, c->k, start, head);
    const uint8_t *v = region(c, c->value_layout, c->v, start, head);
    int64_t row = pitch(c, c->key_layout), value_row = pitch(c, c->value_layout);
    int rows = c->key_layout != DN_DS;
    if (keep > from) { /* slots of the kept prefix are read with queries of their own */
        kept = keep < to ? keep - from : count;
        if (rows) scores_rows(scheme, heads, k, v, row, dim, prefix, from, from + kept, scores);
        else scores_panels(scheme, heads, k, v, dim, prefix, from, from + kept, scores);
    }
    if (kept < count) {
        if (rows) {
            scores_rows(scheme, heads, k, v, row, dim, q, from + kept, to, scores + kept);
        } else if (!kept) {
            scores_panels(scheme, heads, k, v, dim, q, from, to, scores);
        } else { /* the panel that both share is computed twice */
            float mixed[4 * DN_CHUNK];
            scores_panels(scheme, heads, k, v, dim, q, from, to, mixed);
            for (int h = 0; h < heads; h++)
                memcpy(scores + h * DN_CHUNK + kept, mixed + h * DN_CHUNK + kept, sizeof(float) * (size_t)(count - kept));
        }
    }
    int64_t stride = dim + 2;
    const uint16_t *ks = c->scheme >= DN_KV_INT8 ? scales_of(c, c->k_scale, start, head) + from : 0;
    const uint16_t *vs = c->scheme >= DN_KV_INT8 ? scales_of(c, c->v_scale, start, head) + from : 0;
    v16f lowest = v_set1(-INFINITY);
    for (int h = 0; h < heads; h++) {
        float *line = scores + h * DN_CHUNK;
        v16f top = lowest;
        for (int32_t i = 0; i < count; i += 16) {
            v16f s = v_load(line + i);
            if (ks) s = v_mul(s, some_scales(ks + i, count - i));
            if (i + 16 > count) s = v_keep(s, count - i, -INFINITY);
            v_store(line + i, s);
            top = v_max(top, s);
        }
        float highest = v_top(top);
        v16f sum = v_set1(0);
        for (int32_t i = 0; i < count; i += 16) {
            v16f e = v_exp(v_sub(v_load(line + i), v_set1(highest)));
            if (i + 16 > count) e = v_keep(e, count - i, 0);
            sum = v_add(sum, e);
            if (vs) e = v_mul(e, some_scales(vs + i, count - i));
            v_store(line + i, e);
        }
        for (int32_t i = (count + 15) / 16 * 16; i < (count + 31) / 32 * 32; i += 16) v_store(line + i, v_set1(0));
        part[h * stride + dim] = highest;
        part[h * stride + dim + 1] = v_sum(sum);
    }
    const uint8_t *then = k + DN_CHUNK * row * element_bytes_times_two(scheme) / 2;
    if (c->value_layout != DN_DS) mix_rows(scheme, heads, v, then, value_row, dim, scores, from, to, part, stride);
    else mix_panels(scheme, heads, v, then, dim, scores, from, to, part, stride);
}

DN_INLINE void attend_group(int scheme, const dn_cache *c, int64_t start, int32_t head, int32_t group,
                            const float *q, const float *prefix, int32_t keep, int32_t from,
                            int32_t to, float *scores, float *part)
{
    int32_t dim = c->head_dim;
    while (group > 0) {
        int now = group > 4 ? 4 : group;
#define HEADS(n) \
    case n: attend_heads(scheme, n, c, start, head, q, prefix, keep, from, to, scores, part); break;
        switch (now) { HEADS(1) HEADS(2) HEADS(3) HEADS(4) }
#undef HEADS
        group -= now;
        q += now * dim;
        prefix += prefix ? now * dim : 0;
        part += now * (dim + 2);
    }
}

/* `scores` has room for 4 · DN_CHUNK floats; see dn.h. */
static void attend(const dn_cache *c, int64_t start, int32_t head, int32_t group, const float *q,
                   const float *prefix, int32_t keep, int32_t from, int32_t to, float *scores, float *part)
{
#define CASE(SCHEME) \
    case SCHEME: attend_group(SCHEME, c, start, head, group, q, prefix, keep, from, to, scores, part); break;
    switch (c->scheme) { CASE(DN_KV_F32) CASE(DN_KV_F16) CASE(DN_KV_INT8) CASE(DN_KV_INT4) }
#undef CASE
}

/* Parts of one head over consecutive chunks → its output: Σ e^(max_c − max) o_c / Σ e^(…) sum_c */
static void combine(float *out, const float *parts, int32_t count, int64_t stride, int32_t dim)
{
    float highest = -INFINITY, total = 0;
    for (int32_t c = 0; c < count; c++) highest = fmaxf(highest, parts[c * stride + dim]);
    for (int32_t d = 0; d < dim; d += 16) v_store(out + d, v_set1(0));
    for (int32_t c = 0; c < count; c++) {
        const float *part = parts + c * stride;
        float weight = expf(part[dim] - highest);
        total += weight * part[dim + 1];
        for (int32_t d = 0; d < dim; d += 16) v_store(out + d, v_fma(v_load(part + d), v_set1(weight), v_load(out + d)));
    }
    v16f inverse = v_set1(1.0f / total);
    for (int32_t d = 0; d < dim; d += 16) v_store(out + d, v_mul(v_load(out + d), inverse));
}
