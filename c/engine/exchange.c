/* exchange.c - see exchange.h.
 *
 * A message travels directly to its receiver where its sender has a stream to it, and otherwise
 * goes unchanged from position to position. Only its sender decides that: the header is the same,
 * and receivers do not ask on which stream a message came. So a stream to a receiver that cannot be
 * connected costs nothing but forwards. A complete member keeps forwarding messages that others
 * need, until its COMMIT: only then is it certain that all members have everything.
 *
 * The old content of recv is not an input, so ABORT restores nothing. Messages that arrive before
 * START wait for it, because they cannot be checked until our place in the ring is known. */
#include "engine/exchange.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/bitmap.h"

static struct exchange *exchange_of(struct op *op)
{
    return (struct exchange *)op;
}

static struct route *route_of(const struct exchange *exchange, uint32_t index)
{
    return (struct route *)exchange->op.flows[index];
}

static bool is_complete(const struct exchange *exchange)
{
    return exchange->op.started && exchange->done == exchange->wanted;
}

/* ---- where things lie ---- */

/* The number of steps from one position to another. */
static uint32_t steps_between(uint32_t members, uint32_t from, uint32_t to)
{
    return (to + members - from) % members;
}

/* The bytes of an array that are for, or from, that rank. */
static uint64_t bytes_of(const struct rows *rows, const uint64_t *at, uint32_t rank)
{
    return (at[rank + 1] - at[rank]) * rows->row;
}

static const unsigned char *rows_for(const struct exchange *exchange, const struct rows *rows,
                                     uint32_t rank)
{
    return rows->send + (size_t)(exchange->send_at[rank] * rows->row);
}

static unsigned char *rows_from(const struct exchange *exchange, const struct rows *rows,
                                uint32_t rank)
{
    return rows->recv + (size_t)(exchange->recv_at[rank] * rows->row);
}

/* The block of a byte of the rows from that rank. The rows of a rank may begin in the middle of a
 * block of the array, so each rank gets one more block than its bytes need. */
static uint64_t block_at(const struct exchange *exchange, const struct rows *rows, uint32_t rank,
                         uint64_t offset)
{
    return rows->begin + exchange->recv_at[rank] * rows->row / PCCL_ALIGNMENT + rank
        + offset / PCCL_ALIGNMENT;
}

/* ---- register ---- */

/* Adds up the rows of all ranks; false if there are too many. */
static bool add_up(uint64_t *at, const uint64_t *rows, uint32_t members)
{
    uint32_t i;
    for (i = 0; i < members; i++) {
        uint64_t n = rows != NULL ? rows[i] : 0;
        if (n > SIZE_MAX / 4 - at[i])
            return false;
        at[i + 1] = at[i] + n;
    }
    return true;
}

/* Stores the arrays of a REGISTER, and the number of their blocks in *blocks. Returns why they are
 * invalid, or NULL. */
static const char *take_rows(struct exchange *exchange, const pccl_command *command,
                             uint64_t *blocks)
{
    uint64_t sends = exchange->send_at[exchange->members];
    uint64_t recvs = exchange->recv_at[exchange->members], all = sends + recvs, bytes = 0;
    uint32_t i;
    for (i = 0; i < command->n_parts; i++) {
        const pccl_part *given = &command->parts[i];
        struct rows *rows = &exchange->rows[i];
        size_t width = pccl_dtype_size((int)given->dtype);
        if (width == 0)
            return "unknown element type";
        if (given->count > 0 && all > (SIZE_MAX / 4 - bytes) / width / given->count)
            return "too many elements";
        rows->send = given->send;
        rows->recv = given->recv;
        rows->row = given->count * width;
        rows->begin = *blocks;
        bytes += rows->row * all;
        *blocks += rows->row * recvs / PCCL_ALIGNMENT + exchange->members + 1;
        if (rows->row > 0
            && ((sends > 0 && given->send == NULL) || (recvs > 0 && given->recv == NULL)))
            return "no buffer";
    }
    return NULL;
}

void exchange_enter(struct op *op, const pccl_command *command)
{
    struct exchange *exchange = exchange_of(op);
    uint64_t blocks = 0;
    const char *why = NULL;
    if (command->members == 0 || command->members > PCCL_PEERS_MAX
        || command->n_parts > PCCL_PARTS_MAX) {
        op_fail(op, PCCL_EINVAL, "no members, too many members, or too many arrays");
        return;
    }
    exchange->members = command->members;
    exchange->n_rows = command->n_parts;
    exchange->rows = calloc(command->n_parts + (size_t)1, sizeof *exchange->rows);
    exchange->ways = calloc(command->members, sizeof *exchange->ways);
    exchange->send_at = calloc(2 * ((size_t)command->members + 1), sizeof(uint64_t));
    if (exchange->rows != NULL && exchange->ways != NULL && exchange->send_at != NULL) {
        exchange->recv_at = exchange->send_at + command->members + 1;
        if (!add_up(exchange->send_at, command->send_rows, command->members)
            || !add_up(exchange->recv_at, command->recv_rows, command->members))
            why = "too many rows";
        else
            why = take_rows(exchange, command, &blocks);
        if (why == NULL)
            exchange->here = calloc(bitmap_words(blocks) + 1, sizeof(uint64_t));
    }
    if (why != NULL)
        op_fail(op, PCCL_EINVAL, "%s", why);
    else if (exchange->here == NULL)
        op_fail(op, PCCL_ENOMEM, "no memory to track %lu arrays",
                (unsigned long)command->n_parts);
}

void exchange_progress(const struct op *op, uint64_t *done, uint64_t *wanted)
{
    const struct exchange *exchange = (const struct exchange *)op;
    *done = exchange->done;
    *wanted = exchange->wanted;
}

void exchange_drop(struct op *op, struct flow *flow)
{
    if (flow == NULL)
        packets_drop(op->source.zmq, &exchange_of(op)->early, NULL);
}

void exchange_lose(struct op *op, const struct stream *stream)
{
    op_fail_stream(op, stream->number, stream->text);
}

void exchange_free(struct op *op)
{
    struct exchange *exchange = exchange_of(op);
    assert(exchange->early.head == NULL);
    free(exchange->here);
    free(exchange->send_at);
    free(exchange->ways);
    free(exchange->rows);
}

/* ---- our own rows ---- */

/* Moves to the next bytes of our own to send on this ring. Rows for the farthest member come first,
 * so that the last rows have the shortest path. Returns false if there are no more. */
static bool find_next(struct route *route)
{
    const struct exchange *exchange = exchange_of(op_of(&route->flow));
    const pccl_ring *place = &route->place;
    while (route->steps > 0) {
        uint32_t rank = rank_at(place, (place->position + route->steps) % place->members);
        bool ours = exchange->ways[rank].flow == route->flow.index
            && exchange->send_at[rank] < exchange->send_at[rank + 1];
        for (; ours && route->index < exchange->n_rows; route->index++, route->offset = 0)
            if (route->offset < bytes_of(&exchange->rows[route->index], exchange->send_at, rank))
                return true;
        route->steps--;
        route->index = 0;
    }
    return false;
}

/* The number of bytes in our next message. */
static uint64_t next_length(const struct route *route, uint64_t left)
{
    const struct exchange *exchange = exchange_of(op_of(&route->flow));
    uint64_t chunk = stream_chunk(route->flow.stream, exchange->chunk);
    chunk = chunk < PCCL_ALIGNMENT ? PCCL_ALIGNMENT : chunk / PCCL_ALIGNMENT * PCCL_ALIGNMENT;
    return left < chunk ? left : chunk;
}

enum turn exchange_send(struct flow *flow)
{
    struct op *op = op_of(flow);
    struct route *route = (struct route *)flow;
    struct exchange *exchange = exchange_of(op);
    const struct rows *rows = &exchange->rows[route->index];
    struct wire_header header = op_header(op, WIRE_ROW);
    struct packet packet = {0};
    uint32_t members = route->place.members, rank;
    header.ring = (uint8_t)route->ring;
    header.members = (uint16_t)members;
    header.segment = (uint16_t)route->place.position;
    header.step = (uint16_t)((route->place.position + route->steps) % members);
    header.piece = route->index;
    header.offset = route->offset;
    rank = rank_at(&route->place, header.step);
    header.length = (uint32_t)next_length(route, bytes_of(rows, exchange->send_at, rank)
                                                     - route->offset);
    if (packet_build(&op->source, &packet, &header,
                     rows_for(exchange, rows, rank) + (size_t)route->offset, header.length)
        != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
        return TURN_FAILED;
    }
    if (stream_send(flow->stream, &op->source, &packet) == BLOCKED) {
        packet_clear(op->source.zmq, &packet);
        return TURN_BLOCKED;
    }
    exchange->done += header.length;
    flow->used = true;
    route->offset += header.length;
    if (is_complete(exchange))
        op_complete(op);             /* does not free it: its kind is obliging */
    return find_next(route) ? TURN_MORE : TURN_OVER;
}

/* ---- messages ---- */

/* Why a message cannot pass through our position of the ring, or NULL. */
static const char *check_way(const struct exchange *exchange, const struct wire_header *header,
                             uint64_t bytes)
{
    const pccl_ring *place;
    uint32_t steps;
    if (header->ring >= exchange->n_rings || header->members != exchange->members
        || header->segment >= exchange->members || header->step >= exchange->members)
        return "a row has an impossible place in the ring";
    place = &route_of(exchange, header->ring)->place;
    steps = steps_between(place->members, header->segment, place->position);
    if (steps == 0 || steps > steps_between(place->members, header->segment, header->step))
        return "a row has another place in the ring";
    if (header->piece >= exchange->n_rows || header->length == 0 || header->length != bytes)
        return "a row belongs to no array, or does not have the size that its header gives";
    return NULL;
}

/* Why a message for us from that rank cannot be stored, or NULL. If NULL, its offset and length are
 * safe to turn into addresses. */
static const char *check_row(const struct exchange *exchange, const struct wire_header *header,
                             uint32_t rank)
{
    const struct rows *rows = &exchange->rows[header->piece];
    uint64_t all = bytes_of(rows, exchange->recv_at, rank), from, to;
    if (header->offset % PCCL_ALIGNMENT != 0 || header->offset >= all
        || header->length > all - header->offset
        || (header->length % PCCL_ALIGNMENT != 0 && header->offset + header->length != all))
        return "a row is not aligned or out of bounds";
    from = block_at(exchange, rows, rank, header->offset);
    to = from + aligned_blocks(header->length);
    return bitmap_any(exchange->here, from, to) ? "a row came twice" : NULL;
}

static void store(struct exchange *exchange, const struct wire_header *header, uint32_t rank,
                  struct packet *packet)
{
    const struct rows *rows = &exchange->rows[header->piece];
    uint64_t from = block_at(exchange, rows, rank, header->offset);
    memcpy(rows_from(exchange, rows, rank) + (size_t)header->offset,
           packet_payload(exchange->op.source.zmq, packet), header->length);
    bitmap_set(exchange->here, from, from + aligned_blocks(header->length));
    exchange->done += header->length;
    if (is_complete(exchange))
        op_complete(&exchange->op);
}

void exchange_take(struct op *op, const struct wire_header *header, struct packet **packet)
{
    struct exchange *exchange = exchange_of(op);
    const struct route *route;
    const char *why;
    bool ours;
    uint32_t rank = 0;
    if (!op->started) {
        op_forward(op, NULL, &exchange->early, packet);
        return;
    }
    why = check_way(exchange, header, (*packet)->bytes);
    route = why == NULL ? route_of(exchange, header->ring) : NULL;
    ours = route != NULL && header->step == route->place.position;
    if (ours) {
        rank = rank_at(&route->place, header->segment);
        why = check_row(exchange, header, rank);
    }
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    op->rx_bytes += header->length;
    if (ours)
        store(exchange, header, rank, *packet);
    else if (route->flow.stream == NULL)
        op_fail(op, PCCL_EPROTO, "a row is for a member that no stream leads to");
    else
        op_forward(op, route->flow.stream, NULL, packet);
}

/* ---- start ---- */

/* Why the rings of a START are impossible, or NULL. */
static const char *check_rings(const struct exchange *exchange, const pccl_command *command)
{
    uint32_t i, k;
    if (command->n_rings == 0)
        return "there is no ring";
    for (i = 0; i < command->n_rings; i++) {
        const pccl_ring *ring = &command->rings[i];
        if (ring->members != exchange->members || ring->position >= ring->members)
            return "a ring has no such position, or not as many members as the rows are for";
        for (k = 0; ring->ranks != NULL && k < ring->members; k++)
            if (ring->ranks[k] >= ring->members)
                return "a ring has no such rank";
        if (rank_at(ring, ring->position) != exchange->rank)
            return "the rings contradict each other";
    }
    return NULL;
}

/* Whether received rows overwrite no rows that must still be sent: send and recv do not overlap, or
 * share our own rows and one of them holds no other rows. */
static bool lie_apart(const struct exchange *exchange, const struct rows *rows)
{
    uint64_t sends = exchange->send_at[exchange->members];
    uint64_t recvs = exchange->recv_at[exchange->members];
    uint64_t own = bytes_of(rows, exchange->send_at, exchange->rank);
    uintptr_t send = (uintptr_t)rows->send, recv = (uintptr_t)rows->recv;
    if (rows->row == 0 || sends == 0 || recvs == 0 || send + sends * rows->row <= recv
        || recv + recvs * rows->row <= send)
        return true;
    return (own == sends * rows->row || own == recvs * rows->row)
        && rows_for(exchange, rows, exchange->rank) == rows_from(exchange, rows, exchange->rank);
}

/* Why our own rows are impossible, or NULL. */
static const char *check_own(const struct exchange *exchange)
{
    uint32_t rank = exchange->rank, i;
    const uint64_t *sends = exchange->send_at, *recvs = exchange->recv_at;
    if (sends[rank + 1] - sends[rank] != recvs[rank + 1] - recvs[rank])
        return "it sends itself a different number of rows than it receives";
    for (i = 0; i < exchange->n_rows; i++)
        if (!lie_apart(exchange, &exchange->rows[i]))
            return "the buffers overlap";
    return NULL;
}

/* Finds the shortest path to each member, on the first ring if several are equally short. */
static void find_ways(struct exchange *exchange, const pccl_command *command)
{
    uint32_t members = exchange->members, i, steps;
    for (i = 0; i < command->n_rings; i++)
        for (steps = 1; steps < members; steps++) {
            const pccl_ring *ring = &command->rings[i];
            struct way *way = &exchange->ways[rank_at(ring, (ring->position + steps) % members)];
            if (way->steps == 0 || steps < way->steps) {
                way->steps = (uint16_t)steps;
                way->ring = (uint16_t)i;
                way->flow = i;
            }
        }
}

/* Creates the flows of all rings, or fails the op. */
static bool join_rings(struct exchange *exchange, const pccl_command *command)
{
    struct op *op = &exchange->op;
    uint32_t i;
    for (i = 0; i < command->n_rings; i++) {
        const pccl_ring *place = &command->rings[i];
        bool needs_stream = exchange->members > 1 && place->stream != 0;
        struct route *route = (struct route *)op_add_ring(op, place, needs_stream);
        if (route == NULL)
            return false;
        route->place = *place;
        route->ring = i;
        route->steps = exchange->members - 1;
    }
    exchange->n_rings = op->n_flows;
    return true;
}

/* Creates the flows of the streams to receivers that are not the next on their ring, or fails the
 * op. */
static bool go_directly(struct exchange *exchange, const pccl_command *command)
{
    struct op *op = &exchange->op;
    uint32_t rank;
    for (rank = 0; command->direct != NULL && rank < exchange->members; rank++) {
        struct way *way = &exchange->ways[rank];
        struct route *route;
        if (command->direct[rank] == 0 || way->steps < 2)
            continue;
        route = (struct route *)op_add_direct(op, command->direct[rank], op->flows[way->ring]);
        if (route == NULL)
            return false;
        route->place = command->rings[way->ring];
        route->ring = way->ring;
        route->steps = way->steps;
        way->flow = route->flow.index;
    }
    return true;
}

/* Copies the rows that we have for ourselves, and counts the bytes to send and to receive. */
static void keep_own(struct exchange *exchange)
{
    uint32_t rank = exchange->rank, i;
    uint64_t others = exchange->send_at[exchange->members] + exchange->recv_at[exchange->members]
        - 2 * (exchange->send_at[rank + 1] - exchange->send_at[rank]);
    for (i = 0; i < exchange->n_rows; i++) {
        const struct rows *rows = &exchange->rows[i];
        uint64_t own = bytes_of(rows, exchange->send_at, rank);
        if (own > 0 && rows_for(exchange, rows, rank) != rows_from(exchange, rows, rank))
            memcpy(rows_from(exchange, rows, rank), rows_for(exchange, rows, rank), (size_t)own);
        exchange->wanted += others * rows->row;
    }
}

void exchange_start(struct op *op, const pccl_command *command)
{
    struct exchange *exchange = exchange_of(op);
    const char *why;
    uint32_t i;
    if (command->n_rings > 0 && command->rings[0].position < command->rings[0].members)
        exchange->rank = rank_at(&command->rings[0], command->rings[0].position);
    why = check_rings(exchange, command);
    if (why == NULL)
        why = check_own(exchange);
    if (why != NULL) {
        op_fail(op, PCCL_EINVAL, "%s", why);
        return;
    }
    find_ways(exchange, command);
    if (!join_rings(exchange, command) || !go_directly(exchange, command))
        return;
    keep_own(exchange);
    op_begin(op, command);
    exchange->chunk = op_chunk_bytes(command);
    for (i = 0; i < op->n_flows; i++) {
        if (!find_next(route_of(exchange, i)))
            continue;
        if (op->flows[i]->stream == NULL) {
            op_fail(op, PCCL_EINVAL, "there are rows to send, and no stream for them");
            return;
        }
        flow_request_turn(op->flows[i]);
    }
    if (is_complete(exchange))
        op_complete(op);
    op_take_early(op, &exchange->early);
}
