/* stat2.c - fp32 arrays as blocks of 2-bit codes of levels that are taken from the block itself.
 *
 * DESIGN. A block is four levels (levels.h) and a code for each element. At 2 bits, levels that
 * follow the statistics of the numbers lose much less than evenly spaced ones (MuLoCo, arXiv
 * 2505.23725). As in SparseLoCo (arXiv 2508.15706), a level is the mean of its elements, so the sum
 * of a block is preserved, except for rounding. */
#include "pccl_core.h"

#include "kernels/encodings.h"
#include "kernels/levels.h"

enum {
    BLOCK = 1024,            /* elements */
    HEADER = LEVELS * sizeof(float)
};

static PCCL_INLINE size_t code_bytes(size_t n)
{
    return (n + 3) / 4;
}

static uint64_t size_of(uint64_t n)
{
    const size_t rest = (size_t)(n % BLOCK);
    return n / BLOCK * (HEADER + code_bytes(BLOCK)) + (rest > 0 ? HEADER + code_bytes(rest) : 0);
}

/* Byte i of q has the codes of the elements i, q + i, 2q + i and 3q + i. */
static PCCL_INLINE void encode_block(unsigned char *out, const unsigned char *in, size_t n)
{
    const size_t quarter = code_bytes(n);
    float x[BLOCK], level[LEVELS];
    unsigned char codes[BLOCK];
    size_t i;
    memcpy(x, in, n * sizeof *x);
    levels_measure(x, n, level, codes);
    memset(codes + n, 0, 4 * quarter - n);
    memcpy(out, level, sizeof level);
    for (i = 0; i < quarter; i++)
        out[HEADER + i] = (unsigned char)(codes[i] | codes[quarter + i] << 2
                                          | codes[2 * quarter + i] << 4
                                          | codes[3 * quarter + i] << 6);
}

static PCCL_INLINE void encode_body(void *out, const float *in, size_t n)
{
    unsigned char *to = out;
    const unsigned char *from = (const unsigned char *)in;
    for (; n >= BLOCK; n -= BLOCK) {
        encode_block(to, from, BLOCK);
        to += HEADER + BLOCK / 4;
        from += BLOCK * sizeof(float);
    }
    if (n > 0)
        encode_block(to, from, n);
}

DISPATCH(encode, (void *out, const float *in, size_t n), (out, in, n))

/* Chooses a level by masks, for which every vector unit has instructions. */
static PCCL_INLINE uint32_t choose(const uint32_t *level, uint32_t code)
{
    const uint32_t odd = 0u - (code & 1u), upper = 0u - (code >> 1);
    const uint32_t low = (level[1] & odd) | (level[0] & ~odd);
    const uint32_t high = (level[3] & odd) | (level[2] & ~odd);
    return (high & upper) | (low & ~upper);
}

static PCCL_INLINE void decode_block(unsigned char *out, const unsigned char *in, size_t n,
                                     bool adds)
{
    const size_t quarter = code_bytes(n);
    uint32_t level[LEVELS];
    size_t part, i;
    if (!levels_read(in, level)) {
        levels_spoil(out, n);
        return;
    }
    for (part = 0; part < 4; part++) {
        const size_t begin = part * quarter;
        for (i = 0; i < quarter && begin + i < n; i++)
            level_put(out, begin + i, choose(level, (uint32_t)in[HEADER + i] >> 2 * part & 3u),
                      adds);
    }
}

static PCCL_INLINE void decode_body(float *out, const void *in, size_t n, bool adds)
{
    unsigned char *to = (unsigned char *)out;
    const unsigned char *from = in;
    for (; n >= BLOCK; n -= BLOCK) {
        decode_block(to, from, BLOCK, adds);
        to += BLOCK * sizeof(float);
        from += HEADER + BLOCK / 4;
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

const struct encoding pccl_stat2 = {BLOCK, LEVELS, size_of, encode, decode_checked};
