/* isa.c - which instruction set to use; a test replaces this function. */
#include "kernels/isa.h"

enum isa pccl_isa(void)
{
#if defined PCCL_X86_LEVELS
    if (__builtin_cpu_supports("x86-64-v4"))
        return ISA_V4;
    if (__builtin_cpu_supports("x86-64-v3"))
        return ISA_V3;
#endif
    return ISA_BASE;
}
