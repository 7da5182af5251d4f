/* quanta.h - sets of quanta: bit sets that say which elements of a buffer have been handled.
 *
 * A quantum is PCCL_QUANTUM elements of a buffer, the last one possibly fewer. Segments and chunks
 * begin at multiples of it, so one bit for each is enough. */
#ifndef PCCL_QUANTA_H
#define PCCL_QUANTA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How many quanta `count` elements take. */
uint64_t quanta_of(uint64_t count);

/* 64-bit words of a set of `n` quanta. */
size_t quanta_words(uint64_t n);

/* Adds the quanta from <= i < to. */
void quanta_add(uint64_t *set, uint64_t from, uint64_t to);

/* Whether all, or any, of the quanta from <= i < to are in the set. */
bool quanta_all(const uint64_t *set, uint64_t from, uint64_t to);
bool quanta_any(const uint64_t *set, uint64_t from, uint64_t to);

/* The first run of quanta in the set at or after `*from` and below `end`: its beginning goes to
 * *from, its end to *to. False when there is none. */
bool quanta_run(const uint64_t *set, uint64_t *from, uint64_t *to, uint64_t end);

#endif
