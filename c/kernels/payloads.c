/* payloads.c - the functions of all encodings of whole arrays. */
#include "pccl_core.h"

#include "kernels/encodings.h"

uint64_t pccl_encoded_size(int encoding, uint64_t n)
{
    return ENCODINGS[encoding]->size(n);
}

void pccl_encode(int encoding, void *out, const float *in, size_t n)
{
    ENCODINGS[encoding]->encode(out, in, n);
}

int pccl_decode(int encoding, float *out, const void *in, size_t n)
{
    return ENCODINGS[encoding]->decode(out, in, n, false);
}

int pccl_decode_add(int encoding, float *out, const void *in, size_t n)
{
    return ENCODINGS[encoding]->decode(out, in, n, true);
}
