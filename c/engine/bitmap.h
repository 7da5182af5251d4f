/* bitmap.h - sets of blocks: bit sets that say which elements of a buffer have been handled.
 *
 * A block is PCCL_ALIGNMENT elements of a buffer, the last one possibly fewer. Segments and chunks
 * begin at multiples of it, so one bit for each is enough. */
#ifndef PCCL_BITMAP_H
#define PCCL_BITMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How many blocks `count` elements take. */
uint64_t aligned_blocks(uint64_t count);

/* 64-bit words of a set of `n` blocks. */
size_t bitmap_words(uint64_t n);

/* Adds the blocks from <= i < to. */
void bitmap_set(uint64_t *set, uint64_t from, uint64_t to);

/* Whether all, or any, of the blocks from <= i < to are in the set. */
bool bitmap_all(const uint64_t *set, uint64_t from, uint64_t to);
bool bitmap_any(const uint64_t *set, uint64_t from, uint64_t to);

/* The first run of blocks in the set at or after `*from` and below `end`: its beginning goes to
 * *from, its end to *to. False when there is none. */
bool bitmap_run(const uint64_t *set, uint64_t *from, uint64_t *to, uint64_t end);

#endif
