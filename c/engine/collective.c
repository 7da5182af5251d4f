/* collective.c - see collective.h.
 *
 * Two sets of quanta say what has been done: `given` holds those of send that have been given (a
 * first chunk was sent, or a partial result added to), `written` those of recv that hold the
 * result. A collective that only gathers gives nothing: its chunks are final from the start. Both
 * are indexed like the buffers: a buffer of one block has the quanta of one block.
 *
 * Where recv holds what ABORT must restore, the old bytes go into an undo buffer before they are
 * overwritten.
 *
 * Before START the place in the ring is not known. Early chunks are handled all the same: what they
 * say about the ring is kept as claims that START must confirm, and what is to be sent on waits. */
#include "engine/collective.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/quanta.h"
#include "engine/ring.h"

bool collective_is_complete(const struct collective *collective)
{
    return collective->op.started && collective->done == collective->wanted;
}

/* ---- where things lie ---- */

static uint64_t block_offset(const struct collective *collective, uint64_t offset)
{
    return offset % collective->span;
}

const struct part *part_at(const struct collective *collective, uint64_t offset)
{
    uint64_t inside = block_offset(collective, offset);
    uint32_t low = 0, high = collective->n_parts;
    while (high - low > 1) {         /* parts[low].begin <= inside < parts[high].begin */
        uint32_t middle = low + (high - low) / 2;
        if (collective->parts[middle].begin <= inside)
            low = middle;
        else
            high = middle;
    }
    return &collective->parts[low];
}

uint64_t part_left(const struct collective *collective, const struct part *part, uint64_t offset)
{
    return part->count - (block_offset(collective, offset) - part->begin);
}

/* Bytes from the beginning of a buffer of so many blocks to the element at an offset. */
static size_t bytes_to(const struct collective *collective, const struct part *part,
                       uint32_t blocks, uint64_t offset)
{
    uint64_t element = block_offset(collective, offset) - part->begin;
    if (blocks > 1)
        element += offset / collective->span * part->count;
    return (size_t)element * part->width;
}

const unsigned char *part_send(const struct collective *collective, const struct part *part,
                               uint64_t offset)
{
    return part->send + bytes_to(collective, part, collective->send_blocks, offset);
}

unsigned char *part_recv(const struct collective *collective, const struct part *part,
                         uint64_t offset)
{
    return part->recv + bytes_to(collective, part, collective->recv_blocks, offset);
}

void written_quanta(const struct collective *collective, uint64_t offset, uint64_t length,
                      uint64_t *from, uint64_t *to)
{
    uint64_t begin = collective->recv_blocks > 1 ? offset : block_offset(collective, offset);
    *from = begin / PCCL_QUANTUM;
    *to = quanta_of(begin + length);
}

/* The rank of a position. */
static uint32_t rank_at(const pccl_ring *ring, uint32_t position)
{
    return ring->ranks != NULL ? ring->ranks[position] : position;
}

void ring_range(const struct ring *ring, uint32_t segment, uint64_t *from, uint64_t *to)
{
    const struct collective *collective = collective_of(op_of(&ring->link));
    const pccl_ring *place = &ring->link.ring;
    uint32_t owner = ring_owner(place->members, segment);
    uint64_t begin = place->begin;
    *from = *to = begin;
    switch (collective->what) {
    case PCCL_ALL_REDUCE:
        *from = begin + ring_bound(place->count, place->members, segment);
        *to = begin + ring_bound(place->count, place->members, segment + 1);
        break;
    case PCCL_REDUCE_SCATTER:
    case PCCL_ALL_GATHER:
        *from = rank_at(place, owner) * collective->span + begin;
        *to = *from + place->count;
        break;
    case PCCL_BROADCAST:
        *to += owner == place->root ? place->count : 0;
        break;
    }
}

uint32_t collective_first_hop(const struct collective *collective, uint32_t members)
{
    return collective->reduces ? 0 : members - 1;
}

uint32_t collective_last_hop(const struct collective *collective, uint32_t members)
{
    return collective->what == PCCL_REDUCE_SCATTER ? members - 2 : 2 * members - 3;
}

/* ---- register ---- */

/* Whether `part` of `bytes` lies in a buffer, as one of its blocks or not at all: it does not
 * overlap two. *inside says which. */
static bool is_block_or_apart(const unsigned char *buffer, uint32_t blocks,
                              const unsigned char *part, size_t bytes, bool *inside)
{
    const unsigned char *end = buffer + blocks * bytes;
    *inside = buffer <= part && part < end && (size_t)(part - buffer) % bytes == 0;
    return *inside || part >= end || part + bytes <= buffer;
}

/* Why a part cannot be, or NULL; whether its recv holds what ABORT must restore. */
static const char *check_buffers(const struct collective *collective, struct part *part)
{
    size_t bytes = (size_t)part->count * part->width;
    bool apart, inside;
    if (part->count == 0)
        return NULL;
    if (part->recv == NULL || part->send == NULL)
        return "no buffer";
    if (collective->what == PCCL_ALL_GATHER)
        apart = is_block_or_apart(part->recv, collective->recv_blocks, part->send, bytes, &inside);
    else
        apart = is_block_or_apart(part->send, collective->send_blocks, part->recv, bytes, &inside);
    part->overwrites = inside && collective->what != PCCL_ALL_GATHER;
    return apart ? NULL : "the buffers overlap in part";
}

/* Takes over the parts of an order; why it cannot, or NULL. */
static const char *take_parts(struct collective *collective, const pccl_order *order)
{
    uint32_t blocks = collective->members > 0 ? collective->members : 1, i;
    size_t bytes = 0;
    for (i = 0; i < order->n_parts; i++) {
        const pccl_part *given = &order->parts[i];
        struct part *part = &collective->parts[i];
        const char *why;
        part->dtype = (int)given->dtype;
        part->width = pccl_dtype_size(part->dtype);
        if (part->width == 0)
            return "unknown element type";
        if (collective->format != PCCL_UNQUANTIZED
            && pccl_quantized_size(collective->format, part->dtype, 1) == 0)
            return "what is quantized is floats";
        if (given->count > (SIZE_MAX / 2 / blocks - bytes) / part->width)
            return "too many elements";
        part->send = given->send;
        part->recv = given->recv;
        if (collective->what == PCCL_BROADCAST)
            part->send = part->recv;
        part->count = given->count;
        part->begin = collective->span;
        bytes += (size_t)part->count * part->width;
        collective->total += part->count;
        collective->span += quanta_of(part->count) * PCCL_QUANTUM;
        why = check_buffers(collective, part);
        if (why != NULL)
            return why;
        if (part->overwrites) {
            part->undo_at = collective->undo_needed;
            collective->undo_needed += (size_t)part->count * part->width;
        }
    }
    return NULL;
}

/* What an order says but for its parts; false if it cannot be. */
static bool take_shape(struct collective *collective, const pccl_order *order)
{
    collective->what = (enum pccl_collective)order->collective;
    collective->redop = (int)order->redop;
    collective->format = (int)order->format;
    collective->n_parts = order->n_parts;
    collective->send_blocks = collective->recv_blocks = 1;
    switch (collective->what) {
    case PCCL_ALL_REDUCE:
        collective->reduces = true;
        break;
    case PCCL_REDUCE_SCATTER:
        collective->reduces = true;
        collective->members = collective->send_blocks = order->members;
        break;
    case PCCL_ALL_GATHER:
        collective->members = collective->recv_blocks = order->members;
        break;
    case PCCL_BROADCAST:
        break;
    default:
        return false;
    }
    if (order->format != PCCL_UNQUANTIZED
        && (!collective->reduces || order->redop == PCCL_PROD
            || order->format > PCCL_ZERO_POINT_16))
        return false;
    return collective->send_blocks > 0 && collective->recv_blocks > 0
        && order->members <= PCCL_PEERS_MAX && order->redop <= PCCL_MIN
        && order->n_parts <= PCCL_PARTS_MAX;
}

void collective_enter(struct op *op, const pccl_order *order)
{
    struct collective *collective = collective_of(op);
    size_t given, written;
    const char *why;
    if (!take_shape(collective, order)) {
        op_fail(op, PCCL_EINVAL, "unknown collective or operation, or an impossible number");
        return;
    }
    collective->parts = calloc(order->n_parts + (size_t)1, sizeof *collective->parts);
    if (collective->parts == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for %lu arrays", (unsigned long)order->n_parts);
        return;
    }
    why = take_parts(collective, order);
    if (why != NULL) {
        op_fail(op, PCCL_EINVAL, "%s", why);
        return;
    }
    given = quanta_words(quanta_of(collective->span * collective->send_blocks));
    written = quanta_words(quanta_of(collective->span * collective->recv_blocks));
    collective->given_set = calloc(given + written + 1, sizeof(uint64_t));
    if (collective->given_set == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory to keep account of %llu elements",
                (unsigned long long)collective->total);
        return;
    }
    collective->written_set = collective->given_set + given;
}

/* ---- what ABORT restores ---- */

/* Gives a collective its undo buffer: the spare one of the engine if it is large enough, or a new
 * one. 0 or PCCL_ENOMEM. */
static int make_undo(struct collective *collective)
{
    struct ops *ops = collective->op.ops;
    if (ops->spare_bytes >= collective->undo_needed) {
        collective->undo = ops->spare;
        collective->undo_bytes = ops->spare_bytes;
        ops->spare = NULL;
        ops->spare_bytes = 0;
    } else {
        collective->undo_bytes = collective->undo_needed;
        collective->undo = malloc(collective->undo_bytes);
    }
    collective->op.reversible = collective->undo != NULL;
    return collective->undo != NULL ? PCCL_OK : PCCL_ENOMEM;
}

int collective_save(struct collective *collective, const struct part *part, uint64_t offset,
                    size_t bytes)
{
    size_t at = bytes_to(collective, part, 1, offset);
    if (!part->overwrites)
        return PCCL_OK;
    if (collective->undo == NULL && make_undo(collective) != PCCL_OK)
        return PCCL_ENOMEM;
    memcpy(collective->undo + part->undo_at + at, part->recv + at, bytes);
    return PCCL_OK;
}

/* The larger of this and the spare buffer becomes the spare one. */
static void drop_undo(struct collective *collective)
{
    struct ops *ops = collective->op.ops;
    if (collective->undo != NULL && ops->spare_bytes < collective->undo_bytes) {
        free(ops->spare);
        ops->spare = collective->undo;
        ops->spare_bytes = collective->undo_bytes;
    } else {
        free(collective->undo);
    }
    collective->undo = NULL;
    collective->op.reversible = false;
}

static void restore_part(const struct collective *collective, const struct part *part)
{
    uint64_t first = part->begin / PCCL_QUANTUM, end = first + quanta_of(part->count);
    uint64_t from = first, to;
    while (quanta_run(collective->written_set, &from, &to, end)) {
        uint64_t begin = (from - first) * PCCL_QUANTUM, stop = (to - first) * PCCL_QUANTUM;
        size_t at = (size_t)begin * part->width;
        if (to == end)
            stop = part->count;
        memcpy(part->recv + at, collective->undo + part->undo_at + at,
               (size_t)(stop - begin) * part->width);
        from = to;
    }
}

void collective_end(struct op *op, bool keep)
{
    struct collective *collective = collective_of(op);
    uint32_t i;
    for (i = 0; !keep && collective->undo != NULL && i < collective->n_parts; i++)
        if (collective->parts[i].overwrites)
            restore_part(collective, &collective->parts[i]);
    drop_undo(collective);
}

void collective_drop(struct op *op, struct link *link)
{
    if (link == NULL)
        packets_drop(op->source.zmq, &collective_of(op)->early, NULL);
}

void collective_lose(struct op *op, const struct stream *stream)
{
    op_fail(op, PCCL_ESTREAM, "stream %lu: %s", (unsigned long)stream->number, stream->text);
}

void collective_free(struct op *op)
{
    struct collective *collective = collective_of(op);
    assert(collective->early.head == NULL);
    if (op->started && collective->is_spread)
        op->ops->n_spread--;
    drop_undo(collective);
    free(collective->given_set);
    free(collective->parts);
}

/* ---- start ---- */

/* Why one ring of a START cannot be, or NULL. */
static const char *check_ring(const struct collective *collective, const pccl_ring *ring)
{
    uint32_t i;
    if (ring->members == 0 || ring->members > PCCL_PEERS_MAX || ring->position >= ring->members
        || (collective->what == PCCL_BROADCAST && ring->root >= ring->members))
        return "a ring has no such position";
    if (collective->members > 0 && ring->members != collective->members)
        return "a ring has more or fewer members than the buffers have blocks";
    for (i = 0; ring->ranks != NULL && i < ring->members; i++)
        if (ring->ranks[i] >= ring->members)
            return "a ring has no such rank";
    return NULL;
}

/* What all rings must agree on: our rank, or whether we are the root. */
static uint32_t role(const struct collective *collective, const pccl_ring *ring)
{
    if (collective->what == PCCL_BROADCAST)
        return ring->position == ring->root;
    if (collective->members == 0)
        return 0;
    return rank_at(ring, ring->position);
}

/* Why the rings of a START cannot be, or NULL: they share out a block, one after the other, and
 * agree on who we are. */
static const char *check_rings(const struct collective *collective, const pccl_order *order)
{
    const pccl_ring *first = &order->rings[0];
    uint64_t at = 0;
    uint32_t i;
    for (i = 0; i < order->n_rings; i++) {
        const pccl_ring *ring = &order->rings[i];
        const char *why = check_ring(collective, ring);
        if (why != NULL)
            return why;
        if (ring->members != first->members || role(collective, ring) != role(collective, first))
            return "the rings contradict each other";
        if (ring->begin != at || ring->count > collective->span - at
            || (ring->count > 0 && ring->begin % PCCL_QUANTUM != 0))
            return "the rings do not share out the data";
        at += ring->count;
    }
    return at == collective->span ? NULL : "the rings do not share out the data";
}

/* Why the chunks that came before START cannot be, or NULL. */
static const char *check_claims(const struct collective *collective, const pccl_order *order)
{
    const struct op *op = &collective->op;
    uint32_t i;
    if (!collective->claimed)
        return NULL;
    if (op->seq != order->seq || op->nonce != order->nonce)
        return "an early chunk has another sequence number or nonce";
    for (i = 0; i < PCCL_RINGS_MAX; i++) {
        const struct claim *claim = &collective->claims[i];
        if (claim->made
            && (i >= order->n_rings || claim->members != order->rings[i].members
                || claim->position != order->rings[i].position))
            return "an early chunk has another place in the ring";
    }
    return NULL;
}

/* Our own block of the larger buffer is send or recv itself, or a block of its own. */
static bool is_own_block(const struct collective *collective, const struct part *part,
                         uint32_t rank)
{
    bool scatters = collective->send_blocks > 1;
    const unsigned char *buffer = scatters ? part->send : part->recv;
    const unsigned char *block = scatters ? part->recv : part->send;
    size_t bytes = (size_t)part->count * part->width;
    return block == buffer + rank * bytes || block < buffer
        || block >= buffer + collective->members * bytes;
}

/* Whether all parts that are in place lie where our rank is. */
static bool lies_right(const struct collective *collective, const pccl_ring *ring)
{
    uint32_t i;
    for (i = 0; collective->members > 0 && i < collective->n_parts; i++)
        if (!is_own_block(collective, &collective->parts[i], role(collective, ring)))
            return false;
    return true;
}

/* Makes the links of all rings; fails the op if that cannot be. */
static bool join_rings(struct collective *collective, const pccl_order *order)
{
    struct op *op = &collective->op;
    uint32_t i;
    for (i = 0; i < order->n_rings; i++) {
        const pccl_ring *place = &order->rings[i];
        uint32_t members = place->members;
        struct stream *stream = members > 1 ? streams_find(op->ops->streams, place->stream) : NULL;
        struct link *link;
        if (stream == NULL && members > 1) {
            op_fail(op, PCCL_ESTREAM, "stream %lu is not open", (unsigned long)place->stream);
            return false;
        }
        link = op_add_link(op, stream, place);
        if (link == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a ring");
            return false;
        }
        collective->is_spread |= stream != op->links[0]->stream;
        if (members > 1) {
            struct ring *ring = collective_ring(collective, i);
            uint32_t hop = collective_first_hop(collective, members);
            ring_range(ring, ring_segment(members, ring_next(members, place->position), hop),
                       &ring->cursor, &ring->end);
        }
    }
    return true;
}

/* Whether an early chunk was of what is ours to send from the beginning. */
static bool was_forestalled(const struct collective *collective)
{
    uint32_t i;
    for (i = 0; !collective->reduces && i < collective->op.n_links; i++) {
        const struct ring *ring = collective_ring(collective, i);
        if (ring->cursor < ring->end
            && quanta_any(collective->written_set, ring->cursor / PCCL_QUANTUM,
                          quanta_of(ring->end)))
            return true;
    }
    return false;
}

/* With nobody else in the ring our own contribution is the result. */
static void finish_alone(struct collective *collective)
{
    uint32_t i;
    for (i = 0; i < collective->n_parts; i++) {
        const struct part *part = &collective->parts[i];
        if (part->send != part->recv && part->count > 0)
            memcpy(part->recv, part->send, (size_t)part->count * part->width);
    }
}

/* How many elements there are to give and to write. */
static uint64_t count_wanted(const struct collective *collective)
{
    uint64_t blocks = collective->recv_blocks;
    if (collective->reduces)
        blocks += collective->send_blocks;
    return collective->total * blocks;
}

/* Early chunks that are to be sent on wait no longer. */
static void release_early(struct collective *collective)
{
    struct packet *packet;
    while ((packet = packets_take(&collective->early)) != NULL) {
        struct wire_header header;
        bool valid = wire_decode(&header, packet_header(collective->op.source.zmq, packet));
        assert(valid);           /* and the claims say that there is such a ring */
        (void)valid;
        packets_append(&collective->op.links[header.ring]->stream->forwards, packet);
    }
}

/* Why a START cannot be, or NULL. */
static const char *check_start(const struct collective *collective, const pccl_order *order)
{
    const char *why = check_rings(collective, order);
    if (why == NULL && !lies_right(collective, &order->rings[0]))
        why = "one buffer is part of the other, at the place of another rank";
    return why;
}

void collective_start(struct op *op, const pccl_order *order)
{
    struct collective *collective = collective_of(op);
    const char *why = check_start(collective, order);
    uint32_t i;
    if (why != NULL) {
        op_fail(op, PCCL_EINVAL, "%s", why);
        return;
    }
    why = check_claims(collective, order);
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    if (!join_rings(collective, order))
        return;
    if (was_forestalled(collective)) {
        op_fail(op, PCCL_EPROTO, "an early chunk is of what is ours to send");
        return;
    }
    op->ops->n_spread += collective->is_spread;
    op->started = true;
    op->seq = order->seq;
    op->nonce = order->nonce;
    collective->chunk = order->chunk_bytes < PCCL_CHUNK_MAX ? order->chunk_bytes : PCCL_CHUNK_MAX;
    if (order->rings[0].members == 1)
        finish_alone(collective);
    else
        collective->wanted = count_wanted(collective);
    release_early(collective);
    for (i = 0; i < op->n_links; i++)
        if (collective_ring(collective, i)->cursor < collective_ring(collective, i)->end)
            link_request_turn(op->links[i]);
    if (collective_is_complete(collective))
        op_complete(op);
}
