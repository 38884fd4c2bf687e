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
#include "kernels_attention.h"

const dn_kernels DN_PASTE(dn_kernels_, DN_ISA);
const dn_kernels DN_PASTE(dn_kernels_, DN_ISA) = {
    DN_QUOTE(DN_ISA), rmsnorm, quantise, linear, embed, rope, append, attend, combine, swiglu, add,
    finite,
};
