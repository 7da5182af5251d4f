/* twostage.c - see twostage.h.
 *
 * All members cut their contributions at the same offsets. The owner of a segment keeps the
 * messages with the contributions to a piece of it until all are there. Then it decodes and reduces
 * them in the order of the ranks, its own among them, and quantizes the result, which goes around
 * the ring like any final chunk. Kept messages and results do not count as forwards: the engine must
 * go on receiving until the last contribution is there, and results enter only an empty queue, like
 * own chunks. */
#include "engine/twostage.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/bitmap.h"
#include "engine/progressive.h"
#include "engine/ring.h"

uint64_t twostage_unit(const struct collective *collective, const struct part *part)
{
    uint64_t block = pccl_quantized_block(collective->format);
    uint64_t units = collective->chunk / collective_element_bytes(collective, part, block);
    return units > 0 ? units * block : block;
}

static bool has_step(const struct collective *collective, uint32_t members, uint32_t step)
{
    const struct shape *shape = &collective->shape;
    return members > 2 && step == TWOSTAGE_STEP && shape->reduces && !shape->scatters
        && !shape->rooted && collective->format != PCCL_UNQUANTIZED;
}

/* ---- our own contributions ---- */

/* The segment that a position owns. */
static uint32_t segment_of(const struct ring *ring, uint32_t position)
{
    return ring_next(ring->place.members, position);
}

static void own_range(const struct ring *ring, uint64_t *from, uint64_t *to)
{
    ring_range(ring, segment_of(ring, ring->receiver), from, to);
}

static void own_place(const struct ring *ring, struct wire_header *header)
{
    header->step = TWOSTAGE_STEP;
    header->segment = (uint16_t)ring->place.position;
}

static bool in_memory(const struct collective *collective, const struct part *part)
{
    (void)collective;
    (void)part;
    return false;
}

/* ---- checking a contribution ---- */

/* Its receiver follows from its offset, and only with our place in the ring. So contributions that
 * come before START wait for it. */
static uint32_t receiver(const struct wire_header *chunk)
{
    (void)chunk;
    return 0;
}

/* The position that owns the segment of an offset. */
static uint32_t owner_of(const struct ring *ring, uint64_t offset)
{
    uint32_t position, members = ring->place.members;
    uint64_t from, to;
    for (position = 0; position < members; position++) {
        ring_range(ring, segment_of(ring, position), &from, &to);
        if (from <= offset && offset < to)
            break;
    }
    return position;
}

static bool is_ours(const struct ring *ring, uint64_t offset)
{
    uint64_t from, to;
    ring_range(ring, segment_of(ring, ring->place.position), &from, &to);
    return from <= offset && offset < to;
}

/* Whether all members cut a contribution like that. */
static bool is_cut_well(const struct ring *ring, uint32_t owner, const struct wire_header *chunk)
{
    const struct collective *collective = collective_of(op_of(&ring->flow));
    const struct part *part = part_at(&collective->parts, chunk->offset);
    uint64_t unit = twostage_unit(collective, part), from, to, begin, length;
    ring_range(ring, segment_of(ring, owner), &from, &to);
    begin = part->begin > from ? part->begin : from;
    length = parts_reach(&collective->parts, chunk->offset);
    if (length > to - chunk->offset)
        length = to - chunk->offset;
    return (chunk->offset - begin) % unit == 0 && chunk->length == (length < unit ? length : unit);
}

static const char *check_place(const struct ring *ring, const struct wire_header *chunk)
{
    uint32_t members = ring->place.members, position = ring->place.position;
    uint32_t owner = is_ours(ring, chunk->offset) ? position : owner_of(ring, chunk->offset);
    uint32_t steps = (position + members - chunk->segment) % members;
    if (owner == members || steps == 0 || steps > (owner + members - chunk->segment) % members)
        return "a contribution has another place in the ring";
    return is_cut_well(ring, owner, chunk) ? NULL : "a contribution is not cut like those of others";
}

static struct piece *find(const struct collective *collective, uint64_t offset)
{
    struct piece *piece = collective->pieces;
    while (piece != NULL && piece->offset != offset)
        piece = piece->next;
    return piece;
}

static uint32_t rank_of(const struct ring *ring, const struct wire_header *chunk)
{
    return rank_at(&ring->place, chunk->segment);
}

static const char *check_turn(const struct collective *collective, const struct wire_header *chunk)
{
    const struct ring *ring = collective_ring(collective, chunk->ring);
    const struct piece *piece;
    if (!is_ours(ring, chunk->offset))
        return NULL;
    piece = find(collective, chunk->offset);
    if (bitmap_any(collective->given_set, chunk->offset / PCCL_ALIGNMENT,
                   aligned_blocks(chunk->offset + chunk->length))
        || (piece != NULL && piece->from[rank_of(ring, chunk)] != NULL))
        return "a contribution came twice";
    return NULL;
}

static struct role role_of(const struct collective *collective, const struct wire_header *chunk)
{
    bool ours = is_ours(collective_ring(collective, chunk->ring), chunk->offset);
    const struct role role = {.partial = ours, .stored = false, .last = ours};
    return role;
}

/* ---- reducing ---- */

/* Decodes `n` elements of a contribution, from element `at` of it; NULL: quantizes and decodes
 * those of our own, just as others do theirs. */
static void decode(const struct collective *collective, const struct part *part, uint64_t offset,
                   uint64_t at, uint64_t n, struct packet *packet, int dtype, void *out)
{
    unsigned char own[STRIP * sizeof(double)];
    const unsigned char *in = own;
    int status;
    if (packet != NULL) {
        in = packet_payload(collective->op.source.zmq, packet)
            + pccl_quantized_size(collective->format, part->dtype, at);
    } else {
        assert(pccl_quantized_size(collective->format, part->dtype, n) <= sizeof own);
        collective_quantize(collective, part, offset + at,
                            part_send(&collective->parts, part, offset + at), n, own, 1, false);
    }
    status = pccl_dequantize(collective->format, dtype, out, in, (size_t)n);
    assert(status == PCCL_OK);
    (void)status;
}

/* Reduces all contributions to a piece, in fp64 if they are, else in fp32, and quantizes the result.
 * (The quantized form of a type of 16 bits is that of fp32.) */
static void reduce(const struct collective *collective, const struct piece *piece,
                   uint64_t length, unsigned char *to)
{
    const struct part *part = part_at(&collective->parts, piece->offset);
    int dtype = part->dtype == PCCL_F64 ? PCCL_F64 : PCCL_F32;
    uint32_t rank, times = collective->redop == PCCL_AVG ? piece->members : 1;
    double sum[STRIP], next[STRIP];      /* elements of either type, aligned */
    uint64_t at, n;
    for (at = 0; at < length; at += n) {
        int status = PCCL_OK;
        n = length - at < STRIP ? length - at : STRIP;
        for (rank = 0; rank < piece->members; rank++) {
            decode(collective, part, piece->offset, at, n, piece->from[rank], dtype,
                   rank == 0 ? sum : next);
            if (rank > 0)
                status |= pccl_reduce(dtype, collective->redop, sum, sum, next, (size_t)n,
                                      rank + 1 == piece->members ? piece->members : 1);
        }
        assert(status == PCCL_OK);
        (void)status;
        if (part->error != NULL) {
            collective_quantize(collective, part, piece->offset + at, sum, n, to, times, true);
        } else {
            status = pccl_quantize(collective->format, dtype, to, sum, (size_t)n);
            assert(status == PCCL_OK);
        }
        to += pccl_quantized_size(collective->format, dtype, n);
    }
}

/* Stores the result of a piece, and queues it to be sent: 0 or PCCL_ENOMEM. */
static int finish(struct collective *collective, struct ring *ring, struct piece *piece,
                  const struct wire_header *chunk)
{
    struct op *op = &collective->op;
    const struct part *part = part_at(&collective->parts, chunk->offset);
    struct wire_header header = *chunk;
    struct packet *packet = packet_new();
    int status = PCCL_ENOMEM;
    header.step = (uint16_t)(ring->place.members - 1);
    header.segment = (uint16_t)segment_of(ring, ring->place.position);
    if (packet != NULL)
        status = packet_reserve(&op->source, packet, &header,
                                collective_payload_bytes(collective, chunk->offset, chunk->length));
    if (status == PCCL_OK) {
        reduce(collective, piece, chunk->length, packet_payload(op->source.zmq, packet));
        status = collective_overwrite(collective, chunk->offset, chunk->length);
    }
    if (status == PCCL_OK) {
        status = pccl_dequantize(collective->format, part->dtype,
                                 part_recv(&collective->parts, part, chunk->offset),
                                 packet_payload(op->source.zmq, packet), (size_t)chunk->length);
        assert(status == PCCL_OK);
        collective_count_given(collective, chunk->offset, chunk->length);
        collective_free_piece(collective, piece);
        packets_append(&ring->finals, packet);
        flow_request_turn(&ring->flow);
        progressive_notify(collective, chunk->offset, chunk->length);
        return PCCL_OK;
    }
    if (packet != NULL)
        packet_free(op->source.zmq, packet);
    return status;
}

/* Keeps a contribution to our segment, and reduces the piece if that was the last one. */
static int apply(struct collective *collective, const struct wire_header *chunk,
                 struct packet **packet)
{
    struct ring *ring = collective_ring(collective, chunk->ring);
    struct piece *piece;
    struct packet *fresh;
    if (!is_ours(ring, chunk->offset))
        return PCCL_OK;
    piece = find(collective, chunk->offset);
    if (piece == NULL)
        piece = collective_new_piece(collective, chunk->offset, ring->place.members);
    fresh = packet_new();
    if (piece == NULL || fresh == NULL) {
        free(fresh);
        return PCCL_ENOMEM;
    }
    piece->from[rank_of(ring, chunk)] = *packet;
    *packet = fresh;
    return ++piece->n + 1 == piece->members ? finish(collective, ring, piece, chunk) : PCCL_OK;
}

const struct algorithm twostage_algorithm = {
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
