/* exact.h - compiler settings and conversions that make the kernels give the same bits everywhere.
 *
 * There is no fused multiply-add and no excess precision: each float operation in the source rounds
 * once. IEEE 754 leaves only one thing to the processor, the sign and payload of a NaN, so each NaN
 * in a result is stored as one fixed pattern. So results do not depend on vector width,
 * optimization level or architecture, which pccl_self_test() proves. */
#ifndef PCCL_EXACT_H
#define PCCL_EXACT_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "kernels/isa.h"

#if defined __FAST_MATH__
#error "the kernels need IEEE arithmetic: build without -ffast-math"
#endif
#if FLT_EVAL_METHOD != 0
#error "the kernels need float operations without excess precision: build with -msse2 -mfpmath=sse"
#endif

/* gcc does not have this pragma; its builds pass -ffp-contract=off. */
#if defined __clang__
#pragma STDC FP_CONTRACT OFF
#elif defined _MSC_VER
#pragma fp_contract(off)
#endif

#if defined __GNUC__
#define PCCL_ALIGNED(bytes) __attribute__((aligned(bytes)))
#elif defined _MSC_VER
#define PCCL_ALIGNED(bytes) __declspec(align(bytes))
#else
#define PCCL_ALIGNED(bytes)
#endif

enum { F16_NAN = 0x7e00, BF16_NAN = 0x7fc0 };
static const uint32_t F32_NAN = 0x7fc00000u;
static const uint64_t F64_NAN = 0x7ff8000000000000u;

static inline float f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double f64_from_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The bits of a value, or of the one fixed NaN. */
static inline uint32_t f32_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? bits : F32_NAN;
}

static inline uint64_t f64_to_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? bits : F64_NAN;
}

#endif
