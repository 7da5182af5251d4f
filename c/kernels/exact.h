/* exact.h - what the compiler must be told so that the kernels give the same bits everywhere.
 *
 * No fused multiply-add and no excess precision: a float operation that is written is one rounding.
 * Which NaN an operation yields is the one thing IEEE 754 leaves to the processor (its sign on x86,
 * its payload everywhere), so each result that is a NaN is stored as one fixed pattern. With that,
 * vector width, optimization level and architecture cannot be told from the results, and
 * pccl_self_test() proves it. */
#ifndef PCCL_EXACT_H
#define PCCL_EXACT_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined __FAST_MATH__
#error "the kernels need IEEE arithmetic: build without -ffast-math"
#endif
#if FLT_EVAL_METHOD != 0
#error "the kernels need float operations without excess precision: build with -msse2 -mfpmath=sse"
#endif

/* gcc has no such pragma; its builds pass -ffp-contract=off. */
#if defined __clang__
#pragma STDC FP_CONTRACT OFF
#elif defined _MSC_VER
#pragma fp_contract(off)
#endif

/* Builds a function once for each of these levels and picks at load time (by ifunc: glibc only). A
 * test that wants to force a level defines it as nothing and passes -m flags. */
#ifndef PCCL_CLONES
#if defined __GNUC__ && !defined __clang__ && defined __x86_64__ && defined __GLIBC__ \
    && !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
#if __GNUC__ >= 12
#define PCCL_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif __GNUC__ >= 8
#define PCCL_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#if __GNUC__ >= 8
#define PCCL_FEW_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#endif
#endif
#ifndef PCCL_CLONES
#define PCCL_CLONES
#endif
#ifndef PCCL_FEW_CLONES      /* for what is seldom used, or waits for memory anyway */
#define PCCL_FEW_CLONES
#endif

/* PCCL_INLINE is for what is part of such a function: a call would leave its level. */
#if defined __GNUC__
#define PCCL_INLINE inline __attribute__((always_inline))
#define PCCL_ALIGNED(bytes) __attribute__((aligned(bytes)))
#elif defined _MSC_VER
#define PCCL_INLINE __forceinline
#define PCCL_ALIGNED(bytes) __declspec(align(bytes))
#else
#define PCCL_INLINE inline
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

/* The bits to store: those of the value, or the one NaN. */
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
