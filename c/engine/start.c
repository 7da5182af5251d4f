/* start.c - see start.h.
 *
 * Before START our place in the ring is not known. Chunks of peers that have heard of the start are
 * handled all the same: their data about the ring is stored as claims, which START must confirm,
 * and those that must be sent on wait. EAGER gives the expected place, and only lets us send. The
 * chunks that it sent are noted at START, if START names the same streams; otherwise they are void,
 * like the streams. */
#include "engine/start.h"

#include <assert.h>

#include "engine/bitmap.h"
#include "engine/collective.h"
#include "engine/oneshot.h"
#include "engine/ring.h"
#include "engine/twostage.h"

static const struct algorithm *algorithm_of(const pccl_command *command)
{
    return command->algorithm == PCCL_ONE_SHOT ? &oneshot_algorithm
        : command->algorithm == PCCL_TWO_STAGE ? &twostage_algorithm : &ring_algorithm;
}

/* ---- checks ---- */

/* Why one ring of a START is invalid, or NULL. */
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

/* Our rank, or whether we are the root: all rings must agree on it. */
static uint32_t role(const struct collective *collective, const pccl_ring *ring)
{
    if (collective->shape.rooted)
        return ring->position == ring->root;
    if (collective->members == 0)
        return 0;
    return rank_at(ring, ring->position);
}

/* Why the rings of a START are invalid, or NULL. They must divide a slice, one after the other, and
 * agree on our rank, or on whether we are the root. */
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
            return "the rings do not divide the data";
        at += ring->count;
    }
    return at == collective->parts.span ? NULL : "the rings do not divide the data";
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
        if (claim->algorithm != NULL
            && (i >= command->n_rings || claim->algorithm != algorithm_of(command)
                || claim->members != command->rings[i].members
                || claim->position != command->rings[i].position))
            return "an early chunk has another place in the ring";
    }
    return NULL;
}

/* Why a START or EAGER is invalid, or NULL. */
static const char *check_start(const struct collective *collective, const pccl_command *command)
{
    const char *why = check_rings(collective, command);
    if (why != NULL)
        return why;
    if (command->algorithm == PCCL_ONE_SHOT
        && !oneshot_algorithm.has_step(collective, command->rings[0].members, ONESHOT_STEP))
        return "only two members can all-reduce in one shot";
    if (command->algorithm == PCCL_TWO_STAGE
        && !twostage_algorithm.has_step(collective, command->rings[0].members, TWOSTAGE_STEP))
        return "only three members or more can all-reduce in two stages, and quantized";
    if (collective->members > 0
        && !parts_lie_at(&collective->parts, role(collective, &command->rings[0])))
        return "a buffer is in place at the slice of another rank";
    return NULL;
}

/* Checks a START or EAGER; if it is invalid, fails the op and returns false. */
static bool can_start(struct collective *collective, const pccl_command *command)
{
    const char *why = check_start(collective, command);
    if (why != NULL)
        op_fail(&collective->op, PCCL_EINVAL, "%s", why);
    return why == NULL;
}

/* ---- rings ---- */

/* Gives a flow its place in a ring, and its own chunks. */
static void take_place(struct collective *collective, struct ring *ring,
                       const pccl_command *command, uint32_t index, uint32_t steps)
{
    const pccl_ring *place = &command->rings[index];
    ring->place = *place;
    ring->index = index;
    ring->receiver = (place->position + steps) % place->members;
    if (place->members > 1)
        collective->algorithm->own_range(ring, &ring->cursor, &ring->end);
    ring->first = ring->cursor;
    collective_skip(ring);
}

/* Creates the flows of all rings, or fails the op. */
static bool join_rings(struct collective *collective, const pccl_command *command)
{
    struct op *op = &collective->op;
    uint32_t i;
    collective->algorithm = algorithm_of(command);
    collective->n_rings = command->n_rings;
    collective->chunk = op_chunk_bytes(command);
    for (i = 0; i < command->n_rings; i++) {
        const pccl_ring *place = &command->rings[i];
        struct ring *ring = (struct ring *)op_add_ring(op, place, place->members > 1);
        if (ring == NULL)
            return false;
        take_place(collective, ring, command, i, 1);
    }
    return true;
}

/* Two stages: creates the flows to the owners that are not next on a ring, or fails the op. */
static bool join_owners(struct collective *collective, const pccl_command *command)
{
    struct op *op = &collective->op;
    uint32_t i, steps;
    for (i = 0; i < command->n_rings; i++)
        for (steps = 2; steps < command->rings[i].members; steps++) {
            const pccl_ring *place = &command->rings[i];
            uint32_t rank = rank_at(place, (place->position + steps) % place->members);
            uint32_t direct = command->direct != NULL ? command->direct[rank] : 0;
            struct ring *way = (struct ring *)op_add_direct(op, direct, op->flows[i]);
            if (way == NULL)
                return false;
            take_place(collective, way, command, i, steps);
        }
    return true;
}

/* ---- EAGER ---- */

/* Whether START and EAGER give the same place in a ring. */
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

/* Continues with the rings of EAGER, or fails the op. */
static bool keep_rings(struct collective *collective, const pccl_command *command)
{
    struct op *op = &collective->op;
    bool same = command->n_rings == op->n_flows && collective->algorithm == algorithm_of(command);
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

/* Notes the chunks that a ring has sent before START, and gives back their credit. */
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

void start_eagerly(struct op *op, const pccl_command *command)
{
    struct collective *collective = collective_of(op);
    uint32_t i;
    if (!can_start(collective, command) || command->algorithm == PCCL_TWO_STAGE)
        return;
    for (i = 0; i < command->n_rings; i++)
        if (streams_find(op->ops->streams, command->rings[i].stream) == NULL)
            return;              /* START will report it */
    if (join_rings(collective, command))
        collective_request_turns(collective);
}

/* ---- chunks that came before START ---- */

/* Whether an early chunk has written where the data of our own chunks is. */
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

/* Whether only the root receives a result, and we are not the root. */
static bool receives_nothing(const struct collective *collective, const pccl_ring *place)
{
    return collective->shape.reduces && collective->shape.rooted
        && place->position != place->root;
}

/* Whether an early chunk has written a result that is not for us. */
static bool was_mistaken(const struct collective *collective, const pccl_ring *place)
{
    return collective->parts.span > 0 && receives_nothing(collective, place)
        && bitmap_any(collective->written_set, 0, aligned_blocks(collective->parts.span));
}

/* Queues the early chunks to be sent on. */
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

/* ---- START ---- */

/* Creates the flows for START, or keeps those of EAGER; or fails the op. */
static bool enter_rings(struct collective *collective, const pccl_command *command)
{
    struct op *op = &collective->op;
    if (op->n_flows > 0
        && collective_ring(collective, 0)->place.stream == command->rings[0].stream)
        return keep_rings(collective, command);
    op_remove_flows(op);
    return join_rings(collective, command)
        && (command->algorithm != PCCL_TWO_STAGE || join_owners(collective, command));
}

/* The number of elements to give and to write. */
static uint64_t count_wanted(const struct collective *collective, const pccl_ring *place)
{
    uint64_t wanted = receives_nothing(collective, place) ? 0 : collective->parts.received;
    if (collective->shape.reduces)
        wanted += collective->parts.total * collective->parts.send_slices;
    return wanted;
}

void start_collective(struct op *op, const pccl_command *command)
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
        op_fail(op, PCCL_EPROTO, "an early chunk has data that we send, or a result for the root");
        return;
    }
    op_begin(op, command);
    if (command->rings[0].members == 1)
        collective_conclude_alone(collective);
    else
        collective->wanted = count_wanted(collective, &command->rings[0]);
    for (i = 0; i < op->n_flows; i++)
        note_eager(collective, collective_ring(collective, i));
    release_early(collective);
    collective_request_turns(collective);
    if (collective_is_complete(collective))
        op_complete(op);
    else
        op_take_early(op, &collective->unread);
}
