/* AVX2 with FMA and F16C: 16 lanes are two registers. */
#ifndef DN_ARCH_H
#define DN_ARCH_H
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define DN_STREAMS 4
#define DN_TOKENS 4
#define DN_PREFETCH 512
#define DN_SIGNED_BIAS 0
#define DN_VECTORS 2

typedef struct { __m256 a, b; } v16f;
typedef struct { __m256i a, b; } v16i;
typedef struct { __m256i a, b; } w64;

#define DN_INLINE static inline __attribute__((always_inline))
#define BOTH(type, expr_a, expr_b) ((type){(expr_a), (expr_b)})

DN_INLINE float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
DN_INLINE uint16_t float_to_half(float f) { return (uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

DN_INLINE v16f v_set1(float x) { return BOTH(v16f, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
DN_INLINE v16f v_load(const float *p) { return BOTH(v16f, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
DN_INLINE void v_store(float *p, v16f x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
DN_INLINE v16f v_add(v16f x, v16f y) { return BOTH(v16f, _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
DN_INLINE v16f v_sub(v16f x, v16f y) { return BOTH(v16f, _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
DN_INLINE v16f v_mul(v16f x, v16f y) { return BOTH(v16f, _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
DN_INLINE v16f v_div(v16f x, v16f y) { return BOTH(v16f, _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
DN_INLINE v16f v_max(v16f x, v16f y) { return BOTH(v16f, _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
DN_INLINE v16f v_min(v16f x, v16f y) { return BOTH(v16f, _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
DN_INLINE v16f v_abs(v16f x)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return BOTH(v16f, _mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}
DN_INLINE v16f v_fma(v16f x, v16f y, v16f z)
{
    return BOTH(v16f, _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
DN_INLINE float v_sum(v16f x)
{
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
DN_INLINE float v_top(v16f x)
{
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
DN_INLINE v16f v_keep(v16f x, int n, float other)
{
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 o = _mm256_set1_ps(other);
    __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
    __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes));
    return BOTH(v16f, _mm256_blendv_ps(o, x.a, low), _mm256_blendv_ps(o, x.b, high));
}

DN_INLINE v16f v_load_f16(const uint16_t *p)
{
    return BOTH(v16f, _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8))));
}
DN_INLINE void v_store_f16(uint16_t *p, v16f x)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((void *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
DN_INLINE __m256 widen_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
DN_INLINE v16f v_load_bf16(const uint16_t *p) { return BOTH(v16f, widen_bf16(p), widen_bf16(p + 8)); }
DN_INLINE v16f widen_u8(__m128i x)
{
    return BOTH(v16f, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))));
}
DN_INLINE v16f v_load_u8(const uint8_t *p) { return widen_u8(_mm_loadu_si128((const void *)p)); }
DN_INLINE v16f v_load_i8(const int8_t *p)
{
    __m128i x = _mm_loadu_si128((const void *)p);
    return BOTH(v16f, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))));
}
DN_INLINE void v_load_u4(const uint8_t *p, v16f *low, v16f *high)
{
    __m128i x = _mm_loadu_si128((const void *)p), mask = _mm_set1_epi8(15);
    *low = widen_u8(_mm_and_si128(x, mask));
    *high = widen_u8(_mm_and_si128(_mm_srli_epi16(x, 4), mask));
}

DN_INLINE v16i i_set1(int32_t x) { return BOTH(v16i, _mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
DN_INLINE v16i i_add(v16i x, v16i y) { return BOTH(v16i, _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
DN_INLINE v16f v_from_i(v16i x) { return BOTH(v16f, _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
DN_INLINE v16i i_round(v16f x) { return BOTH(v16i, _mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); }
DN_INLINE int32_t i_sum(v16i x)
{
    __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
DN_INLINE void i_store_i8(int8_t *p, v16i x)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((void *)p, bytes);
}
DN_INLINE __m256 pow2(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
DN_INLINE v16f v_pow2(v16i n) { return BOTH(v16f, pow2(n.a), pow2(n.b)); }

DN_INLINE w64 w_load(const void *p)
{
    return BOTH(w64, _mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1));
}
DN_INLINE w64 w_low(w64 x)
{
    __m256i mask = _mm256_set1_epi8(15);
    return BOTH(w64, _mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
}
DN_INLINE w64 w_high(w64 x)
{
    return w_low(BOTH(w64, _mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)));
}
#define field(x, shift, mask, up) \
    _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(x, shift), _mm256_set1_epi8(mask)), up)
#define w_field(x, shift, mask, up) BOTH(w64, field((x).a, shift, mask, up), field((x).b, shift, mask, up))
DN_INLINE w64 w_or(w64 x, w64 y) { return BOTH(w64, _mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)); }

DN_INLINE __m256i four(const int8_t *x)
{
    int32_t bits;
    memcpy(&bits, x, 4);
    return _mm256_set1_epi32(bits);
}
DN_INLINE __m256i pairs(__m256i acc, __m256i unsigned_bytes, __m256i signed_bytes)
{
    /* 127 · 127 · 2 fits 16 bits, so nothing saturates */
    __m256i words = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
DN_INLINE v16i dot4(v16i acc, w64 w, const int8_t *x)
{
    __m256i v = four(x);
    return BOTH(v16i, pairs(acc.a, w.a, v), pairs(acc.b, w.b, v));
}
/* |w| · sign(w)x: |w| may be 128, 128 · 127 · 2 still fits */
DN_INLINE v16i dot4s(v16i acc, w64 w, const int8_t *x)
{
    __m256i v = four(x);
    return BOTH(v16i, pairs(acc.a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(v, w.a)),
                pairs(acc.b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(v, w.b)));
}
DN_INLINE __m256 lane_byte(__m256i w, int j)
{
    __m256i shifted = _mm256_srl_epi32(w, _mm_cvtsi32_si128(8 * j));
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(255)));
}
DN_INLINE v16f v_byte(w64 w, int j) { return BOTH(v16f, lane_byte(w.a, j), lane_byte(w.b, j)); }
DN_INLINE __m256 lane_signed(__m256i w, int j)
{
    __m256i top = _mm256_sll_epi32(w, _mm_cvtsi32_si128(24 - 8 * j));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24));
}
DN_INLINE v16f v_byte_signed(w64 w, int j) { return BOTH(v16f, lane_signed(w.a, j), lane_signed(w.b, j)); }
#endif
