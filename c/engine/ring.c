/* ring.c - see ring.h. */
#include "engine/ring.h"

#include <assert.h>

#include "pccl.h"

uint64_t ring_bound(uint64_t count, uint32_t members, uint32_t segment)
{
    uint64_t blocks = granules(count), whole, rest, bound;
    assert(members > 0 && segment <= members);
    /* blocks * segment / members, without the overflow of the product */
    whole = blocks / members;
    rest = blocks % members;
    bound = PCCL_QUANTUM * (whole * segment + rest * segment / members);
    return bound < count ? bound : count;
}

uint32_t ring_segment(uint32_t members, uint32_t position, uint32_t hop)
{
    assert(position < members);
    return (position + members - (hop + 1) % members) % members;
}

uint32_t ring_receiver(uint32_t members, uint32_t segment, uint32_t hop)
{
    assert(segment < members);
    return (segment + (hop + 1) % members) % members;
}

uint64_t granules(uint64_t count)
{
    return count / PCCL_QUANTUM + (count % PCCL_QUANTUM != 0);
}

size_t granule_words(uint64_t n)
{
    return (size_t)(n / 64 + (n % 64 != 0));
}

/* The bits of word `word` that lie in from <= i < to. */
static uint64_t mask(uint64_t word, uint64_t from, uint64_t to)
{
    uint64_t bits = ~UINT64_C(0);
    if (from > word * 64)
        bits &= ~UINT64_C(0) << (from - word * 64);
    if (to < word * 64 + 64)
        bits &= ~(~UINT64_C(0) << (to - word * 64));
    return bits;
}

void granules_add(uint64_t *set, uint64_t from, uint64_t to)
{
    uint64_t word;
    assert(from < to);
    for (word = from / 64; word * 64 < to; word++)
        set[word] |= mask(word, from, to);
}

bool granules_all(const uint64_t *set, uint64_t from, uint64_t to)
{
    uint64_t word;
    assert(from < to);
    for (word = from / 64; word * 64 < to; word++)
        if ((set[word] & mask(word, from, to)) != mask(word, from, to))
            return false;
    return true;
}

bool granules_any(const uint64_t *set, uint64_t from, uint64_t to)
{
    uint64_t word;
    assert(from < to);
    for (word = from / 64; word * 64 < to; word++)
        if (set[word] & mask(word, from, to))
            return true;
    return false;
}

bool granules_run(const uint64_t *set, uint64_t *from, uint64_t *to, uint64_t end)
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
