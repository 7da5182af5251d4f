/* codes.c - see codes.h. */
#include "engine/codes.h"

#include <string.h>

#include "engine/quanta.h"
#include "pccl.h"

/* Bytes of a step. */
static size_t step_bytes(int dtype)
{
    return dtype == PCCL_F64 ? sizeof(double) : sizeof(float);
}

size_t codes_bytes(int dtype, uint64_t count)
{
    return (size_t)quanta_of(count) * (PCCL_QUANTUM + step_bytes(dtype));
}

void codes_unpack(int dtype, unsigned char *out, uint64_t count, uint64_t begin,
                  const unsigned char *in, uint64_t n)
{
    const size_t step = step_bytes(dtype), block = pccl_quantized_block(PCCL_BLOCK_8);
    unsigned char *codes = out + begin;
    unsigned char *steps = out + quanta_of(count) * PCCL_QUANTUM + begin / PCCL_QUANTUM * step;
    size_t m, quantum;
    for (; n > 0; n -= m) {
        m = n < block ? (size_t)n : block;
        for (quantum = 0; quantum < m; quantum += PCCL_QUANTUM, steps += step)
            memcpy(steps, in, step);
        memcpy(codes, in + step, m);
        codes += m;
        in += step + m;
    }
}
