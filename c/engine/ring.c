/* ring.c - see ring.h.
 *
 * Every chunk is checked before it is used, because its offset becomes an address. A partial result
 * must be for blocks whose contribution has not been given. A final result must be for blocks that
 * have not been written and, if the collective reduces, whose contribution has been given. So no
 * chunk counts twice, and none overwrites a contribution that we must still give. */
#include "engine/ring.h"

#include <assert.h>

#include "engine/bitmap.h"

/* ---- geometry ---- */

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

void ring_range(const struct ring *ring, uint32_t segment, uint64_t *from, uint64_t *to)
{
    const struct collective *collective = collective_of(op_of(&ring->flow));
    const pccl_ring *place = &ring->place;
    uint32_t owner = ring_owner(place->members, segment);
    uint64_t begin = place->begin;
    if (collective->shape.scatters || collective->shape.gathers) {
        *from = rank_at(place, owner) * collective->parts.span + begin;
        *to = *from + place->count;
    } else if (collective->shape.rooted) {
        *from = begin;
        *to = begin + (owner == place->root ? place->count : 0);
    } else {
        *from = begin + ring_bound(place->count, place->members, segment);
        *to = begin + ring_bound(place->count, place->members, segment + 1);
    }
}

/* The first and the last step of a chunk, among `members` > 1. */
static uint32_t first_step(const struct collective *collective, uint32_t members)
{
    return collective->shape.reduces ? 0 : members - 1;
}

static uint32_t last_step(const struct collective *collective, uint32_t members)
{
    const struct shape *shape = &collective->shape;
    return shape->scatters || (shape->reduces && shape->rooted) ? members - 2 : 2 * members - 3;
}

static bool has_step(const struct collective *collective, uint32_t members, uint32_t step)
{
    return step >= first_step(collective, members) && step <= last_step(collective, members);
}

/* ---- our own chunks ---- */

/* The segment of our own chunks: our successor sees it at the first step. */
static uint32_t own_segment(const struct ring *ring)
{
    const pccl_ring *place = &ring->place;
    uint32_t step = first_step(collective_of(op_of(&ring->flow)), place->members);
    return ring_segment(place->members, ring_next(place->members, place->position), step);
}

static void own_range(const struct ring *ring, uint64_t *from, uint64_t *to)
{
    ring_range(ring, own_segment(ring), from, to);
}

static void own_place(const struct ring *ring, struct wire_header *header)
{
    const struct collective *collective = collective_of(op_of(&ring->flow));
    header->step = (uint16_t)first_step(collective, ring->place.members);
    header->segment = (uint16_t)own_segment(ring);
}

static bool in_memory(const struct collective *collective, const struct part *part)
{
    (void)part;
    return collective->format == PCCL_UNQUANTIZED;
}

void ring_write_own(const struct collective *collective, uint64_t offset, uint64_t length,
                    unsigned char *to)
{
    const struct part *part = part_at(&collective->parts, offset);
    if (collective->format == PCCL_UNQUANTIZED)
        parts_gather(&collective->parts, offset, length, to);
    else
        collective_quantize(collective, part, offset, part_send(&collective->parts, part, offset),
                            length, to, 1, false);
}

/* ---- checking a chunk ---- */

static uint32_t receiver(const struct wire_header *chunk)
{
    return ring_receiver(chunk->members, chunk->segment, chunk->step);
}

static const char *check_place(const struct ring *ring, const struct wire_header *chunk)
{
    const pccl_ring *place = &ring->place;
    uint64_t from, to;
    if (chunk->segment != ring_segment(place->members, place->position, chunk->step))
        return "a chunk has another place in the ring";
    ring_range(ring, chunk->segment, &from, &to);
    if (chunk->offset < from || chunk->offset + chunk->length > to)
        return "a chunk lies outside its segment";
    return NULL;
}

/* Whether a chunk covers only offsets that we have sent before START. Others may have added to
 * these and returned them to us, because they may start before us. */
static bool was_sent_eagerly(const struct collective *collective, const struct wire_header *chunk)
{
    const struct ring *ring;
    if (collective->op.started || chunk->ring >= collective->op.n_flows)
        return false;
    ring = collective_ring(collective, chunk->ring);
    return chunk->offset >= ring->first && chunk->offset + chunk->length <= ring->cursor;
}

static struct role role_of(const struct collective *collective, const struct wire_header *chunk)
{
    struct role role;
    role.partial = chunk->step + 1u < chunk->members;
    role.stored = chunk->step + 2u >= chunk->members;
    role.last = chunk->step == last_step(collective, chunk->members);
    return role;
}

static const char *check_turn(const struct collective *collective, const struct wire_header *chunk)
{
    uint64_t from = chunk->offset / PCCL_ALIGNMENT,
        to = aligned_blocks(chunk->offset + chunk->length);
    if (role_of(collective, chunk).partial)
        return bitmap_any(collective->given_set, from, to) ? "a chunk came twice" : NULL;
    if (collective->shape.reduces
        && !bitmap_all(collective->given_set, from, to) && !was_sent_eagerly(collective, chunk))
        return "a final chunk lacks our contribution";
    parts_written(&collective->parts, chunk->offset, chunk->length, &from, &to);
    return bitmap_any(collective->written_set, from, to) ? "a chunk came twice" : NULL;
}

/* ---- handling a chunk ---- */

static void next_step(const pccl_zmq *zmq, struct packet *packet, const struct wire_header *chunk)
{
    wire_set_step(packet_header(zmq, packet), (uint16_t)(chunk->step + 1u));
}

/* Adds our contribution to a partial result, in the message or into recv. */
static void reduce(struct collective *collective, const struct wire_header *chunk,
                   unsigned char *in, bool into_recv, uint32_t divisor)
{
    uint64_t at = chunk->offset;
    struct stretch own;
    for (; parts_next(&collective->parts, &at, chunk->offset + chunk->length, &own);
         in += own.bytes) {
        int status = pccl_reduce(own.part->dtype, collective->redop, into_recv ? own.recv : in,
                                 in, own.send, own.length,
                                 collective_divisor(own.part->dtype, divisor));
        assert(status == PCCL_OK);
        (void)status;
    }
}

/* The last reducing step: recv = partial result + our contribution. The result is sent on, unless
 * this is the last step. If the message is small or spans several parts, it holds the result and is
 * sent on itself; else a message that refers to recv is, so that the result is written only
 * once. */
static int reduce_last(struct collective *collective, const struct wire_header *chunk,
                       struct packet *packet)
{
    struct source *source = &collective->op.source;
    unsigned char *in = packet_payload(source->zmq, packet);
    uint64_t bytes = packet->bytes;
    struct stretch own;
    bool whole = parts_whole(&collective->parts, chunk->offset, chunk->length, &own);
    bool last = role_of(collective, chunk).last;
    bool again = (bytes <= source->copy_max || !whole) && !last;
    struct wire_header header = *chunk;
    reduce(collective, chunk, in, !again, chunk->members);
    if (again) {
        parts_scatter(&collective->parts, chunk->offset, chunk->length, in);
        next_step(source->zmq, packet, chunk);
        return PCCL_OK;
    }
    if (last)
        return PCCL_OK;
    packet_clear(source->zmq, packet);
    header.step++;
    return packet_build(source, packet, &header, own.recv, bytes);
}

/* Does the same as pccl_quantized_reduce() where the errors are wanted. */
static void reduce_with_errors(struct collective *collective, const struct part *part,
                               uint64_t offset, uint64_t length, unsigned char *in,
                               uint32_t divisor)
{
    float sum[STRIP];
    uint32_t times = collective->redop == PCCL_AVG ? divisor : 1;
    uint64_t end = offset + length, n;
    for (; offset < end; offset += n) {
        int status;
        n = end - offset < STRIP ? end - offset : STRIP;
        status = pccl_dequantize(collective->format, PCCL_F32, sum, in, (size_t)n);
        status |= pccl_reduce(PCCL_F32, collective->redop, sum, sum,
                              part_send(&collective->parts, part, offset), (size_t)n, divisor);
        assert(status == PCCL_OK);
        (void)status;
        collective_quantize(collective, part, offset, sum, n, in, times, false);
        in += pccl_quantized_size(collective->format, PCCL_F32, n);
    }
}

/* Does the same as apply() for a quantized chunk: changes the payload in place, and stores a final
 * result. */
static void apply_quantized(struct collective *collective, const struct wire_header *chunk,
                            struct packet *packet)
{
    const pccl_zmq *zmq = collective->op.source.zmq;
    const struct part *part = part_at(&collective->parts, chunk->offset);
    unsigned char *in = packet_payload(zmq, packet);
    bool last = chunk->step + 2u == chunk->members, partial = chunk->step + 2u <= chunk->members;
    bool noted = partial && part->error != NULL;
    if (noted)
        reduce_with_errors(collective, part, chunk->offset, chunk->length, in,
                           last ? chunk->members : 1);
    else if (partial) {
        int status = pccl_quantized_reduce(
            collective->format, part->dtype, collective->redop, in,
            part_send(&collective->parts, part, chunk->offset), chunk->length,
            last ? chunk->members : 1,
            last ? part_recv(&collective->parts, part, chunk->offset) : NULL);
        assert(status == PCCL_OK);
        (void)status;
    }
    if (!partial || (noted && last)) {
        int status = pccl_dequantize(collective->format, part->dtype,
                                     part_recv(&collective->parts, part, chunk->offset), in,
                                     chunk->length);
        assert(status == PCCL_OK);
        (void)status;
    }
    next_step(zmq, packet, chunk);
}

static int apply(struct collective *collective, const struct wire_header *chunk,
                 struct packet **taken)
{
    const pccl_zmq *zmq = collective->op.source.zmq;
    struct packet *packet = *taken;
    struct role role = role_of(collective, chunk);
    if (role.partial)
        collective_count_given(collective, chunk->offset, chunk->length);
    if (role.stored && collective_overwrite(collective, chunk->offset, chunk->length) != PCCL_OK)
        return PCCL_ENOMEM;
    if (collective->format != PCCL_UNQUANTIZED) {
        apply_quantized(collective, chunk, packet);
        return PCCL_OK;
    }
    if (role.partial && role.stored)
        return reduce_last(collective, chunk, packet);
    if (role.stored)
        parts_scatter(&collective->parts, chunk->offset, chunk->length,
                      packet_payload(zmq, packet));
    else
        reduce(collective, chunk, packet_payload(zmq, packet), false, 1);
    next_step(zmq, packet, chunk);
    return PCCL_OK;
}

const struct algorithm ring_algorithm = {
    .has_step = has_step,
    .own_range = own_range,
    .own_place = own_place,
    .in_memory = in_memory,
    .write = ring_write_own,
    .receiver = receiver,
    .check_place = check_place,
    .check_turn = check_turn,
    .role = role_of,
    .apply = apply,
};
