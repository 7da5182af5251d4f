/* chunk.c - see chunk.h.
 *
 * Every chunk is checked before it is used, because its offset becomes an address. Where a partial
 * result belongs, nothing may have been given yet. Where a final one belongs, all of our
 * contribution must have been given, if there is one, and nothing written. So no chunk counts
 * twice, and none overwrites what we have yet to give. */
#include "engine/chunk.h"

#include <assert.h>
#include <string.h>

#include "engine/collective.h"
#include "engine/oneshot.h"
#include "engine/progressive.h"
#include "engine/parts.h"
#include "engine/bitmap.h"
#include "engine/ring.h"

/* The bytes that `n` elements of a part take in a message. */
static uint64_t element_bytes(const struct collective *collective, const struct part *part,
                              uint64_t n)
{
    if (collective->format == PCCL_UNQUANTIZED)
        return n * part->width;
    return pccl_quantized_size(collective->format, part->dtype, n);
}

/* The bytes of the payload of a chunk: its elements, of however many parts, without gaps. */
static uint64_t payload_bytes(const struct collective *collective, uint64_t offset,
                              uint64_t length)
{
    return element_bytes(collective, part_at(&collective->parts, offset),
                         parts_elements(&collective->parts, offset, length));
}

/* Whether the elements of a chunk lie in one part, which is then *whole. */
static bool is_whole(const struct collective *collective, uint64_t offset, uint64_t length,
                     struct stretch *whole)
{
    uint64_t at = offset;
    return parts_next(&collective->parts, &at, offset + length, whole) && at >= offset + length;
}

/* ---- sending our own ---- */

/* How many offsets make a message of about as many bytes as START says. */
static uint64_t chunk_length(const struct ring *ring)
{
    const struct collective *collective = collective_of(op_of(&ring->flow));
    const struct part *part = part_at(&collective->parts, ring->cursor);
    uint64_t bytes = stream_chunk(ring->flow.stream, collective->chunk);
    uint64_t unit = collective->format == PCCL_UNQUANTIZED
        ? PCCL_ALIGNMENT : pccl_quantized_block(collective->format);
    uint64_t units = bytes / element_bytes(collective, part, unit);
    return units > 0 ? units * unit : unit;
}

/* How many offsets our next chunk has, which begins at the cursor. */
static uint64_t own_length(const struct ring *ring)
{
    const struct collective *collective = collective_of(op_of(&ring->flow));
    uint64_t length = parts_reach(&collective->parts, ring->cursor);
    uint64_t chunk = chunk_length(ring);
    if (length > ring->end - ring->cursor)
        length = ring->end - ring->cursor;
    return length < chunk ? length : chunk;
}

/* Writes the payload of a chunk of our own, whose first stretch is `own`. (A quantized chunk has no
 * other one.) Before START nothing may refer to the memory of a call, so plain elements are copied
 * as well. */
static void write_own(const struct collective *collective, const struct stretch *own,
                      const struct wire_header *header, unsigned char *payload)
{
    int status;
    if (collective->format == PCCL_UNQUANTIZED ? collective->oneshot
                                               : oneshot_overwrites(collective, own->part)) {
        oneshot_write(collective, header->offset, header->length, payload);
        return;
    }
    if (collective->format == PCCL_UNQUANTIZED) {
        parts_gather(&collective->parts, header->offset, header->length, payload);
        return;
    }
    status = pccl_quantize(collective->format, own->part->dtype, payload, own->send, own->length);
    assert(status == PCCL_OK);
    (void)status;
}

/* Makes the message of a chunk of our own: TURN_OVER when it is made. */
static enum turn build_own(struct ring *ring, struct packet *packet,
                           const struct wire_header *header, uint64_t bytes)
{
    struct op *op = op_of(&ring->flow);
    struct collective *collective = collective_of(op);
    struct stretch own;
    bool whole = is_whole(collective, header->offset, header->length, &own);
    int status;
    if (whole && op->started && collective->format == PCCL_UNQUANTIZED
        && !oneshot_overwrites(collective, own.part)) {
        status = packet_build(&op->source, packet, header, own.send, bytes);
        return status == PCCL_OK ? TURN_OVER : TURN_FAILED;
    }
    if (!stream_has_room(ring->flow.stream)) {
        ring->flow.stream->blocked = true;
        return TURN_BLOCKED;
    }
    if (packet_reserve(&op->source, packet, header, bytes) != PCCL_OK)
        return TURN_FAILED;
    write_own(collective, &own, header, packet_payload(op->source.zmq, packet));
    return TURN_OVER;
}

/* The header of our own chunk of `length` offsets at the cursor. */
static struct wire_header own_header(const struct ring *ring, uint64_t length)
{
    struct op *op = op_of(&ring->flow);
    const pccl_ring *place = &ring->place;
    uint32_t members = place->members, next = ring_next(members, place->position);
    struct wire_header header = op_header(op, WIRE_CHUNK);
    header.ring = (uint8_t)ring->flow.index;
    header.step = (uint16_t)collective_first_step(collective_of(op), members);
    header.segment = (uint16_t)ring_segment(members, next, header.step);
    if (collective_of(op)->oneshot) {
        header.step = ONESHOT_STEP;
        header.segment = (uint16_t)place->position;
    }
    header.members = (uint16_t)members;
    header.length = (uint32_t)length;
    header.offset = ring->cursor;
    if (!op->started) {
        header.eager = true;
        header.seq = op->id;
        header.nonce = op->epoch;
    }
    return header;
}

/* Notes a chunk of our own that was sent. What was sent before START is noted at START. */
static void note_sent(struct ring *ring, uint64_t length, uint64_t cost)
{
    struct collective *collective = collective_of(op_of(&ring->flow));
    if (collective->op.started) {
        collective_note_sent(collective, ring->cursor, length);
    } else {
        ring->lent += cost;
        ring->flow.stream->eager += cost;
    }
    ring->cursor += aligned_blocks(length) * PCCL_ALIGNMENT;
    collective_skip(ring);
}

enum turn chunk_send(struct flow *flow)
{
    struct op *op = op_of(flow);
    struct ring *ring = (struct ring *)flow;
    struct collective *collective = collective_of(op);
    uint64_t length = own_length(ring);
    struct packet packet = {0};
    struct wire_header header = own_header(ring, length);
    uint64_t bytes = payload_bytes(collective, ring->cursor, length), cost = eager_cost(bytes);
    enum turn made;
    assert(length > 0);
    if (!progressive_is_ready(collective, ring->cursor, length))
        return TURN_OVER;            /* chunk_command() asks for the next one */
    if (!op->started && stream_credit(flow->stream) < cost)
        return TURN_OVER;            /* START gives it another one */
    if (op->ops->n_held > 0 && op->ops->n_spread == 0)
        return TURN_BLOCKED;         /* or the ring would fill up: all would wait for room */
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
        op_complete(op);             /* cannot free it: it is still our turn */
    return ring->cursor < ring->end ? TURN_MORE : TURN_OVER;
}

/* ---- checking a chunk ---- */

static bool is_oneshot(const struct wire_header *chunk)
{
    return chunk->step == ONESHOT_STEP;
}

/* Whether a collective among that many members has such a step. */
static bool has_step(const struct collective *collective, uint32_t members, uint32_t step)
{
    if (step == ONESHOT_STEP)
        return collective_may_be_oneshot(collective, members);
    return step >= collective_first_step(collective, members)
        && step <= collective_last_step(collective, members);
}

/* Why a chunk cannot belong to the op at all, or NULL. After this its offset and length may become
 * addresses. */
static const char *check_shape(const struct collective *collective, const struct wire_header *chunk,
                               uint64_t bytes)
{
    uint32_t members = chunk->members;
    uint64_t reach;
    if (chunk->ring >= PCCL_RINGS_MAX || members < 2 || members > PCCL_PEERS_MAX
        || (collective->members > 0 && members != collective->members)
        || chunk->segment >= members || !has_step(collective, members, chunk->step))
        return "a chunk has an impossible place in the ring";
    if (chunk->length == 0 || chunk->offset % PCCL_ALIGNMENT != 0
        || chunk->offset >= collective->parts.span * (collective->members > 0 ? members : 1))
        return "a chunk is empty, not aligned or out of bounds";
    reach = parts_reach(&collective->parts, chunk->offset);
    if (chunk->length > reach || (chunk->length % PCCL_ALIGNMENT != 0 && chunk->length != reach))
        return "a chunk is not aligned or out of bounds";
    if (payload_bytes(collective, chunk->offset, chunk->length) != bytes)
        return "a chunk's payload has another size than its header says";
    return NULL;
}

/* Why a chunk that came before START contradicts one that came earlier, or NULL. */
static const char *check_claim(struct collective *collective, const struct wire_header *chunk)
{
    struct op *op = &collective->op;
    struct claim *claim = &collective->claims[chunk->ring];
    uint32_t position = is_oneshot(chunk) ? 1u - chunk->segment
        : ring_receiver(chunk->members, chunk->segment, chunk->step);
    if (!collective->claimed) {
        collective->claimed = true;
        op->seq = chunk->seq;
        op->nonce = chunk->nonce;
    }
    if (!claim->made) {
        claim->made = true;
        claim->members = chunk->members;
        claim->position = position;
        claim->oneshot = is_oneshot(chunk);
    }
    if (op->seq != chunk->seq || op->nonce != chunk->nonce)
        return "early chunks differ in sequence number or nonce";
    if (claim->members != chunk->members || claim->position != position
        || claim->oneshot != is_oneshot(chunk))
        return "early chunks differ in their place in the ring";
    return NULL;
}

/* Why a chunk is not one that this position of the ring receives, or NULL. */
static const char *check_place(const struct collective *collective, const struct wire_header *chunk)
{
    const struct ring *ring;
    const pccl_ring *place;
    uint64_t from, to;
    if (chunk->ring >= collective->op.n_flows)
        return "a chunk has another ring";
    ring = collective_ring(collective, chunk->ring);
    place = &ring->place;
    if (collective->oneshot != is_oneshot(chunk) || chunk->members != place->members)
        return "a chunk has another place in the ring";
    if (is_oneshot(chunk))
        return oneshot_check_place(ring, chunk);
    if (chunk->members != place->members
        || chunk->segment != ring_segment(place->members, place->position, chunk->step))
        return "a chunk has another place in the ring";
    collective_range(ring, chunk->segment, &from, &to);
    if (chunk->offset < from || chunk->offset + chunk->length > to)
        return "a chunk lies outside its segment";
    return NULL;
}

/* Whether a chunk is of what we have sent before START, which others may have heard before us. */
static bool was_sent_eagerly(const struct collective *collective, const struct wire_header *chunk)
{
    const struct ring *ring;
    if (collective->op.started || chunk->ring >= collective->op.n_flows)
        return false;
    ring = collective_ring(collective, chunk->ring);
    return chunk->offset >= ring->first && chunk->offset + chunk->length <= ring->cursor;
}

/* Why a chunk may not come now, or NULL. */
static const char *check_turn(const struct collective *collective, const struct wire_header *chunk)
{
    uint64_t from = chunk->offset / PCCL_ALIGNMENT,
        to = aligned_blocks(chunk->offset + chunk->length);
    bool final = chunk->step + 1u >= chunk->members;
    if (!final)
        return bitmap_any(collective->given_set, from, to) ? "a chunk came twice" : NULL;
    if (collective->shape.reduces && !is_oneshot(chunk)
        && !bitmap_all(collective->given_set, from, to) && !was_sent_eagerly(collective, chunk))
        return "a final chunk lacks our contribution";
    parts_written(&collective->parts, chunk->offset, chunk->length, &from, &to);
    return bitmap_any(collective->written_set, from, to) ? "a chunk came twice" : NULL;
}

/* ---- what becomes of it ---- */

static bool is_last_step(const struct collective *collective, const struct wire_header *chunk)
{
    return is_oneshot(chunk) || chunk->step == collective_last_step(collective, chunk->members);
}

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

/* The last reducing step: recv = partial result + ours. What is sent on, if anything, is the same
 * message if it is small or lies apart in recv, else recv itself, so that nothing is written
 * twice. */
static int reduce_last(struct collective *collective, const struct wire_header *chunk,
                       struct packet *packet)
{
    struct source *source = &collective->op.source;
    unsigned char *in = packet_payload(source->zmq, packet);
    uint64_t bytes = packet->bytes;
    struct stretch own;
    bool whole = is_whole(collective, chunk->offset, chunk->length, &own);
    bool last = is_last_step(collective, chunk);
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

/* apply() for a quantized chunk: changes the payload in place, and stores what is final. */
static void apply_quantized(struct collective *collective, const struct wire_header *chunk,
                            struct packet *packet)
{
    const pccl_zmq *zmq = collective->op.source.zmq;
    const struct part *part = part_at(&collective->parts, chunk->offset);
    unsigned char *in = packet_payload(zmq, packet);
    bool last = chunk->step + 2u == chunk->members, partial = chunk->step + 2u <= chunk->members;
    if (partial) {
        int status = pccl_quantized_reduce(
            collective->format, part->dtype, collective->redop, in,
            part_send(&collective->parts, part, chunk->offset), chunk->length,
            last ? chunk->members : 1,
            last ? part_recv(&collective->parts, part, chunk->offset) : NULL);
        assert(status == PCCL_OK);
        (void)status;
    }
    if (!partial)
        collective_store_quantized(collective, chunk->offset, chunk->length, in);
    next_step(zmq, packet, chunk);
}

/* Does what the chunk's step asks for, up to sending on: 0 or PCCL_ENOMEM. */
static int apply(struct collective *collective, const struct wire_header *chunk,
                 struct packet *packet)
{
    const pccl_zmq *zmq = collective->op.source.zmq;
    bool stored = chunk->step + 2u >= chunk->members;
    if (chunk->step + 1u < chunk->members)
        collective_count_given(collective, chunk->offset, chunk->length);
    if (stored && collective_save(collective, chunk->offset, chunk->length) != PCCL_OK)
        return PCCL_ENOMEM;
    if (stored)
        collective_count_written(collective, chunk->offset, chunk->length);
    if (is_oneshot(chunk)) {
        oneshot_reduce(collective, chunk, packet_payload(zmq, packet));
        return PCCL_OK;
    }
    if (collective->format != PCCL_UNQUANTIZED) {
        apply_quantized(collective, chunk, packet);
        return PCCL_OK;
    }
    if (chunk->step + 2u == chunk->members)
        return reduce_last(collective, chunk, packet);
    if (stored)
        parts_scatter(&collective->parts, chunk->offset, chunk->length,
                      packet_payload(zmq, packet));
    else
        reduce(collective, chunk, packet_payload(zmq, packet), false, 1);
    next_step(zmq, packet, chunk);
    return PCCL_OK;
}

/* Whether a chunk is to be reduced with our contribution. */
static bool is_partial(const struct wire_header *chunk)
{
    return is_oneshot(chunk) || chunk->step + 1u < chunk->members;
}

/* Keeps a chunk until our contribution is there. */
static void hold(struct collective *collective, struct packet **packet)
{
    struct op *op = &collective->op;
    op_forward(op, NULL, &collective->held, packet);
    if (op->failed)
        return;
    collective->n_held++;
    op->ops->n_held++;
}

void chunk_take(struct op *op, const struct wire_header *chunk, struct packet **packet)
{
    struct collective *collective = collective_of(op);
    uint64_t bytes = (*packet)->bytes;
    const char *why = check_shape(collective, chunk, bytes);
    if (why == NULL)
        why = op->started ? check_place(collective, chunk) : check_claim(collective, chunk);
    if (why == NULL)
        why = check_turn(collective, chunk);
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    if (is_partial(chunk) && !progressive_is_ready(collective, chunk->offset, chunk->length)) {
        hold(collective, packet);
        return;
    }
    op->rx_bytes += bytes;
    if (apply(collective, chunk, *packet) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message or for what ABORT restores");
        return;
    }
    if (!is_last_step(collective, chunk))
        op_forward(op, op->started ? op->flows[chunk->ring]->stream : NULL, &collective->early,
                   packet);
    if (is_oneshot(chunk) || chunk->step + 2u >= chunk->members)
        progressive_notify(collective, chunk->offset, chunk->length);
    if (!op->failed && collective_is_complete(collective))
        op_complete(op);
}

/* Takes the chunks that have waited; those that still must wait once more. It can free the op, when
 * the last of them was what it lacked. */
static void take_held(struct op *op)
{
    const pccl_zmq *zmq = op->source.zmq;
    struct packets *held = &collective_of(op)->held;
    struct packet *packet;
    uint32_t n = collective_of(op)->n_held;
    while (n-- > 0 && (packet = packets_take(held)) != NULL) {
        struct wire_header header;
        bool valid = wire_decode(&header, packet_header(zmq, packet));
        assert(valid);
        (void)valid;
        packet_unawait(packet);
        collective_of(op)->n_held--;
        op->ops->n_held--;
        chunk_take(op, &header, &packet);
        packet_free(zmq, packet);
    }
}

void chunk_command(struct op *op, const pccl_command *command)
{
    struct collective *collective = collective_of(op);
    uint32_t i;
    if (command->kind != PCCL_READY || !progressive_ready(collective, command))
        return;
    for (i = 0; i < op->n_flows; i++)
        if (collective_ring(collective, i)->cursor < collective_ring(collective, i)->end)
            flow_request_turn(op->flows[i]);
    if (collective->unready == 0 && op->started
        && collective_ring(collective, 0)->place.members == 1) {
        collective_conclude_alone(collective);
        op_complete(op);
        return;
    }
    take_held(op);
}
