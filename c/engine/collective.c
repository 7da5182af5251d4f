/* collective.c - see collective.h.
 *
 * Two sets of blocks say what has been done: `given` holds those of send that have been given (a
 * first chunk was sent, or a partial result added to), `written` those of recv that hold the
 * result. A collective that only gathers gives nothing: its chunks are final from the start. Both
 * are indexed like the buffers: a buffer of one slice has the blocks of one slice.
 *
 * Where recv holds what ABORT must restore, the old bytes go into an undo buffer before they are
 * overwritten.
 *
 * Before START the place in the ring is not known. Chunks of those who have heard of the start are
 * handled all the same: what they say about the ring is kept as claims that START must confirm, and
 * what is to be sent on waits. EAGER says which place is expected, and only lets us send. What was
 * sent then is noted at START, if that names the same streams; otherwise it is void with them. */
#include "engine/collective.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/bitmap.h"
#include "engine/ring.h"

static const struct shape shapes[] = {
    [PCCL_ALL_REDUCE] = {.reduces = true},
    [PCCL_REDUCE_SCATTER] = {.reduces = true, .scatters = true},
    [PCCL_ALL_GATHER] = {.gathers = true},
    [PCCL_BROADCAST] = {.rooted = true},
    [PCCL_REDUCE] = {.reduces = true, .rooted = true},
};

bool collective_is_complete(const struct collective *collective)
{
    return collective->op.started && collective->done == collective->wanted
        && collective->unready == 0;
}

/* ---- where things lie ---- */

/* The rank of a position. */
static uint32_t rank_at(const pccl_ring *ring, uint32_t position)
{
    return ring->ranks != NULL ? ring->ranks[position] : position;
}

void collective_range(const struct ring *ring, uint32_t segment, uint64_t *from, uint64_t *to)
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

void collective_skip(struct ring *ring)
{
    const struct parts *parts = &collective_of(op_of(&ring->flow))->parts;
    while (ring->cursor < ring->end) {
        const struct part *part = part_at(parts, ring->cursor);
        if (parts_reach(parts, ring->cursor) > 0)
            return;
        ring->cursor -= ring->cursor % parts->span;
        ring->cursor += part->begin + aligned_blocks(part->count) * PCCL_ALIGNMENT;
    }
}

uint32_t collective_first_step(const struct collective *collective, uint32_t members)
{
    return collective->shape.reduces ? 0 : members - 1;
}

uint32_t collective_last_step(const struct collective *collective, uint32_t members)
{
    const struct shape *shape = &collective->shape;
    return shape->scatters || (shape->reduces && shape->rooted) ? members - 2 : 2 * members - 3;
}

bool collective_may_be_oneshot(const struct collective *collective, uint32_t members)
{
    const struct shape *shape = &collective->shape;
    return members == 2 && shape->reduces && !shape->scatters && !shape->rooted;
}

/* ---- what is done ---- */

void collective_count_given(struct collective *collective, uint64_t offset, uint64_t length)
{
    bitmap_set(collective->given_set, offset / PCCL_ALIGNMENT, aligned_blocks(offset + length));
    collective->done += parts_elements(&collective->parts, offset, length);
}

void collective_count_written(struct collective *collective, uint64_t offset, uint64_t length)
{
    uint64_t from, to;
    parts_written(&collective->parts, offset, length, &from, &to);
    bitmap_set(collective->written_set, from, to);
    collective->done += parts_elements(&collective->parts, offset, length);
}

void collective_note_sent(struct collective *collective, uint64_t offset, uint64_t length)
{
    uint64_t at = offset;
    struct stretch stretch;
    if (collective->shape.reduces) {
        collective_count_given(collective, offset, length);
        return;
    }
    while (parts_next(&collective->parts, &at, offset + length, &stretch))
        if (stretch.recv != stretch.send)
            memcpy(stretch.recv, stretch.send, stretch.bytes);
    collective_count_written(collective, offset, length);
}

void collective_store_quantized(const struct collective *collective, uint64_t offset,
                                uint64_t length, const unsigned char *in)
{
    const struct part *part = part_at(&collective->parts, offset);
    int status = pccl_dequantize(collective->format, part->dtype,
                                 part_recv(&collective->parts, part, offset), in, (size_t)length);
    assert(status == PCCL_OK);
    (void)status;
}

/* ---- register ---- */

/* Takes over what a command says except its parts; false if it is impossible. */
static bool take_shape(struct collective *collective, const pccl_command *command)
{
    const struct shape *shape = &collective->shape;
    if (command->collective == 0 || command->collective >= sizeof shapes / sizeof shapes[0])
        return false;
    collective->shape = shapes[command->collective];
    collective->redop = (int)command->redop;
    collective->format = (int)command->format;
    collective->members = shape->scatters || shape->gathers ? command->members : 0;
    collective->parts.n = command->n_parts;
    collective->parts.send_slices = shape->scatters ? command->members : 1;
    collective->parts.recv_slices = shape->gathers ? command->members : 1;
    if (command->format != PCCL_UNQUANTIZED
        && (!shape->reduces || command->redop == PCCL_PROD || command->format > PCCL_ZERO_POINT_16))
        return false;
    if (command->recv_rows != NULL && !shape->gathers)
        return false;
    collective->window = command->window;
    if (command->window > 0
        && (command->collective != PCCL_ALL_REDUCE || command->window % PCCL_ALIGNMENT != 0))
        return false;
    return collective->parts.send_slices > 0 && collective->parts.recv_slices > 0
        && command->members <= PCCL_PEERS_MAX && command->redop <= PCCL_MIN
        && command->n_parts <= PCCL_PARTS_MAX;
}

void collective_enter(struct op *op, const pccl_command *command)
{
    struct collective *collective = collective_of(op);
    struct parts *parts = &collective->parts;
    size_t given, written, ready;
    const char *why;
    if (!take_shape(collective, command)) {
        op_fail(op, PCCL_EINVAL, "unknown collective or operation, or an impossible number");
        return;
    }
    parts->part = calloc(command->n_parts + (size_t)1, sizeof *parts->part);
    if (parts->part == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for %lu arrays", (unsigned long)command->n_parts);
        return;
    }
    if (command->recv_rows != NULL) {
        int status = parts_divide(parts, command->recv_rows);
        if (status != PCCL_OK) {
            op_fail(op, status, "too many rows, or no memory for their numbers");
            return;
        }
    }
    why = parts_enter(parts, &collective->shape, command);
    if (why != NULL) {
        op_fail(op, PCCL_EINVAL, "%s", why);
        return;
    }
    given = bitmap_words(aligned_blocks(parts->span * parts->send_slices));
    written = bitmap_words(aligned_blocks(parts->span * parts->recv_slices));
    ready = collective->window > 0 ? given : 0;
    collective->given_set = calloc(given + written + ready + 1, sizeof(uint64_t));
    if (collective->given_set == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory to keep account of %llu elements",
                (unsigned long long)parts->total);
        return;
    }
    collective->written_set = collective->given_set + given;
    collective->ready_set = collective->written_set + written;
    collective->unready = collective->window > 0 ? aligned_blocks(parts->span) : 0;
}

/* ---- what ABORT restores ---- */

int collective_save(struct collective *collective, uint64_t offset, uint64_t length)
{
    struct op *op = &collective->op;
    uint64_t at = offset;
    struct stretch stretch;
    while (parts_next(&collective->parts, &at, offset + length, &stretch)) {
        if (!stretch.part->overwrites)
            continue;
        if (collective->undo.memory == NULL)
            op->reversible = undo_open(&collective->undo, collective->parts.undo_bytes,
                                       &op->ops->spare);
        if (!op->reversible)
            return PCCL_ENOMEM;
        parts_save(&collective->parts, &stretch, &collective->undo);
    }
    return PCCL_OK;
}

void collective_end(struct op *op, bool keep)
{
    struct collective *collective = collective_of(op);
    if (!keep && op->reversible)
        parts_restore(&collective->parts, &collective->undo, collective->written_set);
    op->reversible = false;
    undo_close(&collective->undo, &op->ops->spare);
}

void collective_progress(const struct op *op, uint64_t *done, uint64_t *wanted)
{
    const struct collective *collective = (const struct collective *)op;
    *done = collective->done;
    *wanted = collective->wanted;
}

void collective_drop(struct op *op, struct flow *flow)
{
    struct collective *collective = collective_of(op);
    if (flow != NULL)
        return;
    packets_drop(op->source.zmq, &collective->early, NULL);
    packets_drop(op->source.zmq, &collective->held, NULL);
    op->ops->n_held -= collective->n_held;
    collective->n_held = 0;
}

/* START may not need a stream on which EAGER has begun, and otherwise finds that it is lost. */
void collective_lose(struct op *op, const struct stream *stream)
{
    if (op->started)
        op_fail_stream(op, stream->number, stream->text);
}

void collective_free(struct op *op)
{
    struct collective *collective = collective_of(op);
    assert(collective->early.head == NULL && collective->held.head == NULL);
    if (op->started && collective->is_spread)
        op->ops->n_spread--;
    undo_close(&collective->undo, &op->ops->spare);
    free(collective->given_set);
    free(collective->parts.rows_at);
    free(collective->parts.part);
}

/* ---- start ---- */

/* Why one ring of a START is impossible, or NULL. */
static const char *check_ring(const struct collective *collective, const pccl_ring *ring)
{
    uint32_t i;
    if (ring->members == 0 || ring->members > PCCL_PEERS_MAX || ring->position >= ring->members
        || (collective->shape.rooted && ring->root >= ring->members))
        return "a ring has no such position";
    if (collective->members > 0 && ring->members != collective->members)
        return "a ring has more or fewer members than the buffers have slices";
    for (i = 0; ring->ranks != NULL && i < ring->members; i++)
        if (ring->ranks[i] >= ring->members)
            return "a ring has no such rank";
    return NULL;
}

/* What all rings must agree on: our rank, or whether we are the root. */
static uint32_t role(const struct collective *collective, const pccl_ring *ring)
{
    if (collective->shape.rooted)
        return ring->position == ring->root;
    if (collective->members == 0)
        return 0;
    return rank_at(ring, ring->position);
}

/* Why the rings of a START are impossible, or NULL: they must divide a slice, one after the other,
 * and agree on who we are. */
static const char *check_rings(const struct collective *collective, const pccl_command *command)
{
    const pccl_ring *first = &command->rings[0];
    uint64_t at = 0;
    uint32_t i;
    for (i = 0; i < command->n_rings; i++) {
        const pccl_ring *ring = &command->rings[i];
        const char *why = check_ring(collective, ring);
        if (why != NULL)
            return why;
        if (ring->members != first->members || role(collective, ring) != role(collective, first))
            return "the rings contradict each other";
        if (ring->begin != at || ring->count > collective->parts.span - at
            || (ring->count > 0 && ring->begin % PCCL_ALIGNMENT != 0))
            return "the rings do not share out the data";
        at += ring->count;
    }
    return at == collective->parts.span ? NULL : "the rings do not share out the data";
}

/* Why the chunks that came before START contradict it, or NULL. */
static const char *check_claims(const struct collective *collective, const pccl_command *command)
{
    const struct op *op = &collective->op;
    uint32_t i;
    if (!collective->claimed)
        return NULL;
    if (op->seq != command->seq || op->nonce != command->nonce)
        return "an early chunk has another sequence number or nonce";
    for (i = 0; i < PCCL_RINGS_MAX; i++) {
        const struct claim *claim = &collective->claims[i];
        if (claim->made
            && (i >= command->n_rings || claim->oneshot != (command->oneshot != 0)
                || claim->members != command->rings[i].members
                || claim->position != command->rings[i].position))
            return "an early chunk has another place in the ring";
    }
    return NULL;
}

/* The segment of our own chunks: the one that our successor sees at the first step. */
static uint32_t first_segment(const struct collective *collective, const pccl_ring *place)
{
    uint32_t step = collective_first_step(collective, place->members);
    return ring_segment(place->members, ring_next(place->members, place->position), step);
}

/* Makes the flows of all rings, or fails the op. */
static bool join_rings(struct collective *collective, const pccl_command *command)
{
    struct op *op = &collective->op;
    uint32_t i;
    for (i = 0; i < command->n_rings; i++) {
        const pccl_ring *place = &command->rings[i];
        uint32_t members = place->members;
        struct stream *stream = members > 1 ? streams_find(op->ops->streams, place->stream) : NULL;
        struct ring *ring;
        if (stream == NULL && members > 1) {
            op_fail_stream(op, place->stream, "it is not open");
            return false;
        }
        ring = (struct ring *)op_add_flow(op, stream);
        if (ring == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a ring");
            return false;
        }
        ring->place = *place;
        collective->is_spread |= stream != op->flows[0]->stream;
        ring->cursor = place->begin;
        ring->end = place->begin + place->count;
        if (members == 1)
            ring->end = ring->cursor;
        else if (!command->oneshot)
            collective_range(ring, first_segment(collective, place), &ring->cursor, &ring->end);
        ring->first = ring->cursor;
        collective_skip(ring);
    }
    collective->oneshot = command->oneshot != 0;
    collective->chunk = command->chunk_bytes < PCCL_CHUNK_MAX ? command->chunk_bytes
        : PCCL_CHUNK_MAX;
    return true;
}

/* Whether START says of a ring what EAGER has said. */
static bool is_same(const pccl_ring *a, const pccl_ring *b)
{
    uint32_t i;
    if (a->stream != b->stream || a->members != b->members || a->position != b->position
        || a->root != b->root || a->begin != b->begin || a->count != b->count)
        return false;
    for (i = 0; i < a->members; i++)
        if (rank_at(a, i) != rank_at(b, i))
            return false;
    return true;
}

/* Goes on with the rings of EAGER, or fails the op. */
static bool keep_rings(struct collective *collective, const pccl_command *command)
{
    struct op *op = &collective->op;
    bool same = command->n_rings == op->n_flows && collective->oneshot == (command->oneshot != 0);
    uint32_t i;
    for (i = 0; same && i < op->n_flows; i++)
        same = is_same(&collective_ring(collective, i)->place, &command->rings[i]);
    if (!same) {
        op_fail(op, PCCL_EINVAL, "START contradicts EAGER");
        return false;
    }
    for (i = 0; i < op->n_flows; i++)
        if (op->flows[i]->stream == NULL || op->flows[i]->stream->lost) {
            op_fail_stream(op, command->rings[i].stream, "it is not open");
            return false;
        }
    return true;
}

/* Makes the flows for START, or fails the op. */
static bool enter_rings(struct collective *collective, const pccl_command *command)
{
    struct op *op = &collective->op;
    if (op->n_flows > 0
        && collective_ring(collective, 0)->place.stream == command->rings[0].stream)
        return keep_rings(collective, command);
    op_remove_flows(op);
    collective->is_spread = false;
    return join_rings(collective, command);
}

/* Notes what a ring has sent before START, and gives its credit back. */
static void note_eager(struct collective *collective, struct ring *ring)
{
    uint64_t sent = ring->cursor;
    if (ring->lent == 0)
        return;
    ring->flow.stream->eager -= ring->lent;
    ring->lent = 0;
    ring->cursor = ring->first;
    for (collective_skip(ring); ring->cursor < sent; collective_skip(ring)) {
        uint64_t length = parts_reach(&collective->parts, ring->cursor);
        uint64_t most = (sent < ring->end ? sent : ring->end) - ring->cursor;
        length = length < most ? length : most;
        collective_note_sent(collective, ring->cursor, length);
        ring->cursor += aligned_blocks(length) * PCCL_ALIGNMENT;
    }
    assert(ring->cursor == sent);
}

/* Whether an early chunk brought what we are to send from the beginning. */
static bool was_forestalled(const struct collective *collective)
{
    uint32_t i;
    for (i = 0; !collective->shape.reduces && i < collective->op.n_flows; i++) {
        const struct ring *ring = collective_ring(collective, i);
        if (ring->first < ring->end
            && bitmap_any(collective->written_set, ring->first / PCCL_ALIGNMENT,
                          aligned_blocks(ring->end)))
            return true;
    }
    return false;
}

/* Whether recv is for the root alone, and we are not the root. */
static bool receives_nothing(const struct collective *collective, const pccl_ring *place)
{
    return collective->shape.reduces && collective->shape.rooted
        && place->position != place->root;
}

/* Whether an early chunk brought a result that is not for us. */
static bool was_mistaken(const struct collective *collective, const pccl_ring *place)
{
    return collective->parts.span > 0 && receives_nothing(collective, place)
        && bitmap_any(collective->written_set, 0, aligned_blocks(collective->parts.span));
}

/* How many elements there are to give and to write. */
static uint64_t count_wanted(const struct collective *collective, const pccl_ring *place)
{
    uint64_t wanted = receives_nothing(collective, place) ? 0 : collective->parts.received;
    if (collective->shape.reduces)
        wanted += collective->parts.total * collective->parts.send_slices;
    return wanted;
}

/* Queues the early chunks that are to be sent on. */
static void release_early(struct collective *collective)
{
    struct packet *packet;
    while ((packet = packets_take(&collective->early)) != NULL) {
        struct wire_header header;
        bool valid = wire_decode(&header, packet_header(collective->op.source.zmq, packet));
        assert(valid);           /* the claims say that there is such a ring */
        (void)valid;
        packets_append(&collective->op.flows[header.ring]->stream->forwards, packet);
    }
}

/* Why a START is impossible, or NULL. */
static const char *check_start(const struct collective *collective, const pccl_command *command)
{
    const char *why = check_rings(collective, command);
    if (why != NULL)
        return why;
    if (command->oneshot && !collective_may_be_oneshot(collective, command->rings[0].members))
        return "only two members can all-reduce in one shot";
    if (collective->members > 0
        && !parts_lie_at(&collective->parts, role(collective, &command->rings[0])))
        return "one buffer is part of the other, at the place of another rank";
    return NULL;
}

void collective_conclude_alone(struct collective *collective)
{
    if (collective->unready == 0)
        parts_copy(&collective->parts);
}

/* Whether it can start as START or EAGER says; if not, the op fails. */
static bool can_start(struct collective *collective, const pccl_command *command)
{
    const char *why = check_start(collective, command);
    if (why != NULL)
        op_fail(&collective->op, PCCL_EINVAL, "%s", why);
    return why == NULL;
}

/* Queues the flows that have chunks to send. */
static void request_turns(struct collective *collective)
{
    struct op *op = &collective->op;
    uint32_t i;
    for (i = 0; i < op->n_flows; i++)
        if (collective_ring(collective, i)->cursor < collective_ring(collective, i)->end)
            flow_request_turn(op->flows[i]);
}

void collective_eager(struct op *op, const pccl_command *command)
{
    struct collective *collective = collective_of(op);
    uint32_t i;
    if (!can_start(collective, command))
        return;
    for (i = 0; i < command->n_rings; i++)     /* if not, START says so */
        if (streams_find(op->ops->streams, command->rings[i].stream) == NULL)
            return;
    if (join_rings(collective, command))
        request_turns(collective);
}

void collective_start(struct op *op, const pccl_command *command)
{
    struct collective *collective = collective_of(op);
    const char *why;
    uint32_t i;
    if (!can_start(collective, command))
        return;
    why = check_claims(collective, command);
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    if (!enter_rings(collective, command))
        return;
    if (was_forestalled(collective) || was_mistaken(collective, &command->rings[0])) {
        op_fail(op, PCCL_EPROTO, "an early chunk is of what is ours to send, or not for us");
        return;
    }
    op->ops->n_spread += collective->is_spread;
    op->started = true;
    op->seq = command->seq;
    op->nonce = command->nonce;
    if (command->rings[0].members == 1)
        collective_conclude_alone(collective);
    else
        collective->wanted = count_wanted(collective, &command->rings[0]);
    for (i = 0; i < op->n_flows; i++)
        note_eager(collective, collective_ring(collective, i));
    release_early(collective);
    request_turns(collective);
    if (collective_is_complete(collective))
        op_complete(op);
}
