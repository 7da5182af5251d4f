/* chunk.c - see chunk.h. */
#include "engine/chunk.h"

#include <assert.h>

#include "engine/bitmap.h"
#include "engine/collective.h"
#include "engine/oneshot.h"
#include "engine/progressive.h"
#include "engine/ring.h"
#include "engine/twostage.h"

/* ---- sending our own ---- */

/* The number of offsets in a message of about as many bytes as START says. */
static uint64_t chunk_length(const struct ring *ring)
{
    const struct collective *collective = collective_of(op_of(&ring->flow));
    const struct part *part = part_at(&collective->parts, ring->cursor);
    uint64_t bytes = stream_chunk(ring->flow.stream, collective->chunk);
    uint64_t unit = collective->format == PCCL_UNQUANTIZED
        ? PCCL_ALIGNMENT : pccl_quantized_block(collective->format);
    uint64_t units = bytes / collective_element_bytes(collective, part, unit);
    return units > 0 ? units * unit : unit;
}

/* The number of offsets in our next chunk, which begins at the cursor. */
static uint64_t own_length(const struct ring *ring)
{
    const struct collective *collective = collective_of(op_of(&ring->flow));
    uint64_t length = parts_reach(&collective->parts, ring->cursor);
    uint64_t chunk = collective->algorithm == &twostage_algorithm
        ? twostage_unit(collective, part_at(&collective->parts, ring->cursor))
        : chunk_length(ring);
    if (length > ring->end - ring->cursor)
        length = ring->end - ring->cursor;
    return length < chunk ? length : chunk;
}

/* Builds the message of a chunk of our own; returns TURN_OVER on success. Before START the payload
 * is always copied, because ABORT must give the memory back at once. */
static enum turn build_own(struct ring *ring, struct packet *packet,
                           const struct wire_header *header, uint64_t bytes)
{
    struct op *op = op_of(&ring->flow);
    struct collective *collective = collective_of(op);
    const struct algorithm *algorithm = collective->algorithm;
    struct stretch own;
    bool whole = parts_whole(&collective->parts, header->offset, header->length, &own);
    int status;
    if (whole && op->started && algorithm->in_memory(collective, own.part)) {
        status = packet_build(&op->source, packet, header, own.send, bytes);
        return status == PCCL_OK ? TURN_OVER : TURN_FAILED;
    }
    if (!stream_has_room(ring->flow.stream)) {
        ring->flow.stream->blocked = true;
        return TURN_BLOCKED;
    }
    if (packet_reserve(&op->source, packet, header, bytes) != PCCL_OK)
        return TURN_FAILED;
    algorithm->write(collective, header->offset, header->length,
                     packet_payload(op->source.zmq, packet));
    return TURN_OVER;
}

/* The header of our own chunk of `length` offsets at the cursor. */
static struct wire_header own_header(const struct ring *ring, uint64_t length)
{
    struct op *op = op_of(&ring->flow);
    struct wire_header header = op_header(op, WIRE_CHUNK);
    header.ring = (uint8_t)ring->index;
    collective_of(op)->algorithm->own_place(ring, &header);
    header.members = (uint16_t)ring->place.members;
    header.length = (uint32_t)length;
    header.offset = ring->cursor;
    if (!op->started) {
        header.eager = true;
        header.seq = op->id;
        header.nonce = op->epoch;
    }
    return header;
}

/* Notes that a chunk of our own was sent. For chunks sent before START only the credit counts now;
 * note_eager() in start.c notes them at START. */
static void note_sent(struct ring *ring, uint64_t length, uint64_t cost)
{
    struct collective *collective = collective_of(op_of(&ring->flow));
    if (collective->op.started) {
        collective_note_sent(collective, ring->cursor, length);
    } else {
        ring->lent += cost;
        ring->flow.stream->eager += cost;
    }
    ring->flow.used = true;
    ring->cursor += aligned_blocks(length) * PCCL_ALIGNMENT;
    collective_skip(ring);
}

static bool has_more(const struct ring *ring)
{
    return ring->finals.head != NULL || ring->cursor < ring->end;
}

/* Sends a result of our segment. */
static enum turn send_final(struct ring *ring)
{
    const pccl_zmq *zmq = ring->flow.source->zmq;
    if (stream_send(ring->flow.stream, ring->flow.source, ring->finals.head) == BLOCKED)
        return TURN_BLOCKED;
    packet_free(zmq, packets_take(&ring->finals));
    return has_more(ring) ? TURN_MORE : TURN_OVER;
}

/* Sends our next own chunk. */
static enum turn send_own(struct ring *ring)
{
    struct flow *flow = &ring->flow;
    struct op *op = op_of(flow);
    struct collective *collective = collective_of(op);
    uint64_t length = own_length(ring);
    struct packet packet = {0};
    struct wire_header header = own_header(ring, length);
    uint64_t bytes = collective_payload_bytes(collective, ring->cursor, length),
        cost = eager_cost(bytes);
    enum turn made;
    assert(length > 0);
    if (!progressive_is_ready(collective, ring->cursor, length))
        return TURN_OVER;            /* READY requests another turn */
    if (!op->started && !stream_lends(flow->stream, cost))
        return TURN_OVER;            /* START requests another turn */
    if (op->ops->n_held > 0 && op->ops->n_spread == 0)
        return TURN_BLOCKED;         /* otherwise the ring could fill up and deadlock */
    made = build_own(ring, &packet, &header, bytes);
    if (made == TURN_FAILED)
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
    if (made != TURN_OVER)
        return made;
    if (stream_send(flow->stream, &op->source, &packet) == BLOCKED) {
        packet_clear(op->source.zmq, &packet);
        return TURN_BLOCKED;
    }
    note_sent(ring, length, cost);
    if (collective_is_complete(collective))
        op_complete(op);             /* does not free it: the flow that has the turn is pending */
    return has_more(ring) ? TURN_MORE : TURN_OVER;
}

enum turn chunk_send(struct flow *flow)
{
    struct ring *ring = (struct ring *)flow;
    return ring->finals.head != NULL ? send_final(ring) : send_own(ring);
}

/* ---- receiving the chunks of others ---- */

static const struct algorithm *algorithm_of(const struct wire_header *chunk)
{
    return chunk->step == ONESHOT_STEP ? &oneshot_algorithm
        : chunk->step == TWOSTAGE_STEP ? &twostage_algorithm : &ring_algorithm;
}

/* Why a chunk cannot belong to the op at all, or NULL. If NULL, its offset and length are safe to
 * turn into addresses. */
static const char *check_shape(const struct collective *collective, const struct wire_header *chunk,
                               uint64_t bytes)
{
    uint32_t members = chunk->members;
    uint64_t reach;
    if (chunk->ring >= PCCL_RINGS_MAX || members < 2 || members > PCCL_PEERS_MAX
        || (collective->members > 0 && members != collective->members)
        || chunk->segment >= members
        || !algorithm_of(chunk)->has_step(collective, members, chunk->step))
        return "a chunk has an impossible place in the ring";
    if (chunk->length == 0 || chunk->offset % PCCL_ALIGNMENT != 0
        || chunk->offset >= collective->parts.span * (collective->members > 0 ? members : 1))
        return "a chunk is empty, not aligned or out of bounds";
    reach = parts_reach(&collective->parts, chunk->offset);
    if (chunk->length > reach || (chunk->length % PCCL_ALIGNMENT != 0 && chunk->length != reach))
        return "a chunk is not aligned or out of bounds";
    if (collective_payload_bytes(collective, chunk->offset, chunk->length) != bytes)
        return "the payload of a chunk does not have the size that its header gives";
    return NULL;
}

/* Why a chunk that came before START contradicts one that came earlier, or NULL. */
static const char *check_claim(struct collective *collective, const struct wire_header *chunk)
{
    struct op *op = &collective->op;
    struct claim *claim = &collective->claims[chunk->ring];
    const struct algorithm *algorithm = algorithm_of(chunk);
    uint32_t position = algorithm->receiver(chunk);
    if (!collective->claimed) {
        collective->claimed = true;
        op->seq = chunk->seq;
        op->nonce = chunk->nonce;
    }
    if (claim->algorithm == NULL) {
        claim->members = chunk->members;
        claim->position = position;
        claim->algorithm = algorithm;
    }
    if (op->seq != chunk->seq || op->nonce != chunk->nonce)
        return "early chunks differ in sequence number or nonce";
    if (claim->members != chunk->members || claim->position != position
        || claim->algorithm != algorithm)
        return "early chunks differ in their place in the ring";
    return NULL;
}

/* Whether a collective of that algorithm has such chunks. Final ones go around the ring in two
 * stages, too. */
static bool is_of(const struct wire_header *chunk, const struct algorithm *algorithm)
{
    return algorithm_of(chunk) == algorithm
        || (algorithm == &twostage_algorithm && algorithm_of(chunk) == &ring_algorithm
            && chunk->step + 1u >= chunk->members);
}

/* Why our place in the ring cannot receive a chunk, or NULL. */
static const char *check_place(const struct collective *collective, const struct wire_header *chunk)
{
    const struct ring *ring;
    if (chunk->ring >= collective->n_rings)
        return "a chunk has another ring";
    ring = collective_ring(collective, chunk->ring);
    if (!is_of(chunk, collective->algorithm) || chunk->members != ring->place.members)
        return "a chunk has another place in the ring";
    return algorithm_of(chunk)->check_place(ring, chunk);
}

/* Why a chunk is invalid, or NULL. */
static const char *check(struct collective *collective, const struct wire_header *chunk,
                         uint64_t bytes)
{
    const char *why = check_shape(collective, chunk, bytes);
    if (why == NULL)
        why = collective->op.started ? check_place(collective, chunk)
                                     : check_claim(collective, chunk);
    return why != NULL ? why : algorithm_of(chunk)->check_turn(collective, chunk);
}

void chunk_take(struct op *op, const struct wire_header *chunk, struct packet **packet)
{
    struct collective *collective = collective_of(op);
    const struct algorithm *algorithm = algorithm_of(chunk);
    uint64_t bytes = (*packet)->bytes;
    const char *why;
    struct role role;
    if (!op->started && chunk->step == TWOSTAGE_STEP) {
        op_forward(op, NULL, &collective->unread, packet);
        return;
    }
    why = check(collective, chunk, bytes);
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    role = algorithm->role(collective, chunk);
    if (role.partial && !progressive_is_ready(collective, chunk->offset, chunk->length)) {
        progressive_hold(collective, packet);
        return;
    }
    op->rx_bytes += bytes;
    if (algorithm->apply(collective, chunk, packet) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message or for what ABORT restores");
        return;
    }
    if (!role.last)
        op_forward(op, op->started ? op->flows[chunk->ring]->stream : NULL, &collective->early,
                   packet);
    if (role.stored)
        progressive_notify(collective, chunk->offset, chunk->length);
    if (!op->failed && collective_is_complete(collective))
        op_complete(op);
}
