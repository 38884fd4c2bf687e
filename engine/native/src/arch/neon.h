/* NEON: 16 lanes are four registers. The same file serves the dot-product and the i8mm builds,
 * which differ in dot4 alone. */
#ifndef DN_ARCH_H
#define DN_ARCH_H
#include <arm_neon.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define DN_STREAMS 2
#define DN_TOKENS 4
#define DN_PREFETCH 512
#define DN_SIGNED_BIAS 0
#define DN_VECTORS 2

typedef struct { float32x4_t v[4]; } v16f;
typedef struct { int32x4_t v[4]; } v16i;
typedef struct { uint8x16_t v[4]; } w64;

#define DN_INLINE static inline __attribute__((always_inline))
#define QUARTERS for (int part = 0; part < 4; part++)

DN_INLINE float half_to_float(uint16_t h)
{
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}
DN_INLINE uint16_t float_to_half(float f)
{
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(f))), 0);
}

DN_INLINE v16f v_set1(float a) { v16f r; QUARTERS r.v[part] = vdupq_n_f32(a); return r; }
DN_INLINE v16f v_load(const float *p) { v16f r; QUARTERS r.v[part] = vld1q_f32(p + 4 * part); return r; }
DN_INLINE void v_store(float *p, v16f a) { QUARTERS vst1q_f32(p + 4 * part, a.v[part]); }
DN_INLINE v16f v_add(v16f a, v16f b) { QUARTERS a.v[part] = vaddq_f32(a.v[part], b.v[part]); return a; }
DN_INLINE v16f v_sub(v16f a, v16f b) { QUARTERS a.v[part] = vsubq_f32(a.v[part], b.v[part]); return a; }
DN_INLINE v16f v_mul(v16f a, v16f b) { QUARTERS a.v[part] = vmulq_f32(a.v[part], b.v[part]); return a; }
DN_INLINE v16f v_div(v16f a, v16f b) { QUARTERS a.v[part] = vdivq_f32(a.v[part], b.v[part]); return a; }
DN_INLINE v16f v_max(v16f a, v16f b) { QUARTERS a.v[part] = vmaxq_f32(a.v[part], b.v[part]); return a; }
DN_INLINE v16f v_min(v16f a, v16f b) { QUARTERS a.v[part] = vminq_f32(a.v[part], b.v[part]); return a; }
DN_INLINE v16f v_abs(v16f a) { QUARTERS a.v[part] = vabsq_f32(a.v[part]); return a; }
DN_INLINE v16f v_fma(v16f a, v16f b, v16f c)
{
    QUARTERS c.v[part] = vfmaq_f32(c.v[part], a.v[part], b.v[part]);
    return c;
}
DN_INLINE float v_sum(v16f a)
{
    return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])));
}
DN_INLINE float v_top(v16f a)
{
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
DN_INLINE v16f v_keep(v16f a, int n, float other)
{
    const int32_t first[4] = {0, 1, 2, 3};
    int32x4_t lanes = vld1q_s32(first);
    QUARTERS {
        uint32x4_t kept = vcltq_s32(lanes, vdupq_n_s32(n - 4 * part));
        a.v[part] = vbslq_f32(kept, a.v[part], vdupq_n_f32(other));
    }
    return a;
}

DN_INLINE v16f v_load_f16(const uint16_t *p)
{
    v16f r;
    QUARTERS r.v[part] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * part)));
    return r;
}
DN_INLINE void v_store_f16(uint16_t *p, v16f a)
{
    QUARTERS vst1_u16(p + 4 * part, vreinterpret_u16_f16(vcvt_f16_f32(a.v[part])));
}
DN_INLINE v16f v_load_bf16(const uint16_t *p)
{
    v16f r;
    QUARTERS r.v[part] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * part), 16));
    return r;
}
DN_INLINE v16f widen_u8(uint8x16_t x)
{
    uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
    v16f r;
    r.v[0] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(low)));
    r.v[1] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(low)));
    r.v[2] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(high)));
    r.v[3] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)));
    return r;
}
DN_INLINE v16f v_load_u8(const uint8_t *p) { return widen_u8(vld1q_u8(p)); }
DN_INLINE v16f v_load_i8(const int8_t *p)
{
    int8x16_t x = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
    v16f r;
    r.v[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    r.v[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
    r.v[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    r.v[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    return r;
}
DN_INLINE void v_load_u4(const uint8_t *p, v16f *low, v16f *high)
{
    uint8x16_t x = vld1q_u8(p);
    *low = widen_u8(vandq_u8(x, vdupq_n_u8(15)));
    *high = widen_u8(vshrq_n_u8(x, 4));
}

DN_INLINE v16i i_set1(int32_t a) { v16i r; QUARTERS r.v[part] = vdupq_n_s32(a); return r; }
DN_INLINE v16i i_add(v16i a, v16i b) { QUARTERS a.v[part] = vaddq_s32(a.v[part], b.v[part]); return a; }
DN_INLINE v16f v_from_i(v16i a) { v16f r; QUARTERS r.v[part] = vcvtq_f32_s32(a.v[part]); return r; }
DN_INLINE v16i i_round(v16f a) { v16i r; QUARTERS r.v[part] = vcvtnq_s32_f32(a.v[part]); return r; }
DN_INLINE int32_t i_sum(v16i a)
{
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
DN_INLINE void i_store_i8(int8_t *p, v16i a)
{
    int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
    int16x8_t high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
DN_INLINE v16f v_pow2(v16i n)
{
    v16f r;
    QUARTERS r.v[part] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[part], vdupq_n_s32(127)), 23));
    return r;
}

DN_INLINE w64 w_load(const void *p)
{
    w64 r;
    QUARTERS r.v[part] = vld1q_u8((const uint8_t *)p + 16 * part);
    return r;
}
DN_INLINE w64 w_low(w64 a) { QUARTERS a.v[part] = vandq_u8(a.v[part], vdupq_n_u8(15)); return a; }
DN_INLINE w64 w_high(w64 a) { QUARTERS a.v[part] = vshrq_n_u8(a.v[part], 4); return a; }
DN_INLINE w64 w_field(w64 a, int shift, int mask, int up)
{
    QUARTERS {
        uint8x16_t down = vshlq_u8(a.v[part], vdupq_n_s8((int8_t)-shift));
        a.v[part] = vshlq_u8(vandq_u8(down, vdupq_n_u8((uint8_t)mask)), vdupq_n_s8((int8_t)up));
    }
    return a;
}
DN_INLINE w64 w_or(w64 a, w64 b) { QUARTERS a.v[part] = vorrq_u8(a.v[part], b.v[part]); return a; }

DN_INLINE int8x16_t four(const int8_t *x)
{
    int32_t bits;
    memcpy(&bits, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(bits));
}
DN_INLINE v16i dot4s(v16i acc, w64 w, const int8_t *x)
{
    int8x16_t v = four(x);
    QUARTERS {
        int8x16_t rows = vreinterpretq_s8_u8(w.v[part]);
#if defined(__ARM_FEATURE_DOTPROD)
        acc.v[part] = vdotq_s32(acc.v[part], rows, v);
#else
        /* Four products a row: two sums of two in 16 bits (at most 128 · 127 · 2, which fits once
         * widened first), then pairs of 32-bit sums. */
        int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(rows), vget_low_s8(v)));
        int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(rows), vget_high_s8(v)));
        acc.v[part] = vaddq_s32(acc.v[part], vpaddq_s32(low, high));
#endif
    }
    return acc;
}
DN_INLINE v16i dot4(v16i acc, w64 w, const int8_t *x)
{
#if defined(__ARM_FEATURE_MATMUL_INT8)
    int8x16_t v = four(x);
    QUARTERS acc.v[part] = vusdotq_s32(acc.v[part], w.v[part], v);
    return acc;
#else
    return dot4s(acc, w, x); /* 0..127 is the same number signed */
#endif
}
DN_INLINE v16f v_byte(w64 w, int j)
{
    v16f r;
    QUARTERS {
        uint32x4_t lanes = vshlq_u32(vreinterpretq_u32_u8(w.v[part]), vdupq_n_s32(-8 * j));
        r.v[part] = vcvtq_f32_u32(vandq_u32(lanes, vdupq_n_u32(255)));
    }
    return r;
}
DN_INLINE v16f v_byte_signed(w64 w, int j)
{
    v16f r;
    QUARTERS {
        int32x4_t top = vshlq_s32(vreinterpretq_s32_u8(w.v[part]), vdupq_n_s32(24 - 8 * j));
        r.v[part] = vcvtq_f32_s32(vshrq_n_s32(top, 24));
    }
    return r;
}
#endif
