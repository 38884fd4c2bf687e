/* All kernels, once for each instruction set: compiled with -DDN_ISA=<name> and its flags. */
#include "dn.h"

#define DN_NAME_IS_generic 1
#define DN_NAME_IS_avx2 2
#define DN_NAME_IS_avx512 3
#define DN_NAME_IS_neon 4
#define DN_NAME_IS_dotprod 5
#define DN_NAME_IS_i8mm 6
#define DN_PASTE_(a, b) a##b
#define DN_PASTE(a, b) DN_PASTE_(a, b)
#define DN_QUOTE_(a) #a
#define DN_QUOTE(a) DN_QUOTE_(a)
#define DN_WHICH DN_PASTE(DN_NAME_IS_, DN_ISA)

#if DN_WHICH == 1
#include "arch/generic.h"
#elif DN_WHICH == 2
#include "arch/avx2.h"
#elif DN_WHICH == 3
#include "arch/avx512.h"
#elif DN_WHICH >= 4
#include "arch/neon.h"
#else
#error "DN_ISA names no instruction set"
#endif

#include "kernels_vector.h"
#include "kernels_linear.h"
#include "kernels_rows.h"
#include "kernels_attention.h"

/* One function for each scheme: what is constant in it folds. */
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

const dn_kernels DN_PASTE(dn_kernels_, DN_ISA);
const dn_kernels DN_PASTE(dn_kernels_, DN_ISA) = {
    DN_QUOTE(DN_ISA), rmsnorm, quantise, linear, embed, rope, append, attend, combine, swiglu, add,
    finite,
};
