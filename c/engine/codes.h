/* codes.h - quantized elements, their codes apart from their steps, for who decodes them on a GPU.
 *
 * What travels is blocks of 256 elements of PCCL_BLOCK_8 that begin wherever a segment does. Here
 * elements have fixed places: first a code for each, with room for whole quanta, then for each
 * quantum the step of its block, fp64 for fp64 elements and fp32 for all others. */
#ifndef PCCL_CODES_H
#define PCCL_CODES_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of `count` elements. */
size_t codes_bytes(int dtype, uint64_t count);

/* Takes apart `n` elements as pccl_quantize() has written them, the first of which is number
 * `begin`, in whole quanta, of `count`. */
void codes_unpack(int dtype, unsigned char *out, uint64_t count, uint64_t begin,
                  const unsigned char *in, uint64_t n);

#endif
