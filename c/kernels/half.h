/* half.h - float16 (IEEE binary16) and bfloat16, as bit patterns, to fp32 and back.
 *
 * Conversion to fp32 is exact. Conversion from fp32 rounds once, to nearest even, with subnormals
 * and overflow to infinity as IEEE 754 says; every NaN becomes the one quiet NaN of exact.h. The
 * functions have no branches, so that loops over them vectorise. The float16 ones compute with no
 * fp32 subnormals, so processors that flush subnormals give the same results. */
#ifndef PCCL_HALF_H
#define PCCL_HALF_H

#include "kernels/exact.h"

/* a if the condition is 1, b if it is 0. This uses a mask, because a compiler may turn ?: into a
 * branch around the float operation that computes a or b, which might trap, and then cannot
 * vectorise it. */
static inline uint32_t select_u32(int condition, uint32_t a, uint32_t b)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return (a & mask) | (b & ~mask);
}

static inline float bf16_to_f32(uint16_t half)
{
    return f32_from_bits((uint32_t)half << 16);
}

static inline uint16_t f32_to_bf16(float value)
{
    uint32_t bits = f32_to_bits(value);
    /* Adds just under half a unit of the last place that stays, and one more if that is odd, so
     * that ties go to even. A carry into the exponent is right. The NaN has no low bits that could
     * carry. */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Magnitudes are compared as signed integers, for which every vector unit has an instruction. */
static inline float f16_to_f32(uint16_t half)
{
    const uint32_t rebias = (uint32_t)(127 - 15) << 23;
    const uint32_t least_normal = (uint32_t)(127 - 14) << 23;
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t normal = magnitude + rebias;
    /* A subnormal is the fraction of 2^-14 (1 + fraction): subtract the 1. */
    float small = f32_from_bits(magnitude + least_normal) - f32_from_bits(least_normal);
    uint32_t subnormal;
    memcpy(&subnormal, &small, sizeof subnormal);
    /* Infinities and NaNs keep the largest exponent. */
    normal += select_u32((int32_t)magnitude >= 0x7c00 << 13, rebias, 0u);
    return f32_from_bits(sign | select_u32((int32_t)magnitude < 0x0400 << 13, subnormal, normal));
}

/* The result is computed in the upper half of a word. In the lower half gcc would narrow each step
 * to 16 bits, and pay for packing its operands. */
static inline uint16_t f32_to_f16(float value)
{
    const int32_t infinity = 0xff << 23;
    const int32_t too_large = (127 + 16) << 23;
    const int32_t least_normal = (127 - 14) << 23;
    const uint32_t rebias = (uint32_t)(127 - 15) << 23;
    uint32_t bits;
    uint32_t magnitude;
    uint32_t normal;
    uint32_t subnormal;
    float aligned;

    memcpy(&bits, &value, sizeof bits);
    magnitude = bits & 0x7fffffffu;
    normal = select_u32((int32_t)magnitude < too_large, magnitude, (uint32_t)too_large) - rebias;
    normal = (normal + 0x0fffu + ((normal >> 13) & 1u)) << 3;
    /* The last place of 0.5 is 2^-24, as that of a float16 subnormal, so the addition rounds. */
    aligned = f32_from_bits(magnitude) + 0.5f;
    memcpy(&subnormal, &aligned, sizeof subnormal);
    subnormal = (subnormal - ((uint32_t)(127 - 1) << 23)) << 16;
    normal = select_u32((int32_t)magnitude < least_normal, subnormal, normal);
    normal |= bits & 0x80000000u;
    normal = select_u32((int32_t)magnitude > infinity, (uint32_t)F16_NAN << 16, normal);
    return (uint16_t)(normal >> 16);
}

#endif
