/* half.h - float16 (IEEE binary16) and bfloat16, as bit patterns, to fp32 and back.
 *
 * Conversion to fp32 is exact. Conversion from fp32 rounds once, to nearest even, with subnormals
 * and overflow to infinity as IEEE 754 says; every NaN becomes the one quiet NaN of exact.h. The
 * functions have no branches, so that loops over them vectorize. The float16 ones compute with no
 * fp32 subnormals, so processors that flush subnormals give the same results.
 *
 * x86-64 from v3 on, and arm64, have instructions that convert float16, and that round and keep
 * subnormals in the same way in every mode of the processor. They keep the payload of a NaN, so
 * NaNs are replaced first. */
#ifndef PCCL_HALF_H
#define PCCL_HALF_H

#include <stddef.h>

#include "kernels/exact.h"

#if defined PCCL_X86_LEVELS
#include <immintrin.h>
#elif defined __aarch64__ && defined __ARM_NEON && !defined PCCL_ONE_ISA
#include <arm_neon.h>
#define PCCL_NEON
#endif

/* a if the condition is 1, b if it is 0. This uses a mask, because a compiler may turn ?: into a
 * branch around the float operation that computes a or b, which might trap, and then cannot
 * vectorize it. */
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

/* ---- vectors of float16 at any address, for the instruction sets that have them ---- */

#if defined PCCL_X86_LEVELS

PCCL_V3 static inline __m256 f16_load_v3(const unsigned char *in)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)in));
}

PCCL_V3 static inline void f16_store_v3(unsigned char *out, __m256 x)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32((int)F32_NAN));
    x = _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    _mm_storeu_si128((__m128i *)(void *)out, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

PCCL_V4 static inline __m512 f16_load_v4(const unsigned char *in)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)in));
}

PCCL_V4 static inline void f16_store_v4(unsigned char *out, __m512 x)
{
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32((int)F32_NAN));
    x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    _mm256_storeu_si256((__m256i *)(void *)out, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined PCCL_NEON

static inline float32x4_t f16_load_neon(const unsigned char *in)
{
    uint16x4_t half;
    memcpy(&half, in, sizeof half);
    return vcvt_f32_f16(vreinterpret_f16_u16(half));
}

static inline void f16_store_neon(unsigned char *out, float32x4_t x)
{
    const float32x4_t nan = vreinterpretq_f32_u32(vdupq_n_u32(F32_NAN));
    const float16x4_t half = vcvt_f16_f32(vbslq_f32(vceqq_f32(x, x), x, nan));
    memcpy(out, &half, sizeof half);
}

#endif

/* CALL_BEST (isa.h); a processor of arm64 always has the vectors. */
#if defined PCCL_NEON
#define CALL_BEST_F16(name, arguments) name##_neon arguments
#else
#define CALL_BEST_F16 CALL_BEST
#endif

/* ---- arrays of fp32 numbers; the halves may have any alignment ---- */

void load_f16(void *numbers, const unsigned char *in, size_t n);
void store_f16(unsigned char *out, const void *numbers, size_t n);
void load_bf16(void *numbers, const unsigned char *in, size_t n);
void store_bf16(unsigned char *out, const void *numbers, size_t n);

#endif
