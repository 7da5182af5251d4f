/* encodings.h - the list of the encodings of whole arrays, which pccl_core.h describes. Each is a
 * file of its own. */
#ifndef PCCL_ENCODINGS_H
#define PCCL_ENCODINGS_H

#include "pccl_core.h"

#include <stdbool.h>

struct encoding {
    size_t block;            /* elements with a header in common */
    size_t header;           /* fp32 numbers at the beginning of an encoded block; bytes follow */
    uint64_t (*size)(uint64_t n);
    void (*encode)(void *out, const float *in, size_t n);
    /* writes, or adds; PCCL_EPROTO: malformed */
    int (*decode)(float *out, const void *in, size_t n, bool adds);
};

extern const struct encoding pccl_e3m0, pccl_stat2, pccl_sparse;

static const struct encoding *const ENCODINGS[PCCL_ENCODINGS] = {
    [PCCL_E3M0] = &pccl_e3m0,
    [PCCL_STAT2] = &pccl_stat2,
    [PCCL_SPARSE] = &pccl_sparse,
};

#endif
