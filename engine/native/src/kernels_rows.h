/* Weights that lie plainly: unquantised rows, rows and columns of quantised groups, and one row of
 * any weight for the embedding. See kernels_linear.h for the layout that is built for speed. */

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
