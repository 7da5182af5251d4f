/* ring.c - see ring.h. */
#include "engine/ring.h"

#include <assert.h>

#include "engine/bitmap.h"
#include "pccl_core.h"

uint64_t ring_bound(uint64_t count, uint32_t members, uint32_t segment)
{
    uint64_t blocks = aligned_blocks(count), whole, rest, bound;
    assert(members > 0 && segment <= members);
    /* blocks * segment / members, without the overflow of the product */
    whole = blocks / members;
    rest = blocks % members;
    bound = PCCL_ALIGNMENT * (whole * segment + rest * segment / members);
    return bound < count ? bound : count;
}

uint32_t ring_segment(uint32_t members, uint32_t position, uint32_t step)
{
    assert(position < members);
    return (position + members - (step + 1) % members) % members;
}

uint32_t ring_receiver(uint32_t members, uint32_t segment, uint32_t step)
{
    assert(segment < members);
    return (segment + (step + 1) % members) % members;
}

uint32_t ring_owner(uint32_t members, uint32_t segment)
{
    assert(segment < members);
    return (segment + members - 1) % members;
}

uint32_t ring_next(uint32_t members, uint32_t position)
{
    assert(position < members);
    return (position + 1) % members;
}
