/* oneshot.c - see oneshot.h.
 *
 * A chunk may arrive before we have sent our own chunk of the same offsets. In place it overwrites
 * our contribution, which collective_overwrite() has saved in the undo buffer before. So we send
 * copies: of the undo buffer where the result is written already, and of send elsewhere. */
#include "engine/oneshot.h"

#include <assert.h>
#include <string.h>

#include "engine/bitmap.h"

static bool has_step(const struct collective *collective, uint32_t members, uint32_t step)
{
    const struct shape *shape = &collective->shape;
    return members == 2 && shape->reduces && !shape->scatters && !shape->rooted
        && step == ONESHOT_STEP;
}

static void own_range(const struct ring *ring, uint64_t *from, uint64_t *to)
{
    *from = ring->place.begin;
    *to = *from + ring->place.count;
}

static void own_place(const struct ring *ring, struct wire_header *header)
{
    header->step = ONESHOT_STEP;
    header->segment = (uint16_t)ring->place.position;
}

static uint32_t receiver(const struct wire_header *chunk)
{
    return 1u - chunk->segment;
}

static struct role role_of(const struct collective *collective, const struct wire_header *chunk)
{
    const struct role all = {true, true, true};
    (void)collective;
    (void)chunk;
    return all;
}

/* In place our contribution may be overwritten before it is sent. */
static bool in_memory(const struct collective *collective, const struct part *part)
{
    return collective->format == PCCL_UNQUANTIZED && !part->overwrites;
}

/* Copies our contribution to one part: `length` elements, beginning at an offset. */
static void copy_part(const struct collective *collective, const struct part *part,
                      uint64_t offset, uint64_t length, unsigned char *to)
{
    const struct parts *parts = &collective->parts;
    uint64_t end = offset + length, next;
    for (; offset < end; offset = next) {
        uint64_t block = offset / PCCL_ALIGNMENT, run = block + 1, last = aligned_blocks(end);
        bool saved = part->overwrites && bitmap_any(collective->written_set, block, run);
        size_t bytes;
        while (run < last && bitmap_any(collective->written_set, run, run + 1) == saved)
            run++;
        next = run * PCCL_ALIGNMENT < end ? run * PCCL_ALIGNMENT : end;
        bytes = (size_t)(next - offset) * part->width;
        memcpy(to, saved ? part_saved(parts, part, &collective->undo, offset)
                         : part_send(parts, part, offset), bytes);
        to += bytes;
    }
}

static void copy_own(const struct collective *collective, uint64_t offset, uint64_t length,
                     unsigned char *to)
{
    uint64_t at = offset;
    struct stretch stretch;
    for (; parts_next(&collective->parts, &at, offset + length, &stretch); to += stretch.bytes)
        copy_part(collective, stretch.part, stretch.offset, stretch.length, to);
}

static void write_own(const struct collective *collective, uint64_t offset, uint64_t length,
                      unsigned char *to)
{
    const struct part *part = part_at(&collective->parts, offset);
    double own[STRIP];               /* elements of any type, aligned */
    uint64_t end = offset + length, n;
    if (collective->format == PCCL_UNQUANTIZED) {
        copy_own(collective, offset, length, to);
        return;
    }
    if (!part->overwrites) {
        collective_quantize(collective, part, offset, part_send(&collective->parts, part, offset),
                            length, to, 1, false);
        return;
    }
    for (; offset < end; offset += n) {
        n = end - offset < STRIP ? end - offset : STRIP;
        copy_own(collective, offset, n, (unsigned char *)own);
        collective_quantize(collective, part, offset, own, n, to, 1, false);
        to += pccl_quantized_size(collective->format, part->dtype, n);
    }
}

static const char *check_place(const struct ring *ring, const struct wire_header *chunk)
{
    const pccl_ring *place = &ring->place;
    if (chunk->segment == place->position)
        return "a chunk has another place in the ring";
    if (chunk->offset < place->begin
        || chunk->offset + chunk->length > place->begin + place->count)
        return "a chunk lies outside its segment";
    return NULL;
}

/* Reduces the quantized contributions of both members. Our own is quantized here again, just as it
 * was sent, so that both members get the same result. */
static void reduce_quantized(const struct collective *collective, const struct wire_header *chunk,
                             const unsigned char *in)
{
    const struct part *part = part_at(&collective->parts, chunk->offset);
    unsigned char own[STRIP * sizeof(double)];
    uint64_t offset = chunk->offset, end = offset + chunk->length, n;
    bool first = chunk->segment == 0;
    for (; offset < end; offset += n) {
        int status;
        n = end - offset < STRIP ? end - offset : STRIP;
        assert(pccl_quantized_size(collective->format, part->dtype, n) <= sizeof own);
        status = pccl_quantize(collective->format, part->dtype, own,
                               part_send(&collective->parts, part, offset), (size_t)n);
        status |= pccl_quantized_combine(collective->format, part->dtype, collective->redop,
                                         part_recv(&collective->parts, part, offset),
                                         first ? in : own, first ? own : in, (size_t)n, 2);
        assert(status == PCCL_OK);
        (void)status;
        in += pccl_quantized_size(collective->format, part->dtype, n);
    }
}

/* Reduces the other member's contribution and ours. */
static void reduce(const struct collective *collective, const struct wire_header *chunk,
                   const unsigned char *in)
{
    bool first = chunk->segment == 0;    /* the other member's operand is on the left */
    uint64_t at = chunk->offset;
    struct stretch own;
    if (collective->format != PCCL_UNQUANTIZED) {
        reduce_quantized(collective, chunk, in);
        return;
    }
    for (; parts_next(&collective->parts, &at, chunk->offset + chunk->length, &own);
         in += own.bytes) {
        int status = pccl_reduce(own.part->dtype, collective->redop, own.recv,
                                 first ? in : own.send, first ? own.send : in, own.length,
                                 collective_divisor(own.part->dtype, 2));
        assert(status == PCCL_OK);
        (void)status;
    }
}

static const char *check_turn(const struct collective *collective, const struct wire_header *chunk)
{
    uint64_t from, to;
    parts_written(&collective->parts, chunk->offset, chunk->length, &from, &to);
    return bitmap_any(collective->written_set, from, to) ? "a chunk came twice" : NULL;
}

static int apply(struct collective *collective, const struct wire_header *chunk,
                 struct packet **packet)
{
    if (collective_overwrite(collective, chunk->offset, chunk->length) != PCCL_OK)
        return PCCL_ENOMEM;
    reduce(collective, chunk, packet_payload(collective->op.source.zmq, *packet));
    return PCCL_OK;
}

const struct algorithm oneshot_algorithm = {
    .has_step = has_step,
    .own_range = own_range,
    .own_place = own_place,
    .in_memory = in_memory,
    .write = write_own,
    .receiver = receiver,
    .check_place = check_place,
    .check_turn = check_turn,
    .role = role_of,
    .apply = apply,
};
