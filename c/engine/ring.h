/* ring.h - how chunks go around a ring: on the first steps they are partial results, to which each
 * receiver adds its contribution; then they are final (pccl_core.h, THE RING). */
#ifndef PCCL_RING_H
#define PCCL_RING_H

#include <stdint.h>

#include "engine/collective.h"

extern const struct algorithm ring_algorithm;

/* ---- geometry: pure functions ---- */

/* The element of a share of `count` elements at which segment `segment` begins. `members` is at
 * least 1, `segment` at most `members`. */
uint64_t ring_bound(uint64_t count, uint32_t members, uint32_t segment);

/* The segment that a receiver at `position` sees at step `step` of a ring of `members` >= 1. */
uint32_t ring_segment(uint32_t members, uint32_t position, uint32_t step);

/* The inverse: the position that receives `segment` at step `step`. */
uint32_t ring_receiver(uint32_t members, uint32_t segment, uint32_t step);

/* The position that owns a segment: the last one to add to it, or the one that has its final
 * content from the start. */
uint32_t ring_owner(uint32_t members, uint32_t segment);

/* The position after another one. */
uint32_t ring_next(uint32_t members, uint32_t position);

/* ---- of a collective ---- */

/* The offsets from <= i < to of a segment of a ring. */
void ring_range(const struct ring *ring, uint32_t segment, uint64_t *from, uint64_t *to);

/* Writes a chunk of our own as it is sent. (A quantized one lies in one part.) */
void ring_write_own(const struct collective *collective, uint64_t offset, uint64_t length,
                    unsigned char *to);

#endif
