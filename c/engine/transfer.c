/* transfer.c - SERVE: bytes of numbered pieces of memory, for those who ask (fetch.c).
 *
 * A request carries the slot by which the server knows on which stream to answer. The server keeps
 * requests until it is their turn; the bytes are not touched before. Requests may come before the
 * START that names their slot. */
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

void transfer_register(struct op *op, const pccl_order *order)
{
    struct transfer *transfer = &op->transfer;
    uint32_t i;
    for (i = 0; i < order->n_pieces; i++) {
        const pccl_piece *piece = &order->pieces[i];
        if ((i > 0 && piece->piece <= piece[-1].piece) || (piece->data == NULL && piece->bytes > 0)
            || piece->bytes > SIZE_MAX / 2) {
            op_fail(op, PCCL_EINVAL, "pieces must ascend in number and have memory");
            return;
        }
    }
    transfer->pieces = order->pieces;
    transfer->n_pieces = order->n_pieces;
    if (op->kind == PCCL_FETCH) {
        fetch_register(op, order);
    } else if (order->limit > 0) {
        transfer->limited = true;
        serve_allow(op, order->limit);
    }
}

void transfer_free(struct op *op)
{
    assert(op->transfer.n_unclaimed == 0);
    free(op->transfer.wants);
    free(op->transfer.leaves);
}

/* ---- SERVE ---- */

static void append_request(struct request **first, struct request **last, struct request *request)
{
    request->next = NULL;
    if (*first != NULL)
        (*last)->next = request;
    else
        *first = request;
    *last = request;
}

static struct request *take_request(struct request **first)
{
    struct request *request = *first;
    if (request != NULL)
        *first = request->next;
    return request;
}

void serve_drop_requests(struct op *op, struct link *link)
{
    struct request **first = link != NULL ? &link->requests : &op->transfer.unclaimed, *request;
    while ((request = take_request(first)) != NULL)
        free(request);
    if (link != NULL)
        link->n_requests = 0;
    else
        op->transfer.n_unclaimed = 0;
}

/* Whether a link waits for that very answer already: it is asked for again when it is late. */
static bool is_waiting(const struct link *link, const struct request *request)
{
    const struct request *each = link->requests;
    while (each != NULL && (each->piece != request->piece || each->offset != request->offset
                            || each->length != request->length || each->echo != request->echo))
        each = each->next;
    return each != NULL;
}

/* Keeps a request for its turn, if that requester has not too many. */
static void queue_request(struct link *link, struct request *request)
{
    if (link->n_requests >= REQUESTS_MAX || is_waiting(link, request)) {
        link->op->engine->dropped++;
        free(request);
        return;
    }
    append_request(&link->requests, &link->last_request, request);
    link->n_requests++;
    link_request_turn(link);
}

/* The requester of that slot that can be answered, or NULL. */
static struct link *find_slot(const struct op *op, uint32_t slot)
{
    uint32_t i;
    for (i = 0; i < op->n_links; i++)
        if (op->links[i]->position == slot && op->links[i]->stream != NULL)
            return op->links[i];
    return NULL;
}

/* Gives the early requests to the requesters that are known by now. Those of an earlier round are
 * stale, those of a later one go on waiting for its START. */
static void claim_requests(struct op *op)
{
    struct transfer *transfer = &op->transfer;
    struct request *all = transfer->unclaimed, *request;
    transfer->unclaimed = NULL;
    transfer->n_unclaimed = 0;
    while ((request = take_request(&all)) != NULL) {
        struct link *link = request->seq > op->seq ? NULL : find_slot(op, request->slot);
        if (request->seq < op->seq || (request->seq == op->seq && request->nonce != op->nonce)) {
            op->engine->dropped++;
            free(request);
        } else if (link != NULL) {
            queue_request(link, request);
        } else {
            append_request(&transfer->unclaimed, &transfer->last_unclaimed, request);
            transfer->n_unclaimed++;
        }
    }
}

/* Another round begins: nobody waits for answers of the last one any more. */
static void forget_requesters(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_links; i++) {
        struct link *link = op->links[i];
        if (link->stream == NULL)
            continue;
        stream_drop_op(link->stream, op);
        serve_drop_requests(op, link);
        link->stream = NULL;
    }
}

void serve_start(struct op *op, const pccl_order *order)
{
    uint32_t i;
    if (!op->started || order->seq > op->seq) {
        forget_requesters(op);
        op->started = true;
        op->seq = order->seq;
        op->nonce = order->nonce;
    }
    for (i = 0; i < order->n_rings; i++) {
        const pccl_ring *ring = &order->rings[i];
        struct stream *stream = stream_find(op->engine, ring->stream);
        if (ring->position > UINT16_MAX || find_slot(op, ring->position) != NULL) {
            op_fail(op, PCCL_EINVAL, "slot %lu is taken or too large",
                    (unsigned long)ring->position);
            return;
        }
        if (stream == NULL) {
            op_report(op, PCCL_ESTREAM, "stream %lu is not open", (unsigned long)ring->stream);
        } else if (op_add_link(op, stream, ring) == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a requester");
            return;
        }
    }
    claim_requests(op);
}

/* The index of a piece by its number, or n_pieces. */
static uint32_t find_piece(const struct transfer *transfer, uint32_t number)
{
    uint32_t low = 0, high = transfer->n_pieces;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (transfer->pieces[middle].piece < number)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < transfer->n_pieces && transfer->pieces[low].piece == number)
        return low;
    return transfer->n_pieces;
}

/* Whether a request can be answered. */
static bool is_possible(const struct op *op, const struct wire_header *header, uint32_t index)
{
    const struct transfer *transfer = &op->transfer;
    uint64_t bytes = index < transfer->n_pieces ? transfer->pieces[index].bytes : 0;
    return op->engine->inbox->bytes == 0 && header->length > 0
        && header->length <= PCCL_CHUNK_MAX && header->offset <= bytes
        && header->length <= bytes - header->offset;
}

void serve_take(struct op *op, const struct wire_header *header)
{
    struct transfer *transfer = &op->transfer;
    uint32_t index = find_piece(transfer, header->piece);
    struct request *request;
    bool early = !op->started || header->seq > op->seq;
    struct link *link = early ? NULL : find_slot(op, header->segment);
    bool room = link != NULL || transfer->n_unclaimed < UNCLAIMED_MAX;
    request = room && is_possible(op, header, index) ? calloc(1, sizeof *request) : NULL;
    if (request == NULL) {       /* the others are served on */
        op->engine->dropped++;
        return;
    }
    request->seq = header->seq;
    request->nonce = header->nonce;
    request->slot = header->segment;
    request->echo = header->hop;
    request->piece = index;
    request->length = header->length;
    request->offset = header->offset;
    if (link != NULL) {
        queue_request(link, request);
        return;
    }
    append_request(&transfer->unclaimed, &transfer->last_unclaimed, request);
    transfer->n_unclaimed++;
}

struct wire_header transfer_header(const struct link *link, enum wire_kind kind, uint32_t piece)
{
    const struct op *op = link->op;
    struct wire_header header = {0};
    header.kind = kind;
    header.segment = (uint16_t)link->position;
    header.run = op->run;
    header.seq = op->seq;
    header.tag = op->tag;
    header.nonce = op->nonce;
    header.piece = op->transfer.pieces[piece].piece;
    return header;
}

void serve_allow(struct op *op, uint64_t bytes)
{
    struct transfer *transfer = &op->transfer;
    uint32_t i;
    transfer->allowance = (transfer->allowance < 0 ? transfer->allowance : 0)
        + (int64_t)(bytes < INT32_MAX ? bytes : INT32_MAX);
    for (i = 0; i < op->n_links; i++)
        if (op->links[i]->requests != NULL)
            link_request_turn(op->links[i]);
}

enum turn serve_send(struct link *link)
{
    struct op *op = link->op;
    struct request *request = link->requests;
    const unsigned char *data = op->transfer.pieces[request->piece].data;
    struct wire_header header = transfer_header(link, WIRE_DATA, request->piece);
    struct packet packet = {0};
    if (op->transfer.limited && op->transfer.allowance <= 0)
        return TURN_OVER;
    header.hop = request->echo;
    header.offset = request->offset;
    header.length = request->length;
    if (packet_build(op, &packet, &header, data + request->offset, request->length) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
        return TURN_FAILED;
    }
    if (stream_send(link->stream, op, &packet) == BLOCKED) {
        packet_clear(op->engine->zmq, &packet);
        return TURN_BLOCKED;
    }
    if (op->transfer.pieces[request->piece].uncounted)
        op->tx_bytes -= request->length;
    op->transfer.allowance -= op->transfer.limited ? (int64_t)request->length : 0;
    free(take_request(&link->requests));
    link->n_requests--;
    return link->requests != NULL ? TURN_MORE : TURN_OVER;
}
