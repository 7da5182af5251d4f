/* twostage.h - the quantized all-reduce whose contributions go unchanged to the owners of segments
 * (pccl_core.h, TWO STAGES). */
#ifndef PCCL_TWOSTAGE_H
#define PCCL_TWOSTAGE_H

#include "engine/collective.h"

enum { TWOSTAGE_STEP = 65534 };      /* the step of a contribution on the wire */

extern const struct algorithm twostage_algorithm;

/* The number of offsets in the contribution that begins at an offset of a part, unless the part or
 * the segment ends before: the same on all members. */
uint64_t twostage_unit(const struct collective *collective, const struct part *part);

#endif
