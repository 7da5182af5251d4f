/* ring.h - the geometry of a ring (pccl.h, THE RING) and sets of granules. Pure functions, no I/O.
 *
 * A granule is PCCL_QUANTUM elements of an op's buffer, the last one possibly fewer. */
#ifndef PCCL_RING_H
#define PCCL_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where segment `segment` of a share of `count` elements begins, relative to the share: elements.
 * `members` is at least 1, `segment` at most `members`. */
uint64_t ring_bound(uint64_t count, uint32_t members, uint32_t segment);

/* The segment that a receiver at `position` sees at hop `hop` of a ring of `members` >= 1. */
uint32_t ring_segment(uint32_t members, uint32_t position, uint32_t hop);

/* The inverse: who, by position, receives `segment` at hop `hop`. */
uint32_t ring_receiver(uint32_t members, uint32_t segment, uint32_t hop);

/* Granules of a buffer of `count` elements. */
uint64_t granules(uint64_t count);

/* 64-bit words of a set of that many granules. */
size_t granule_words(uint64_t n);

/* Adds the granules from <= i < to. */
void granules_add(uint64_t *set, uint64_t from, uint64_t to);

/* Whether all, or any, of the granules from <= i < to are in the set. */
bool granules_all(const uint64_t *set, uint64_t from, uint64_t to);
bool granules_any(const uint64_t *set, uint64_t from, uint64_t to);

/* The first run of granules in the set at or after `*from` and below `end`: its begin goes to
 * *from, its end to *to. False when there is none. */
bool granules_run(const uint64_t *set, uint64_t *from, uint64_t *to, uint64_t end);

#endif
