/* bitmap.c - see bitmap.h. */
#include "engine/bitmap.h"

#include <assert.h>

#include "pccl_core.h"

uint64_t aligned_blocks(uint64_t count)
{
    return count / PCCL_ALIGNMENT + (count % PCCL_ALIGNMENT != 0);
}

size_t bitmap_words(uint64_t n)
{
    return (size_t)(n / 64 + (n % 64 != 0));
}

/* The bits of word number `word` that lie in from <= i < to. */
static uint64_t mask(uint64_t word, uint64_t from, uint64_t to)
{
    uint64_t bits = ~UINT64_C(0);
    if (from > word * 64)
        bits &= ~UINT64_C(0) << (from - word * 64);
    if (to < word * 64 + 64)
        bits &= ~(~UINT64_C(0) << (to - word * 64));
    return bits;
}

void bitmap_set(uint64_t *set, uint64_t from, uint64_t to)
{
    uint64_t word;
    assert(from < to);
    for (word = from / 64; word * 64 < to; word++)
        set[word] |= mask(word, from, to);
}

bool bitmap_all(const uint64_t *set, uint64_t from, uint64_t to)
{
    uint64_t word;
    assert(from < to);
    for (word = from / 64; word * 64 < to; word++)
        if ((set[word] & mask(word, from, to)) != mask(word, from, to))
            return false;
    return true;
}

bool bitmap_any(const uint64_t *set, uint64_t from, uint64_t to)
{
    uint64_t word;
    assert(from < to);
    for (word = from / 64; word * 64 < to; word++)
        if (set[word] & mask(word, from, to))
            return true;
    return false;
}

bool bitmap_run(const uint64_t *set, uint64_t *from, uint64_t *to, uint64_t end)
{
    uint64_t i = *from;
    while (i < end && !(set[i / 64] >> i % 64 & 1))
        i++;
    *from = i;
    while (i < end && set[i / 64] >> i % 64 & 1)
        i++;
    *to = i;
    return *from < *to;
}
