/* oneshot.h - the all-reduce of two members without a ring: each sends the other one all that it
 * contributes, and both reduce both contributions in the order of their positions (pccl_core.h, THE
 * RING). As many bytes as around a ring, in one step. */
#ifndef PCCL_ONESHOT_H
#define PCCL_ONESHOT_H

#include "engine/collective.h"
#include "engine/wire.h"

enum { ONESHOT_STEP = UINT16_MAX };    /* of the chunks, where rings count their steps */

/* Whether our contribution to a part may be overwritten before it is sent; and writes the payload
 * of a chunk, from where our contribution is now. */
bool oneshot_overwrites(const struct collective *collective, const struct part *part);
void oneshot_write(const struct collective *collective, uint64_t offset, uint64_t length,
                  unsigned char *to);

/* Why a chunk is not one that the other member sends here, or NULL. */
const char *oneshot_check_place(const struct ring *ring, const struct wire_header *chunk);

/* Reduces the other member's contribution and ours. */
void oneshot_reduce(const struct collective *collective, const struct wire_header *chunk,
                   const unsigned char *in);

#endif
