/* Kernels over vectors of floats: norms, activations, RoPE, and the quantisation of activations. */

#include <float.h>

DN_INLINE v16f v_exp(v16f x)
{
    /* 2^n · e^r with |r| ≤ ln 2 / 2; the polynomial is the Taylor series to r^7, whose error is
     * below float32 rounding there. Inputs below -87 give the smallest normal numbers, not 0.
     * x stands second: of a NaN, minimum and maximum give the second operand, so NaN stays. */
    x = v_max(v_set1(-87.0f), v_min(v_set1(88.0f), x));
    v16i n = i_round(v_mul(x, v_set1(1.44269504088896341f)));
    v16f f = v_from_i(n);
    v16f r = v_fma(f, v_set1(-0.693359375f), x);
    r = v_fma(f, v_set1(2.12194440e-4f), r);
    v16f p = v_set1(1.0f / 5040);
    p = v_fma(p, r, v_set1(1.0f / 720));
    p = v_fma(p, r, v_set1(1.0f / 120));
    p = v_fma(p, r, v_set1(1.0f / 24));
    p = v_fma(p, r, v_set1(1.0f / 6));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_mul(p, v_pow2(n));
}

/* x / √(mean x² + ε) · w, the mean in float32 over 16 partial sums */
static void rmsnorm(float *out, const float *x, const float *w, int32_t width, float eps)
{
    v16f squares = v_set1(0);
    int32_t i = 0;
    for (; i + 16 <= width; i += 16) {
        v16f a = v_load(x + i);
        squares = v_fma(a, a, squares);
    }
    float total = v_sum(squares);
    for (int32_t j = i; j < width; j++) total += x[j] * x[j];
    float scale = 1.0f / sqrtf(total / (float)width + eps);
    v16f s = v_set1(scale);
    for (i = 0; i + 16 <= width; i += 16) v_store(out + i, v_mul(v_mul(v_load(x + i), s), v_load(w + i)));
    for (; i < width; i++) out[i] = x[i] * scale * w[i];
}

/* (k,) → int8, one scale per 32 inputs and the sums of q over 16. k is a multiple of 32.
 * `t` has two sums a group: inputs 0..15 and 16..31; `u` is the scale times both. */
static void quantise(int8_t *q, float *s, int32_t *t, float *u, const float *x, int32_t k)
{
    for (int32_t b = 0; b < k / 32; b++, x += 32, q += 32) {
        v16f low = v_load(x), high = v_load(x + 16);
        float top = v_top(v_max(v_abs(low), v_abs(high)));
        float steps = 127.0f / top; /* infinite for no or next to no input: then q is 0 */
        v16f inverse = v_set1(steps <= FLT_MAX ? steps : 0.0f);
        /* a maximum passes NaN over; 0 · NaN and 0 · infinity do not */
        float broken = v_sum(v_mul(v_add(v_mul(low, v_set1(0)), v_mul(high, v_set1(0))), v_set1(0)));
        if (broken != 0.0f) inverse = v_set1(0), low = high = inverse;
        v16i a = i_round(v_mul(low, inverse)), c = i_round(v_mul(high, inverse));
        i_store_i8(q, a);
        i_store_i8(q + 16, c);
        s[b] = top / 127.0f + broken;
        t[2 * b] = i_sum(a);
        t[2 * b + 1] = i_sum(c);
        u[b] = s[b] * (float)(t[2 * b] + t[2 * b + 1]);
    }
}

/* halves rotated: (x_i, x_{i + D/2}) by an angle whose cosine and sine are given, (D/2,) each */
static void rope(float *out, const float *x, const float *cosine, const float *sine, int32_t heads,
                 int32_t head_dim)
{
    int32_t half = head_dim / 2;
    for (int32_t head = 0; head < heads; head++, x += head_dim, out += head_dim) {
        int32_t i = 0;
        for (; i + 16 <= half; i += 16) {
            v16f a = v_load(x + i), b = v_load(x + half + i);
            v16f c = v_load(cosine + i), d = v_load(sine + i);
            v_store(out + i, v_sub(v_mul(a, c), v_mul(b, d)));
            v_store(out + half + i, v_add(v_mul(b, c), v_mul(a, d)));
        }
        for (; i < half; i++) {
            float a = x[i], b = x[half + i];
            out[i] = a * cosine[i] - b * sine[i];
            out[half + i] = b * cosine[i] + a * sine[i];
        }
    }
}

DN_INLINE v16f silu(v16f g)
{
    v16f one = v_set1(1.0f);
    return v_div(g, v_add(one, v_exp(v_sub(v_set1(0), g))));
}

static void swiglu(float *out, const float *gate, const float *up, int32_t n)
{
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) v_store(out + i, v_mul(silu(v_load(gate + i)), v_load(up + i)));
    if (i < n) { /* the same arithmetic for the rest, in a full vector */
        float g[16] = {0}, u[16] = {0}, y[16];
        memcpy(g, gate + i, sizeof(float) * (size_t)(n - i));
        memcpy(u, up + i, sizeof(float) * (size_t)(n - i));
        v_store(y, v_mul(silu(v_load(g)), v_load(u)));
        memcpy(out + i, y, sizeof(float) * (size_t)(n - i));
    }
}

static void add(float *out, const float *a, const float *b, int32_t n)
{
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) v_store(out + i, v_add(v_load(a + i), v_load(b + i)));
    for (; i < n; i++) out[i] = a[i] + b[i];
}

static int32_t finite(const float *x, int32_t n)
{
    /* 0 · x is 0 for every number and NaN for NaN and infinity */
    v16f zero = v_set1(0), all = zero;
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) all = v_fma(v_load(x + i), zero, all);
    float total = v_sum(all);
    for (; i < n; i++) total += x[i] * 0.0f;
    return total == 0.0f;
}
