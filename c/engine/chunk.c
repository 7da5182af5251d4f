/* chunk.c - the chunks of a collective: our own are sent; others are judged, reduced or stored, and
 * sent on (pccl.h, THE RING).
 *
 * Every chunk is judged before it is used, as its offset becomes an address. A partial result must
 * find nothing that we have given, a final one all of our contribution, if there is one to give,
 * and nothing written: so no chunk counts twice, and none overwrites what we have yet to give.
 * The op is complete when all that we have to give is given and all of recv is written: then no
 * chunk will come any more. */
#include "engine/engine.h"

#include <string.h>

static bool is_complete(const struct op *op)
{
    return op->started && op->collective.done == op->collective.wanted;
}

static void count_given(struct collective *collective, uint64_t offset, uint64_t length)
{
    granules_add(collective->given_set, offset / PCCL_QUANTUM, granules(offset + length));
    collective->done += length;
}

static void count_written(struct collective *collective, uint64_t offset, uint64_t length)
{
    uint64_t from, to;
    written_granules(collective, offset, length, &from, &to);
    granules_add(collective->written_set, from, to);
    collective->done += length;
}

/* Bytes of so many elements of a part in a message. */
static uint64_t payload_bytes(const struct collective *collective, const struct part *part,
                              uint64_t n)
{
    if (collective->format == PCCL_UNQUANTIZED)
        return n * part->width;
    return pccl_quantized_size(collective->format, part->dtype, n);
}

/* ---- sending our own ---- */

/* Elements of a part whose message has about as many bytes as START says. */
static uint64_t chunk_elements(const struct link *ring, const struct part *part)
{
    const struct collective *collective = &ring->op->collective;
    uint64_t bytes = stream_chunk(ring->stream, collective->chunk);
    uint64_t step = collective->format == PCCL_UNQUANTIZED
        ? PCCL_QUANTUM : pccl_quantized_block(collective->format);
    uint64_t steps = bytes / payload_bytes(collective, part, step);
    return steps > 0 ? steps * step : step;
}

/* Elements of a part's chunk that begins at the cursor. */
static uint64_t own_length(const struct link *ring, const struct part *part)
{
    const struct collective *collective = &ring->op->collective;
    uint64_t length = part_left(collective, part, ring->cursor);
    uint64_t chunk = chunk_elements(ring, part);
    if (length > ring->end - ring->cursor)
        length = ring->end - ring->cursor;
    return length < chunk ? length : chunk;
}

/* What we have sent is given, or it is part of the result. */
static void note_sent(struct op *op, const struct part *part, uint64_t offset, uint64_t length)
{
    struct collective *collective = &op->collective;
    const unsigned char *from = part_send(collective, part, offset);
    unsigned char *to = part_recv(collective, part, offset);
    if (collective->reduces) {
        count_given(collective, offset, length);
        return;
    }
    if (to != from)
        memcpy(to, from, (size_t)length * part->width);
    count_written(collective, offset, length);
}

/* The message of a chunk of our own: TURN_OVER when it is made. */
static enum turn build_own(struct link *ring, const struct part *part, struct packet *packet,
                           const struct wire_header *header)
{
    struct op *op = ring->op;
    struct collective *collective = &op->collective;
    const unsigned char *own = part_send(collective, part, header->offset);
    uint64_t bytes = payload_bytes(collective, part, header->length);
    int status;
    if (collective->format == PCCL_UNQUANTIZED)
        return packet_build(op, packet, header, own, bytes) == PCCL_OK ? TURN_OVER : TURN_FAILED;
    if (!stream_has_room(ring->stream)) {
        ring->stream->blocked = true;
        return TURN_BLOCKED;
    }
    if (packet_reserve(op, packet, header, bytes) != PCCL_OK)
        return TURN_FAILED;
    status = pccl_quantize(collective->format, part->dtype,
                           packet_payload(op->engine->zmq, packet), own, header->length);
    assert(status == PCCL_OK);
    (void)status;
    return TURN_OVER;
}

enum turn collective_send(struct link *ring)
{
    struct op *op = ring->op;
    struct collective *collective = &op->collective;
    const struct part *part = part_at(collective, ring->cursor);
    uint64_t length = own_length(ring, part);
    struct packet packet = {0};
    struct wire_header header = {0};
    enum turn made;
    assert(op->started && length > 0);
    header.kind = WIRE_CHUNK;
    header.ring = (uint8_t)ring->index;
    header.hop = (uint16_t)collective_first_hop(collective, ring->members);
    header.segment = (uint16_t)ring_segment(ring->members, (ring->position + 1) % ring->members,
                                            header.hop);
    header.members = (uint16_t)ring->members;
    header.length = (uint32_t)length;
    header.run = op->run;
    header.seq = op->seq;
    header.tag = op->tag;
    header.nonce = op->nonce;
    header.offset = ring->cursor;
    made = build_own(ring, part, &packet, &header);
    if (made == TURN_FAILED)
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
    if (made != TURN_OVER)
        return made;
    if (stream_send(ring->stream, op, &packet) == BLOCKED) {
        packet_clear(op->engine->zmq, &packet);
        return TURN_BLOCKED;
    }
    note_sent(op, part, ring->cursor, length);
    ring->cursor += granules(length) * PCCL_QUANTUM;
    if (is_complete(op))
        op_complete(op);             /* which leaves it alone, as it is still our turn */
    return ring->cursor < ring->end ? TURN_MORE : TURN_OVER;
}

/* ---- judging a chunk ---- */

/* Why a chunk cannot be part of the op at all, or NULL. After this its offset and length may
 * become addresses. */
static const char *check_shape(const struct op *op, const struct wire_header *chunk, uint64_t bytes)
{
    const struct collective *collective = &op->collective;
    uint32_t members = chunk->members;
    const struct part *part;
    if (chunk->ring >= PCCL_RINGS_MAX || members < 2 || members > PCCL_PEERS_MAX
        || (collective->members > 0 && members != collective->members)
        || chunk->segment >= members || chunk->hop < collective_first_hop(collective, members)
        || chunk->hop > collective_last_hop(collective, members))
        return "a chunk has an impossible place in the ring";
    if (chunk->length == 0 || chunk->offset % PCCL_QUANTUM != 0
        || chunk->offset >= collective->span * (collective->members > 0 ? members : 1))
        return "a chunk is empty, not aligned or out of bounds";
    part = part_at(collective, chunk->offset);
    if (chunk->length > part_left(collective, part, chunk->offset)
        || (chunk->length % PCCL_QUANTUM != 0
            && chunk->length != part_left(collective, part, chunk->offset)))
        return "a chunk is not aligned or out of bounds";
    if (payload_bytes(collective, part, chunk->length) != bytes)
        return "a chunk's payload has another size than its header says";
    return NULL;
}

/* Why a chunk that came before START contradicts one that came earlier, or NULL. */
static const char *check_claim(struct op *op, const struct wire_header *chunk)
{
    struct collective *collective = &op->collective;
    struct claim *claim = &collective->claims[chunk->ring];
    uint32_t position = ring_receiver(chunk->members, chunk->segment, chunk->hop);
    if (!collective->claimed) {
        collective->claimed = true;
        op->seq = chunk->seq;
        op->nonce = chunk->nonce;
    }
    if (!claim->made) {
        claim->made = true;
        claim->members = chunk->members;
        claim->position = position;
    }
    if (op->seq != chunk->seq || op->nonce != chunk->nonce)
        return "early chunks differ in sequence number or nonce";
    if (claim->members != chunk->members || claim->position != position)
        return "early chunks differ in their place in the ring";
    return NULL;
}

/* Why a chunk is not one that this position of the ring receives, or NULL. */
static const char *check_place(const struct op *op, const struct wire_header *chunk)
{
    const struct link *ring;
    uint64_t from, to;
    if (chunk->ring >= op->n_links)
        return "a chunk has another ring";
    ring = op->links[chunk->ring];
    if (chunk->members != ring->members
        || chunk->segment != ring_segment(ring->members, ring->position, chunk->hop))
        return "a chunk has another place in the ring";
    ring_part(ring, chunk->segment, &from, &to);
    if (chunk->offset < from || chunk->offset + chunk->length > to)
        return "a chunk lies outside its segment";
    return NULL;
}

/* Why a chunk may not come now, or NULL. */
static const char *check_turn(const struct op *op, const struct wire_header *chunk)
{
    const struct collective *collective = &op->collective;
    uint64_t from = chunk->offset / PCCL_QUANTUM, to = granules(chunk->offset + chunk->length);
    bool final = chunk->hop + 1u >= chunk->members;
    if (!final)
        return granules_any(collective->given_set, from, to) ? "a chunk came twice" : NULL;
    if (collective->reduces && !granules_all(collective->given_set, from, to))
        return "a final chunk lacks our contribution";
    written_granules(collective, chunk->offset, chunk->length, &from, &to);
    return granules_any(collective->written_set, from, to) ? "a chunk came twice" : NULL;
}

/* ---- what becomes of it ---- */

/* Sends the message in the inbox on: now if nothing is before it and there is room, else it
 * waits. */
static void forward(struct op *op, uint8_t index)
{
    pccl_engine *engine = op->engine;
    struct stream *stream = op->started ? op->links[index]->stream : NULL;
    struct packet *fresh, *packet = engine->inbox;
    if (stream != NULL && stream->forwards.head == NULL && stream_send(stream, op, packet) == SENT)
        return;
    fresh = packet_new();
    if (fresh == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
        return;
    }
    engine->inbox = fresh;
    packet->op = op;
    packet->ring = index;
    packets_append(stream != NULL ? &stream->forwards : &op->collective.early, packet);
    packet_await(op, packet);
}

static bool is_last_hop(const struct op *op, const struct wire_header *chunk)
{
    return chunk->hop == collective_last_hop(&op->collective, chunk->members);
}

/* The last reducing hop: recv = partial result + ours. What is sent on, if anything is, is the
 * message again if it is small, else recv itself, so that nothing is written twice. */
static int reduce_last(struct op *op, const struct part *part, const struct wire_header *chunk)
{
    struct collective *collective = &op->collective;
    pccl_engine *engine = op->engine;
    struct packet *inbox = engine->inbox;
    unsigned char *in = packet_payload(engine->zmq, inbox);
    unsigned char *out = part_recv(collective, part, chunk->offset);
    uint64_t bytes = inbox->bytes;
    bool again = bytes <= engine->options.copy_max && !is_last_hop(op, chunk);
    struct wire_header header = *chunk;
    int status = pccl_reduce(part->dtype, collective->redop, again ? in : out, in,
                             part_send(collective, part, chunk->offset), chunk->length,
                             chunk->members);
    assert(status == PCCL_OK);
    (void)status;
    if (again) {
        memcpy(out, in, (size_t)bytes);
        wire_set_hop(packet_header(engine->zmq, inbox), (uint16_t)(chunk->hop + 1u));
        return PCCL_OK;
    }
    if (is_last_hop(op, chunk))
        return PCCL_OK;
    packet_clear(engine->zmq, inbox);
    header.hop++;
    return packet_build(op, inbox, &header, out, bytes);
}

/* Adds our contribution to the partial result in the inbox. */
static void reduce_partial(struct op *op, const struct part *part, const struct wire_header *chunk)
{
    struct collective *collective = &op->collective;
    struct packet *inbox = op->engine->inbox;
    unsigned char *in = packet_payload(op->engine->zmq, inbox);
    int status = pccl_reduce(part->dtype, collective->redop, in, in,
                             part_send(collective, part, chunk->offset), chunk->length, 1);
    assert(status == PCCL_OK);
    (void)status;
    wire_set_hop(packet_header(op->engine->zmq, inbox), (uint16_t)(chunk->hop + 1u));
}

/* What apply() does to the payload of a quantised chunk, in place, and what it stores. */
static void apply_quantized(struct op *op, const struct part *part,
                            const struct wire_header *chunk)
{
    struct collective *collective = &op->collective;
    struct packet *inbox = op->engine->inbox;
    unsigned char *in = packet_payload(op->engine->zmq, inbox);
    unsigned char *out = part_recv(collective, part, chunk->offset);
    bool last = chunk->hop + 2u == chunk->members;
    uint32_t divisor = last ? chunk->members : 1;
    int status;
    if (chunk->hop + 2u <= chunk->members)
        status = pccl_quantized_reduce(collective->format, part->dtype, collective->redop, in,
                                       part_send(collective, part, chunk->offset), chunk->length,
                                       divisor, last ? out : NULL);
    else
        status = pccl_dequantize(collective->format, part->dtype, out, in, chunk->length);
    assert(status == PCCL_OK);
    (void)status;
    wire_set_hop(packet_header(op->engine->zmq, inbox), (uint16_t)(chunk->hop + 1u));
}

/* Does what the chunk's hop asks for, up to sending on: 0 or PCCL_ENOMEM. */
static int apply(struct op *op, const struct wire_header *chunk)
{
    struct collective *collective = &op->collective;
    struct packet *inbox = op->engine->inbox;
    const pccl_zmq *zmq = op->engine->zmq;
    const struct part *part = part_at(collective, chunk->offset);
    bool stored = chunk->hop + 2u >= chunk->members;
    if (chunk->hop + 1u < chunk->members)
        count_given(collective, chunk->offset, chunk->length);
    if (stored
        && collective_save(op, part, chunk->offset, chunk->length * part->width) != PCCL_OK)
        return PCCL_ENOMEM;
    if (stored)
        count_written(collective, chunk->offset, chunk->length);
    if (collective->format != PCCL_UNQUANTIZED) {
        apply_quantized(op, part, chunk);
        return PCCL_OK;
    }
    if (!stored) {
        reduce_partial(op, part, chunk);
        return PCCL_OK;
    }
    if (chunk->hop + 2u == chunk->members)
        return reduce_last(op, part, chunk);
    memcpy(part_recv(collective, part, chunk->offset), packet_payload(zmq, inbox),
           (size_t)inbox->bytes);
    wire_set_hop(packet_header(zmq, inbox), (uint16_t)(chunk->hop + 1u));
    return PCCL_OK;
}

void collective_take(struct op *op, const struct wire_header *chunk)
{
    uint64_t bytes = op->engine->inbox->bytes;
    const char *why = check_shape(op, chunk, bytes);
    if (why == NULL)
        why = op->started ? check_place(op, chunk) : check_claim(op, chunk);
    if (why == NULL)
        why = check_turn(op, chunk);
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    op->rx_bytes += bytes;
    if (apply(op, chunk) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message or for what ABORT restores");
        return;
    }
    if (!is_last_hop(op, chunk))
        forward(op, chunk->ring);
    if (!op->failed && is_complete(op))
        op_complete(op);
}
