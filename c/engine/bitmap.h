/* bitmap.h - sets of blocks: bit sets that say which elements of a buffer have been handled.
 *
 * A block is PCCL_ALIGNMENT elements of a buffer; the last one may be shorter. Segments and chunks
 * begin at block boundaries, so one bit for each block is enough. */
#ifndef PCCL_BITMAP_H
#define PCCL_BITMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Number of blocks that `count` elements take. */
uint64_t aligned_blocks(uint64_t count);

/* Number of 64-bit words in a set of `n` blocks. */
size_t bitmap_words(uint64_t n);

/* Adds the blocks from <= i < to. */
void bitmap_set(uint64_t *set, uint64_t from, uint64_t to);

/* Whether all, or any, of the blocks from <= i < to are in the set. */
bool bitmap_all(const uint64_t *set, uint64_t from, uint64_t to);
bool bitmap_any(const uint64_t *set, uint64_t from, uint64_t to);

/* Finds the first run of blocks in the set at or after `*from` and below `end`, and stores where it
 * begins in *from and where it ends in *to. Returns false if there is none. */
bool bitmap_run(const uint64_t *set, uint64_t *from, uint64_t *to, uint64_t end);

#endif
