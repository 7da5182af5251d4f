/* e3m0.c - fp32 arrays as blocks of 4-bit numbers without a mantissa: a sign, and a power of two.
 *
 * DESIGN. A block is a scale, which is its largest magnitude, and a code for each element: bit 3 is
 * the sign, the other bits are an exponent e, which stands for 0 if e is 0, else for
 * scale * 2^(e - 7). So levels are dense near 0, where most pseudo-gradients are, and each level is
 * exact, as the scale is multiplied by a power of two. (E3M0 on the wire, sums in fp32: Streaming
 * DiLoCo, arXiv 2501.18512.)
 *
 * An element becomes the nearest level, the larger of two that are equally near. A block with an
 * element that is not finite has a NaN for a scale, and is read as all NaN. Scales are never below
 * 2^-119, so no level is subnormal, and processors that flush subnormals read the same numbers. */
#include "pccl_core.h"

#include <stdbool.h>

#include "kernels/encodings.h"
#include "kernels/exact.h"

enum {
    BLOCK = 64,              /* elements */
    HEADER = sizeof(float)
};

static const uint32_t INFINITE = 0x7f800000u, LEAST_SCALE = (127u - 119u) << 23;

static PCCL_INLINE size_t code_bytes(size_t n)
{
    return (n + 1) / 2;
}

static uint64_t size_of(uint64_t n)
{
    const size_t rest = (size_t)(n % BLOCK);
    return n / BLOCK * (HEADER + code_bytes(BLOCK)) + (rest > 0 ? HEADER + code_bytes(rest) : 0);
}

static PCCL_INLINE uint32_t bits_at(const unsigned char *in, size_t i)
{
    uint32_t bits;
    memcpy(&bits, in + i * sizeof bits, sizeof bits);
    return bits;
}

/* The largest magnitude, as bits. Not finite if any element is not. */
static PCCL_INLINE uint32_t largest(const unsigned char *in, size_t n)
{
    int32_t most = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        int32_t bits = (int32_t)(bits_at(in, i) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    return (uint32_t)most;
}

/* Adding half of the mantissa's range rounds to the exponent of the nearest power of two.
 * Elements below half of the least level, which has e = 1, become 0. */
static PCCL_INLINE uint32_t code_of(uint32_t bits, float scale)
{
    const int32_t half_least = (127 - 7) << 23;
    const float share = f32_from_bits(bits & 0x7fffffffu) / scale;
    int32_t e, code;
    memcpy(&e, &share, sizeof e);
    code = (int32_t)((e + 0x400000) >> 23) - 120;
    code = code > (e >= half_least) ? code : (e >= half_least);
    return (uint32_t)code | (code > 0 ? bits >> 31 << 3 : 0u);
}

static PCCL_INLINE void encode_block(unsigned char *out, const unsigned char *in, size_t n)
{
    const size_t half = (n + 1) / 2;
    const uint32_t most = largest(in, n);
    uint32_t header = most < LEAST_SCALE ? LEAST_SCALE : most;
    float scale;
    size_t i;
    if (most >= INFINITE) {
        header = F32_NAN;
        memcpy(out, &header, sizeof header);
        memset(out + HEADER, 0, code_bytes(n));
        return;
    }
    memcpy(out, &header, sizeof header);
    scale = f32_from_bits(header);
    for (i = 0; i < n / 2; i++)
        out[HEADER + i] = (unsigned char)(code_of(bits_at(in, i), scale)
                                          | code_of(bits_at(in, half + i), scale) << 4);
    if (i < half)
        out[HEADER + i] = (unsigned char)code_of(bits_at(in, i), scale);
}

static PCCL_INLINE void encode_body(void *out, const float *in, size_t n)
{
    unsigned char *to = out;
    const unsigned char *from = (const unsigned char *)in;
    for (; n >= BLOCK; n -= BLOCK) {
        encode_block(to, from, BLOCK);
        to += HEADER + BLOCK / 2;
        from += BLOCK * sizeof(float);
    }
    if (n > 0)
        encode_block(to, from, n);
}

DISPATCH(encode, (void *out, const float *in, size_t n), (out, in, n))

/* The number that a code stands for, as a share of the scale. */
static PCCL_INLINE float share_of(uint32_t code)
{
    const uint32_t e = code & 7u;
    return f32_from_bits((code & 8u) << 28 | (e > 0 ? (e + 120u) << 23 : 0u));
}

/* Writes a number, or adds it to the one that is there. */
static PCCL_INLINE void put(unsigned char *out, size_t i, float value, bool adds)
{
    uint32_t bits = f32_to_bits(adds ? f32_from_bits(bits_at(out, i)) + value : value);
    memcpy(out + i * sizeof bits, &bits, sizeof bits);
}

static PCCL_INLINE void decode_block(unsigned char *out, const unsigned char *in, size_t n,
                                     bool adds)
{
    const size_t half = (n + 1) / 2;
    const float scale = f32_from_bits(bits_at(in, 0));
    size_t i;
    if ((bits_at(in, 0) & 0x7fffffffu) >= INFINITE) {
        for (i = 0; i < n; i++)
            put(out, i, f32_from_bits(F32_NAN), false);
        return;
    }
    for (i = 0; i < half; i++)
        put(out, i, scale * share_of(in[HEADER + i] & 15u), adds);
    for (i = 0; i < n / 2; i++)
        put(out, half + i, scale * share_of(in[HEADER + i] >> 4), adds);
}

static PCCL_INLINE void decode_body(float *out, const void *in, size_t n, bool adds)
{
    unsigned char *to = (unsigned char *)out;
    const unsigned char *from = in;
    for (; n >= BLOCK; n -= BLOCK) {
        decode_block(to, from, BLOCK, adds);
        to += BLOCK * sizeof(float);
        from += HEADER + BLOCK / 2;
    }
    if (n > 0)
        decode_block(to, from, n, adds);
}

DISPATCH(decode, (float *out, const void *in, size_t n, bool adds), (out, in, n, adds))

static int decode_checked(float *out, const void *in, size_t n, bool adds)
{
    decode(out, in, n, adds);
    return PCCL_OK;
}

const struct encoding pccl_e3m0 = {BLOCK, 1, size_of, encode, decode_checked};
