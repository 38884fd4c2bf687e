/* AVX-512 with VNNI: 16 lanes are one register. */
#ifndef DN_ARCH_H
#define DN_ARCH_H
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define DN_STREAMS 4
#define DN_TOKENS 8
#define DN_PREFETCH 1024
#define DN_SIGNED_BIAS 128 /* vpdpbusd takes unsigned weights: w + 128 */
#define DN_VECTORS 4

typedef __m512 v16f;
typedef __m512i v16i;
typedef __m512i w64;

#define DN_INLINE static inline __attribute__((always_inline))

DN_INLINE float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
DN_INLINE uint16_t float_to_half(float f) { return (uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

DN_INLINE v16f v_set1(float a) { return _mm512_set1_ps(a); }
DN_INLINE v16f v_load(const float *p) { return _mm512_loadu_ps(p); }
DN_INLINE void v_store(float *p, v16f a) { _mm512_storeu_ps(p, a); }
DN_INLINE v16f v_add(v16f a, v16f b) { return _mm512_add_ps(a, b); }
DN_INLINE v16f v_sub(v16f a, v16f b) { return _mm512_sub_ps(a, b); }
DN_INLINE v16f v_mul(v16f a, v16f b) { return _mm512_mul_ps(a, b); }
DN_INLINE v16f v_div(v16f a, v16f b) { return _mm512_div_ps(a, b); }
DN_INLINE v16f v_max(v16f a, v16f b) { return _mm512_max_ps(a, b); }
DN_INLINE v16f v_min(v16f a, v16f b) { return _mm512_min_ps(a, b); }
DN_INLINE v16f v_abs(v16f a) { return _mm512_abs_ps(a); }
DN_INLINE v16f v_fma(v16f a, v16f b, v16f c) { return _mm512_fmadd_ps(a, b, c); }
DN_INLINE float v_sum(v16f a) { return _mm512_reduce_add_ps(a); }
DN_INLINE float v_top(v16f a) { return _mm512_reduce_max_ps(a); }
DN_INLINE v16f v_keep(v16f a, int n, float other)
{
    __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1u << (n < 0 ? 0 : n)) - 1);
    return _mm512_mask_blend_ps(mask, _mm512_set1_ps(other), a);
}

DN_INLINE v16f v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
DN_INLINE void v_store_f16(uint16_t *p, v16f a)
{
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
DN_INLINE v16f v_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
DN_INLINE v16f v_load_u8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)));
}
DN_INLINE v16f v_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
DN_INLINE void v_load_u4(const uint8_t *p, v16f *low, v16f *high)
{
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
    *low = _mm512_cvtepi32_ps(_mm512_and_si512(wide, _mm512_set1_epi32(15)));
    *high = _mm512_cvtepi32_ps(_mm512_srli_epi32(wide, 4));
}

DN_INLINE v16i i_set1(int32_t a) { return _mm512_set1_epi32(a); }
DN_INLINE v16i i_add(v16i a, v16i b) { return _mm512_add_epi32(a, b); }
DN_INLINE v16f v_from_i(v16i a) { return _mm512_cvtepi32_ps(a); }
DN_INLINE v16i i_round(v16f a) { return _mm512_cvtps_epi32(a); }
DN_INLINE int32_t i_sum(v16i a) { return _mm512_reduce_add_epi32(a); }
DN_INLINE void i_store_i8(int8_t *p, v16i a) { _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(a)); }
DN_INLINE v16f v_pow2(v16i n)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}

DN_INLINE w64 w_load(const void *p) { return _mm512_loadu_si512(p); }
DN_INLINE w64 w_low(w64 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
DN_INLINE w64 w_high(w64 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
#define w_field(a, shift, mask, up) \
    _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(a, shift), _mm512_set1_epi8(mask)), up)
DN_INLINE w64 w_or(w64 a, w64 b) { return _mm512_or_si512(a, b); }

DN_INLINE __m512i four(const int8_t *x)
{
    int32_t bits;
    memcpy(&bits, x, 4);
    return _mm512_set1_epi32(bits);
}
DN_INLINE v16i dot4(v16i acc, w64 w, const int8_t *x) { return _mm512_dpbusd_epi32(acc, w, four(x)); }
DN_INLINE v16i dot4s(v16i acc, w64 w, const int8_t *x)
{
    return _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), four(x));
}
DN_INLINE v16f v_byte(w64 w, int j)
{
    __m512i shifted = _mm512_srl_epi32(w, _mm_cvtsi32_si128(8 * j));
    return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(255)));
}
DN_INLINE v16f v_byte_signed(w64 w, int j)
{
    __m512i top = _mm512_sll_epi32(w, _mm_cvtsi32_si128(24 - 8 * j));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24));
}
#endif
