/* allreduce.c - what an ALL_REDUCE op does with its chunks (pccl.h, THE RING).
 *
 * Every chunk is judged before it is used, as its offset becomes an address. Two sets of granules
 * say what has been done: `given` holds those to which our contribution has been given (a first
 * chunk sent, a partial result added to), `written` those of recv that hold the result. A partial
 * result must find neither, a final one must find `given` but not `written`: so no chunk counts
 * twice, none overwrites what we have yet to contribute, and the op is complete when the elements
 * written are as many as there are.
 *
 * Before START the place in the ring is not known. Early chunks are handled all the same; what
 * they say of the ring is kept as claims that START must confirm, and what is to be sent on
 * waits.
 *
 * In place, the old bytes of a region go into a shadow before they are overwritten, for ABORT. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

/* ---- register, restore, free ---- */

void reduce_register(struct op *op, const pccl_order *order)
{
    struct reduction *reduction = &op->reduction;
    size_t width = pccl_dtype_size((int)order->dtype);
    size_t words = granule_words(granules(order->count));
    const unsigned char *send = order->send, *recv = order->recv;
    if (width == 0 || order->redop > PCCL_MIN || order->count > SIZE_MAX / 2 / width) {
        op_fail(op, PCCL_EINVAL, "unknown element type or operation, or too many elements");
        return;
    }
    if (order->count > 0 && (send == NULL || recv == NULL)) {
        op_fail(op, PCCL_EINVAL, "no buffer");
        return;
    }
    if (send != recv && send < recv + order->count * width && recv < send + order->count * width) {
        op_fail(op, PCCL_EINVAL, "the buffers overlap in part");
        return;
    }
    reduction->dtype = (int)order->dtype;
    reduction->redop = (int)order->redop;
    reduction->width = width;
    reduction->send = send;
    reduction->recv = order->recv;
    reduction->count = order->count;
    reduction->given_set = calloc(2 * words + 1, sizeof(uint64_t));
    if (reduction->given_set == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory to keep account of %llu elements",
                (unsigned long long)order->count);
        return;
    }
    reduction->written_set = reduction->given_set + words;
}

static size_t buffer_bytes(const struct reduction *reduction)
{
    return (size_t)reduction->count * reduction->width;
}

/* Gives the op a shadow: the one that the engine keeps, if it is large enough, or a new one. 0 or
 * PCCL_ENOMEM. */
static int make_shadow(struct op *op)
{
    struct reduction *reduction = &op->reduction;
    pccl_engine *engine = op->engine;
    if (engine->shadow_size >= buffer_bytes(reduction)) {
        reduction->shadow = engine->shadow;
        reduction->shadow_size = engine->shadow_size;
        engine->shadow = NULL;
        engine->shadow_size = 0;
    } else {
        reduction->shadow_size = buffer_bytes(reduction);
        reduction->shadow = malloc(reduction->shadow_size);
    }
    return reduction->shadow != NULL ? PCCL_OK : PCCL_ENOMEM;
}

/* Keeps the old bytes of a region of recv: 0 or PCCL_ENOMEM. */
static int save(struct op *op, size_t offset, size_t bytes)
{
    struct reduction *reduction = &op->reduction;
    if (reduction->send != reduction->recv)
        return PCCL_OK;
    if (reduction->shadow == NULL && make_shadow(op) != PCCL_OK)
        return PCCL_ENOMEM;
    memcpy(reduction->shadow + offset, reduction->recv + offset, bytes);
    return PCCL_OK;
}

void reduce_drop_shadow(struct op *op)
{
    struct reduction *reduction = &op->reduction;
    pccl_engine *engine = op->engine;
    if (reduction->shadow != NULL && engine->shadow_size < reduction->shadow_size) {
        free(engine->shadow);
        engine->shadow = reduction->shadow;
        engine->shadow_size = reduction->shadow_size;
    } else {
        free(reduction->shadow);
    }
    reduction->shadow = NULL;
}

void reduce_restore(struct op *op)
{
    struct reduction *reduction = &op->reduction;
    uint64_t from = 0, to, end = granules(reduction->count);
    if (reduction->shadow == NULL)
        return;
    while (granules_run(reduction->written_set, &from, &to, end)) {
        size_t first = (size_t)from * PCCL_QUANTUM * reduction->width;
        size_t last = (size_t)to * PCCL_QUANTUM * reduction->width;
        if (to == end)
            last = buffer_bytes(reduction);
        memcpy(reduction->recv + first, reduction->shadow + first, last - first);
        from = to;
    }
    reduce_drop_shadow(op);
}

void reduce_drop_early(struct op *op)
{
    struct packet *packet;
    while ((packet = packets_take(&op->reduction.early)) != NULL) {
        assert(op->queued > 0 && op->engine->forwards > 0);
        op->queued--;
        op->engine->forwards--;
        packet_free(op->engine->zmq, packet);
    }
}

void reduce_free(struct op *op)
{
    assert(op->reduction.early.head == NULL);
    if (op->started && op->is_spread)
        op->engine->spread_ops--;
    reduce_drop_shadow(op);
    free(op->reduction.given_set);
}

/* ---- start ---- */

/* Why the rings of a START cannot be, or NULL: they share out the whole buffer, one after the
 * other. */
static const char *check_rings(const struct op *op, const pccl_order *order)
{
    const struct reduction *reduction = &op->reduction;
    uint64_t at = 0;
    uint32_t i;
    for (i = 0; i < order->n_rings; i++) {
        const pccl_ring *ring = &order->rings[i];
        if (ring->members == 0 || ring->members > PCCL_PEERS_MAX || ring->position >= ring->members)
            return "a ring has no such position";
        if (ring->begin != at || ring->count > reduction->count - at
            || (ring->count > 0 && ring->begin % PCCL_QUANTUM != 0))
            return "the rings do not share out the buffer";
        at += ring->count;
    }
    return at == reduction->count ? NULL : "the rings do not share out the buffer";
}

/* Why the chunks that came before START cannot be, or NULL. */
static const char *check_claims(const struct op *op, const pccl_order *order)
{
    const struct reduction *reduction = &op->reduction;
    uint32_t i;
    if (!reduction->claimed)
        return NULL;
    if (op->seq != order->seq || op->epoch != order->epoch)
        return "an early chunk has another sequence number or epoch";
    for (i = 0; i < PCCL_RINGS_MAX; i++) {
        const struct claim *claim = &reduction->claims[i];
        if (claim->made
            && (i >= order->n_rings || claim->members != order->rings[i].members
                || claim->position != order->rings[i].position))
            return "an early chunk has another place in the ring";
    }
    return NULL;
}

/* With nobody else in the ring our own contribution is the result. */
static void finish_alone(struct op *op, const struct link *ring)
{
    struct reduction *reduction = &op->reduction;
    size_t offset = (size_t)ring->begin * reduction->width;
    if (ring->count == 0)
        return;
    if (reduction->send != reduction->recv)
        memcpy(reduction->recv + offset, reduction->send + offset,
               (size_t)ring->count * reduction->width);
    reduction->written += ring->count;
}

/* Makes the links of all rings; fails the op if that cannot be. */
static bool join_rings(struct op *op, const pccl_order *order)
{
    uint32_t i;
    for (i = 0; i < order->n_rings; i++) {
        const pccl_ring *ring = &order->rings[i];
        struct stream *stream = ring->members > 1 ? stream_find(op->engine, ring->stream) : NULL;
        struct link *link;
        if (stream == NULL && ring->members > 1) {
            op_fail(op, PCCL_ESTREAM, "stream %lu is not open", (unsigned long)ring->stream);
            return false;
        }
        link = op_add_link(op, stream, ring);
        if (link == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a ring");
            return false;
        }
        op->is_spread |= stream != op->links[0]->stream;
        if (stream != NULL)
            op->reduction.chunk = stream_chunk(stream, op->reduction.chunk);
        link->cursor = ring->begin + ring_bound(ring->count, ring->members, ring->position);
        link->end = ring->begin + ring_bound(ring->count, ring->members, ring->position + 1);
    }
    return true;
}

void reduce_start(struct op *op, const pccl_order *order)
{
    struct reduction *reduction = &op->reduction;
    const char *why = check_rings(op, order);
    struct packet *packet;
    uint64_t chunk;
    uint32_t i;
    if (why != NULL) {
        op_fail(op, PCCL_EINVAL, "%s", why);
        return;
    }
    why = check_claims(op, order);
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    reduction->chunk = order->chunk_bytes < PCCL_CHUNK_MAX ? order->chunk_bytes : PCCL_CHUNK_MAX;
    if (!join_rings(op, order))
        return;
    op->engine->spread_ops += op->is_spread;
    op->started = true;
    op->seq = order->seq;
    op->epoch = order->epoch;
    chunk = reduction->chunk / reduction->width / PCCL_QUANTUM * PCCL_QUANTUM;
    reduction->chunk = chunk > 0 ? chunk : PCCL_QUANTUM;
    while ((packet = packets_take(&reduction->early)) != NULL)
        packets_append(&op->links[packet->ring]->stream->forwards, packet);
    for (i = 0; i < op->n_links; i++) {
        struct link *link = op->links[i];
        if (link->members == 1)
            finish_alone(op, link);
        else if (link->cursor < link->end)
            link_request_turn(link);
    }
    if (reduction->written == reduction->count)
        op_complete(op);
}

/* ---- sending our own segment ---- */

enum turn reduce_send(struct link *ring)
{
    struct op *op = ring->op;
    struct reduction *reduction = &op->reduction;
    uint64_t left = ring->end - ring->cursor;
    uint64_t length = left < reduction->chunk ? left : reduction->chunk;
    size_t offset = (size_t)ring->cursor * reduction->width;
    struct packet packet = {0};
    struct wire_header header = {0};
    assert(op->started && length > 0);
    header.kind = WIRE_CHUNK;
    header.ring = (uint8_t)ring->index;
    header.segment = (uint16_t)ring->position;
    header.members = (uint16_t)ring->members;
    header.epoch = op->epoch;
    header.length = (uint32_t)length;
    header.run = op->run;
    header.seq = op->seq;
    header.tag = op->tag;
    header.offset = ring->cursor;
    if (packet_build(op, &packet, &header, reduction->send + offset, length * reduction->width)
        != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
        return TURN_FAILED;
    }
    if (stream_send(ring->stream, op, &packet) == BLOCKED) {
        packet_clear(op->engine->zmq, &packet);
        return TURN_BLOCKED;
    }
    granules_add(reduction->given_set, ring->cursor / PCCL_QUANTUM,
                 granules(ring->cursor + length));
    ring->cursor += length;
    return ring->cursor < ring->end ? TURN_MORE : TURN_OVER;
}

/* ---- taking chunks ---- */

/* Why a chunk cannot be part of the op at all, or NULL. After this its offset and length may
 * become addresses. */
static const char *check_shape(const struct op *op, const struct wire_header *chunk, uint64_t bytes)
{
    const struct reduction *reduction = &op->reduction;
    uint64_t end = chunk->offset + chunk->length;
    if (chunk->ring >= PCCL_RINGS_MAX || chunk->members < 2 || chunk->members > PCCL_PEERS_MAX
        || chunk->segment >= chunk->members || chunk->hop + 3u > 2u * chunk->members)
        return "a chunk has an impossible place in the ring";
    if (chunk->length == 0 || chunk->offset > reduction->count
        || chunk->length > reduction->count - chunk->offset)
        return "a chunk is empty or out of bounds";
    if (chunk->length * (uint64_t)reduction->width != bytes)
        return "a chunk's payload has another size than its header says";
    if (chunk->offset % PCCL_QUANTUM != 0
        || (chunk->length % PCCL_QUANTUM != 0 && end != reduction->count))
        return "a chunk is not aligned";
    return NULL;
}

/* Why a chunk that came before START contradicts one that came earlier, or NULL. */
static const char *check_claim(struct op *op, const struct wire_header *chunk)
{
    struct reduction *reduction = &op->reduction;
    struct claim *claim = &reduction->claims[chunk->ring];
    uint32_t position = ring_receiver(chunk->members, chunk->segment, chunk->hop);
    if (!reduction->claimed) {
        reduction->claimed = true;
        op->seq = chunk->seq;
        op->epoch = chunk->epoch;
    }
    if (!claim->made) {
        claim->made = true;
        claim->members = chunk->members;
        claim->position = position;
    }
    if (op->seq != chunk->seq || op->epoch != chunk->epoch)
        return "early chunks differ in sequence number or epoch";
    if (claim->members != chunk->members || claim->position != position)
        return "early chunks differ in their place in the ring";
    return NULL;
}

/* Why a chunk is not one that this position of the ring receives, or NULL. */
static const char *check_place(const struct op *op, const struct wire_header *chunk)
{
    const struct link *ring;
    uint64_t share, bound, end;
    if (chunk->epoch != op->epoch || chunk->ring >= op->n_links)
        return "a chunk has another epoch or ring";
    ring = op->links[chunk->ring];
    if (chunk->members != ring->members
        || chunk->segment != ring_segment(ring->members, ring->position, chunk->hop))
        return "a chunk has another place in the ring";
    share = ring->count;
    bound = ring->begin + ring_bound(share, ring->members, chunk->segment + 1u);
    end = chunk->offset + chunk->length;
    if (end > bound
        || chunk->offset < ring->begin + ring_bound(share, ring->members, chunk->segment))
        return "a chunk lies outside its segment";
    return NULL;
}

/* Why a chunk may not come now, or NULL. */
static const char *check_turn(const struct op *op, const struct wire_header *chunk)
{
    const struct reduction *reduction = &op->reduction;
    uint64_t from = chunk->offset / PCCL_QUANTUM, to = granules(chunk->offset + chunk->length);
    bool final = chunk->hop + 1u >= chunk->members;
    if (granules_any(reduction->written_set, from, to))
        return "a chunk came twice";
    if (final && !granules_all(reduction->given_set, from, to))
        return "a final chunk lacks our contribution";
    if (!final && granules_any(reduction->given_set, from, to))
        return "a chunk came twice";
    return NULL;
}

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
    packets_append(stream != NULL ? &stream->forwards : &op->reduction.early, packet);
    op->queued++;
    engine->forwards++;
}

/* The last reducing hop: recv = partial result + ours. What is sent on is the message again if it
 * is small, else recv itself, so that nothing is written twice. */
static int reduce_last(struct op *op, const struct wire_header *chunk, size_t offset)
{
    struct reduction *reduction = &op->reduction;
    pccl_engine *engine = op->engine;
    struct packet *inbox = engine->inbox;
    unsigned char *in = packet_payload(engine->zmq, inbox);
    unsigned char *out = reduction->recv + offset;
    bool small = inbox->bytes <= engine->options.copy_max;
    uint64_t bytes = inbox->bytes;
    struct wire_header header = *chunk;
    int status = pccl_reduce(reduction->dtype, reduction->redop, small ? in : out, in,
                             reduction->send + offset, chunk->length, chunk->members);
    assert(status == PCCL_OK);
    (void)status;
    if (small) {
        memcpy(out, in, (size_t)bytes);
        wire_set_hop(packet_header(engine->zmq, inbox), (uint16_t)(chunk->hop + 1u));
        return PCCL_OK;
    }
    packet_clear(engine->zmq, inbox);
    header.hop++;
    return packet_build(op, inbox, &header, out, bytes);
}

/* Adds our contribution to the partial result in the inbox. */
static void reduce_partial(struct op *op, const struct wire_header *chunk, size_t offset)
{
    struct reduction *reduction = &op->reduction;
    struct packet *inbox = op->engine->inbox;
    unsigned char *in = packet_payload(op->engine->zmq, inbox);
    int status = pccl_reduce(reduction->dtype, reduction->redop, in, in, reduction->send + offset,
                             chunk->length, 1);
    assert(status == PCCL_OK);
    (void)status;
    wire_set_hop(packet_header(op->engine->zmq, inbox), (uint16_t)(chunk->hop + 1u));
}

/* Does what the chunk's hop asks for, up to sending on: 0 or PCCL_ENOMEM. */
static int apply(struct op *op, const struct wire_header *chunk)
{
    struct reduction *reduction = &op->reduction;
    struct packet *inbox = op->engine->inbox;
    const pccl_zmq *zmq = op->engine->zmq;
    uint64_t from = chunk->offset / PCCL_QUANTUM, to = granules(chunk->offset + chunk->length);
    size_t offset = (size_t)chunk->offset * reduction->width;
    granules_add(reduction->given_set, from, to);
    if (chunk->hop + 2u < chunk->members) {
        reduce_partial(op, chunk, offset);
        return PCCL_OK;
    }
    if (save(op, offset, (size_t)inbox->bytes) != PCCL_OK)
        return PCCL_ENOMEM;
    granules_add(reduction->written_set, from, to);
    reduction->written += chunk->length;
    if (chunk->hop + 2u == chunk->members)
        return reduce_last(op, chunk, offset);
    memcpy(reduction->recv + offset, packet_payload(zmq, inbox), (size_t)inbox->bytes);
    wire_set_hop(packet_header(zmq, inbox), (uint16_t)(chunk->hop + 1u));
    return PCCL_OK;
}

void reduce_take(struct op *op, const struct wire_header *chunk)
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
    if (chunk->hop + 3u < 2u * chunk->members)
        forward(op, chunk->ring);
    if (op->started && !op->failed && op->reduction.written == op->reduction.count)
        op_complete(op);
}
