/* Portable primitives in the vector extensions of gcc and clang: the compiler makes of 16 lanes
 * what the baseline of its target has.
 *
 * Every file of this folder defines the same names, so that two of them diff well:
 *   v16f 16 floats · v16i 16 int32 · w64 64 bytes of weights, seen as 16 rows of 4 inputs
 */
#ifndef DN_ARCH_H
#define DN_ARCH_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#define DN_STREAMS 2          /* row blocks read side by side in a matrix-vector product */
#define DN_TOKENS 2           /* tokens that share an unpacked group in a matrix-matrix product */
#define DN_PREFETCH 1024      /* bytes ahead */
#define DN_SIGNED_BIAS 0      /* what dot4s adds to a signed weight, to be taken off again */
#define DN_VECTORS 2          /* 16-lane vectors of a value row kept in registers at a time */

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint8_t w64 __attribute__((vector_size(64)));
typedef uint8_t b16 __attribute__((vector_size(16)));
typedef int8_t s16 __attribute__((vector_size(16)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef int16_t h32 __attribute__((vector_size(64)));

#define DN_INLINE static inline __attribute__((always_inline))
#define CONVERT __builtin_convertvector

DN_INLINE float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu, bits;
    float f;
    if (rest >= 0x7c00u) {
        bits = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
    } else if (rest >= 0x400u) {
        bits = sign | ((rest + 0x1c000u) << 13);
    } else { /* subnormal: rest · 2^-24, exact as a float */
        f = (float)rest * 5.9604644775390625e-08f;
        return sign ? -f : f;
    }
    memcpy(&f, &bits, 4);
    return f;
}

DN_INLINE uint16_t float_to_half(float f) /* to nearest, ties to even */
{
    uint32_t x;
    memcpy(&x, &f, 4);
    uint32_t sign = (x >> 16) & 0x8000u;
    x &= 0x7fffffffu;
    if (x > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (x >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (x < 0x38800000u) { /* subnormal: let the float unit round it */
        float a;
        memcpy(&a, &x, 4);
        a += 0.5f;
        memcpy(&x, &a, 4);
        return (uint16_t)(sign | (x - 0x3f000000u));
    }
    return (uint16_t)(sign | ((x - 0x38000000u + 0xfffu + ((x >> 13) & 1u)) >> 13));
}

DN_INLINE v16f v_set1(float a) { return a - (v16f){0}; }
DN_INLINE v16f v_load(const float *p) { v16f r; memcpy(&r, p, 64); return r; }
DN_INLINE void v_store(float *p, v16f a) { memcpy(p, &a, 64); }
DN_INLINE v16f v_add(v16f a, v16f b) { return a + b; }
DN_INLINE v16f v_sub(v16f a, v16f b) { return a - b; }
DN_INLINE v16f v_mul(v16f a, v16f b) { return a * b; }
DN_INLINE v16f v_div(v16f a, v16f b) { return a / b; }
DN_INLINE v16f v_select(v16i mask, v16f a, v16f b) { return (v16f)((mask & (v16i)a) | (~mask & (v16i)b)); }
DN_INLINE v16f v_max(v16f a, v16f b) { return v_select(a > b, a, b); }
DN_INLINE v16f v_min(v16f a, v16f b) { return v_select(a < b, a, b); }
DN_INLINE v16f v_abs(v16f a) { return (v16f)((v16i)a & 0x7fffffff); }
DN_INLINE v16f v_fma(v16f a, v16f b, v16f c) { return a * b + c; }
DN_INLINE float v_sum(v16f a)
{
    float s[16];
    v_store(s, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}
DN_INLINE float v_top(v16f a)
{
    float s[16];
    v_store(s, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] = s[i] > s[i + width] ? s[i] : s[i + width];
    return s[0];
}
DN_INLINE v16f v_keep(v16f a, int n, float other) /* lanes from n on become `other` */
{
    v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return v_select(lanes < n, a, v_set1(other));
}

DN_INLINE v16f v_load_f16(const uint16_t *p)
{
    h16 h;
    memcpy(&h, p, 32);
    v16u wide = CONVERT(h, v16u), magnitude = (wide & 0x7fff) << 13;
    v16f value = (v16f)magnitude * 5.192296858534828e33f; /* 2^112: the exponents' biases differ */
    v16i special = (wide & 0x7c00) == 0x7c00; /* infinity and NaN stay what they are */
    return (v16f)((v16u)value | ((v16u)special & (0x7f800000u | magnitude)) | (wide & 0x8000) << 16);
}
DN_INLINE void v_store_f16(uint16_t *p, v16f a)
{
    for (int i = 0; i < 16; i++) p[i] = float_to_half(a[i]);
}
DN_INLINE v16f v_load_bf16(const uint16_t *p)
{
    h16 h;
    memcpy(&h, p, 32);
    return (v16f)(CONVERT(h, v16u) << 16);
}
DN_INLINE v16f v_load_u8(const uint8_t *p) { b16 b; memcpy(&b, p, 16); return CONVERT(b, v16f); }
DN_INLINE v16f v_load_i8(const int8_t *p) { s16 b; memcpy(&b, p, 16); return CONVERT(b, v16f); }
/* 16 bytes → their low nibbles, their high nibbles */
DN_INLINE void v_load_u4(const uint8_t *p, v16f *low, v16f *high)
{
    b16 b;
    memcpy(&b, p, 16);
    *low = CONVERT(b & 15, v16f);
    *high = CONVERT(b >> 4, v16f);
}

DN_INLINE v16i i_set1(int32_t a) { return a - (v16i){0}; }
DN_INLINE v16i i_add(v16i a, v16i b) { return a + b; }
DN_INLINE v16f v_from_i(v16i a) { return CONVERT(a, v16f); }
DN_INLINE v16i i_round(v16f a) /* to nearest, ties to even, for |a| < 2^22 */
{
    v16f shift = v_set1(12582912.0f); /* 1.5 · 2^23: what is left of the point stays */
    return (v16i)(a + shift) - (v16i)shift;
}
DN_INLINE int32_t i_sum(v16i a)
{
    int32_t s = 0;
    for (int i = 0; i < 16; i++) s += a[i];
    return s;
}
DN_INLINE void i_store_i8(int8_t *p, v16i a) { s16 b = CONVERT(a, s16); memcpy(p, &b, 16); }
DN_INLINE v16f v_pow2(v16i n) { return (v16f)((n + 127) << 23); } /* 2^n for -126 ≤ n ≤ 127 */

DN_INLINE w64 w_load(const void *p) { w64 r; memcpy(&r, p, 64); return r; }
DN_INLINE w64 w_low(w64 a) { return a & 15; }
DN_INLINE w64 w_high(w64 a) { return a >> 4; }
/* ((a >> shift) & mask) << up, byte by byte */
#define w_field(a, shift, mask, up) ((((a) >> (uint8_t)(shift)) & (uint8_t)(mask)) << (uint8_t)(up))
DN_INLINE w64 w_or(w64 a, w64 b) { return a | b; }

/* row += Σ_j w[row][j] x[j] for four int8 x; the weights are 0..127, or int8 in dot4s */
DN_INLINE v16i dot4s(v16i acc, w64 w, const int8_t *x)
{
    /* Products of bytes fit 16 bits, and so do sums of two: |-128 · 127 · 2| < 2^15. Few machines
     * multiply 32-bit lanes as fast as 16-bit ones. */
    uint32_t even = (uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16;
    uint32_t odd = (uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16;
    h32 low = ((h32)w << 8) >> 8, high = (h32)w >> 8;
    v16i sums = (v16i)(low * (h32)(even - (v16u){0}) + high * (h32)(odd - (v16u){0}));
    return acc + (sums << 16 >> 16) + (sums >> 16);
}
DN_INLINE v16i dot4(v16i acc, w64 w, const int8_t *x) { return dot4s(acc, w, x); }
/* weight j of each row as a float */
DN_INLINE v16f v_byte(w64 w, int j) { return CONVERT((v16i)((v16u)w >> (8 * j) & 255), v16f); }
DN_INLINE v16f v_byte_signed(w64 w, int j) { return CONVERT((v16i)w << (24 - 8 * j) >> 24, v16f); }
#endif
