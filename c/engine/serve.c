/* serve.c - see serve.h.
 *
 * A request carries a slot, from which the server knows the stream for the answer. The server keeps
 * requests until it is their turn, and reads the pieces only then. Requests may arrive before the
 * START that names their slot. The nonce of their round is not known then, so requests with
 * different nonces are kept apart, each nonce with the same room: a stranger that invents a nonce
 * takes no room from the requests of the round. If there are too many nonces, the requests of the
 * oldest one are dropped; their sender repeats them. */
#include "engine/serve.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    REQUESTS_MAX = 1024,     /* of one requester; its window is smaller */
    UNCLAIMED_MAX = 16384    /* unclaimed requests of one round */
};

static struct serve *serve_of(struct op *op)
{
    return (struct serve *)op;
}

static struct requester *requester_of(struct flow *flow)
{
    return (struct requester *)flow;
}

/* ---- pieces ---- */

bool pieces_enter(struct pieces *pieces, struct op *op, const pccl_command *command)
{
    uint32_t i;
    for (i = 0; i < command->n_pieces; i++) {
        const pccl_piece *piece = &command->pieces[i];
        if ((i > 0 && piece->piece <= piece[-1].piece) || (piece->data == NULL && piece->bytes > 0)
            || piece->bytes > SIZE_MAX / 2) {
            op_fail(op, PCCL_EINVAL, "pieces must ascend in number and have memory");
            return false;
        }
    }
    pieces->piece = command->pieces;
    pieces->n = command->n_pieces;
    return true;
}

uint32_t pieces_find(const struct pieces *pieces, uint32_t number)
{
    uint32_t low = 0, high = pieces->n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (pieces->piece[middle].piece < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < pieces->n && pieces->piece[low].piece == number ? low : pieces->n;
}

struct wire_header pieces_header(const struct pieces *pieces, const struct op *op,
                                 enum wire_kind kind, uint32_t slot, uint32_t index)
{
    struct wire_header header = op_header(op, kind);
    header.segment = (uint16_t)slot;
    header.piece = pieces->piece[index].piece;
    return header;
}

/* ---- requests ---- */

static void append_request(struct requests *queue, struct request *request)
{
    request->next = NULL;
    if (queue->head != NULL)
        queue->tail->next = request;
    else
        queue->head = request;
    queue->tail = request;
    queue->n++;
}

static struct request *take_request(struct requests *queue)
{
    struct request *request = queue->head;
    if (request == NULL)
        return NULL;
    queue->head = request->next;
    queue->n--;
    return request;
}

static void drop_requests(struct requests *queue)
{
    struct request *request;
    while ((request = take_request(queue)) != NULL)
        free(request);
}

/* Drops the unclaimed requests of a round. */
static void forget_round(struct serve *serve, uint32_t i)
{
    serve->op.ops->dropped += serve->round[i].requests.n;
    drop_requests(&serve->round[i].requests);
    serve->n_rounds--;
    for (; i < serve->n_rounds; i++)
        serve->round[i] = serve->round[i + 1];
}

static bool is_started(const struct op *op, const struct unclaimed *round)
{
    return op->started && round->seq == op->seq && round->nonce == op->nonce;
}

/* The queue for unclaimed requests of a round. */
static struct requests *find_round(struct serve *serve, uint64_t seq, uint64_t nonce)
{
    struct unclaimed *fresh;
    uint32_t i;
    for (i = 0; i < serve->n_rounds; i++)
        if (serve->round[i].seq == seq && serve->round[i].nonce == nonce)
            return &serve->round[i].requests;
    if (serve->n_rounds == SERVE_ROUNDS)
        forget_round(serve, is_started(&serve->op, &serve->round[0]));
    fresh = &serve->round[serve->n_rounds++];
    memset(fresh, 0, sizeof *fresh);
    fresh->seq = seq;
    fresh->nonce = nonce;
    return &fresh->requests;
}

void serve_drop(struct op *op, struct flow *flow)
{
    struct serve *serve = serve_of(op);
    if (flow != NULL)
        drop_requests(&requester_of(flow)->requests);
    else
        while (serve->n_rounds > 0)
            forget_round(serve, 0);
}

/* Whether the same request is queued already. Requesters repeat late ones. */
static bool is_waiting(const struct requester *requester, const struct request *request)
{
    const struct request *each = requester->requests.head;
    while (each != NULL && (each->piece != request->piece || each->offset != request->offset
                            || each->length != request->length || each->echo != request->echo))
        each = each->next;
    return each != NULL;
}

/* Queues a request, unless its requester has too many. */
static void queue_request(struct op *op, struct requester *requester, struct request *request)
{
    if (requester->requests.n >= REQUESTS_MAX || is_waiting(requester, request)) {
        op->ops->dropped++;
        free(request);
        return;
    }
    append_request(&requester->requests, request);
    flow_request_turn(&requester->flow);
}

/* The requester with that slot and an open stream, or NULL. */
static struct requester *find_slot(const struct op *op, uint32_t slot)
{
    uint32_t i;
    for (i = 0; i < op->n_flows; i++) {
        struct requester *requester = requester_of(op->flows[i]);
        if (requester->slot == slot && requester->flow.stream != NULL)
            return requester;
    }
    return NULL;
}

/* Gives the unclaimed requests of the current round to their requesters, if these are known by now.
 * Requests of an earlier round are stale; those of a later round keep waiting for its START. */
static void claim_requests(struct op *op)
{
    struct serve *serve = serve_of(op);
    uint32_t i = 0;
    while (i < serve->n_rounds) {
        struct unclaimed *round = &serve->round[i];
        struct requests all = round->requests;
        struct request *request;
        if (round->seq <= op->seq && !is_started(op, round)) {
            forget_round(serve, i);
            continue;
        }
        i++;
        if (round->seq > op->seq)
            continue;
        memset(&round->requests, 0, sizeof round->requests);
        while ((request = take_request(&all)) != NULL) {
            struct requester *requester = find_slot(op, request->slot);
            if (requester != NULL)
                queue_request(op, requester, request);
            else
                append_request(&round->requests, request);
        }
    }
}

/* ---- commands ---- */

/* ALLOW: lets about `bytes` more bytes be sent. */
static void allow(struct op *op, uint64_t bytes)
{
    struct serve *serve = serve_of(op);
    uint32_t i;
    serve->allowance = (serve->allowance < 0 ? serve->allowance : 0)
        + (int64_t)(bytes < INT32_MAX ? bytes : INT32_MAX);
    for (i = 0; i < op->n_flows; i++)
        if (requester_of(op->flows[i])->requests.head != NULL)
            flow_request_turn(op->flows[i]);
}

void serve_enter(struct op *op, const pccl_command *command)
{
    if (pieces_enter(&serve_of(op)->pieces, op, command) && command->limit > 0) {
        serve_of(op)->limited = true;
        allow(op, command->limit);
    }
}

void serve_command(struct op *op, const pccl_command *command)
{
    if (command->kind == PCCL_ALLOW)
        allow(op, command->limit);
}

void serve_start(struct op *op, const pccl_command *command)
{
    uint32_t i;
    if (!op->started || command->seq > op->seq) {
        op_forget_flows(op);     /* the requesters of the last round need no more answers */
        op_begin(op, command);
    }
    for (i = 0; i < command->n_ends; i++) {
        const pccl_end *end = &command->ends[i];
        struct stream *stream = streams_find(op->ops->streams, end->stream);
        struct requester *requester;
        if (end->slot > UINT16_MAX || find_slot(op, end->slot) != NULL) {
            op_fail(op, PCCL_EINVAL, "slot %lu is taken or too large", (unsigned long)end->slot);
            return;
        }
        if (stream == NULL) {
            op_report_stream(op, end->stream, "it is not open");
            continue;
        }
        requester = (struct requester *)op_add_flow(op, stream);
        if (requester == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a requester");
            return;
        }
        requester->slot = end->slot;
    }
    claim_requests(op);
}

void serve_lose(struct op *op, const struct stream *stream)
{
    op_report_stream(op, stream->number, stream->text);      /* the others are still served */
}

/* ---- messages ---- */

/* Whether a request can be answered. */
static bool is_possible(const struct pieces *pieces, uint32_t index,
                        const struct wire_header *header, const struct packet *packet)
{
    uint64_t bytes = index < pieces->n ? pieces->piece[index].bytes : 0;
    return packet->bytes == 0 && header->length > 0 && header->length <= PCCL_CHUNK_MAX
        && header->offset <= bytes && header->length <= bytes - header->offset;
}

void serve_take(struct op *op, const struct wire_header *header, struct packet **packet)
{
    struct serve *serve = serve_of(op);
    uint32_t index = pieces_find(&serve->pieces, header->piece);
    struct request *request = NULL;
    bool early = !op->started || header->seq > op->seq;
    struct requester *requester = early ? NULL : find_slot(op, header->segment);
    struct requests *unclaimed;
    if (is_possible(&serve->pieces, index, header, *packet))
        request = calloc(1, sizeof *request);
    if (request == NULL) {       /* the other requests are still served */
        op->ops->dropped++;
        return;
    }
    request->slot = header->segment;
    request->echo = header->step;
    request->piece = index;
    request->length = header->length;
    request->offset = header->offset;
    if (requester != NULL) {
        queue_request(op, requester, request);
        return;
    }
    unclaimed = find_round(serve, header->seq, header->nonce);
    if (unclaimed->n < UNCLAIMED_MAX) {
        append_request(unclaimed, request);
        return;
    }
    op->ops->dropped++;
    free(request);
}

enum turn serve_send(struct flow *flow)
{
    struct op *op = op_of(flow);
    struct serve *serve = serve_of(op);
    struct requester *requester = requester_of(flow);
    struct requests *requests = &requester->requests;
    const struct request *request = requests->head;
    const pccl_piece *piece = &serve->pieces.piece[request->piece];
    struct wire_header header =
        pieces_header(&serve->pieces, op, WIRE_DATA, requester->slot, request->piece);
    struct packet packet = {0};
    if (serve->limited && serve->allowance <= 0)
        return TURN_OVER;
    header.step = request->echo;
    header.offset = request->offset;
    header.length = request->length;
    if (packet_build(&op->source, &packet, &header,
                     (const unsigned char *)piece->data + request->offset, request->length)
        != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
        return TURN_FAILED;
    }
    if (stream_send(flow->stream, &op->source, &packet) == BLOCKED) {
        packet_clear(op->source.zmq, &packet);
        return TURN_BLOCKED;
    }
    if (piece->uncounted)
        op->source.tx_bytes -= request->length;
    serve->allowance -= serve->limited ? (int64_t)request->length : 0;
    free(take_request(requests));
    return requests->head != NULL ? TURN_MORE : TURN_OVER;
}
