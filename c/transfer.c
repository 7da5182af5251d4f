/* transfer.c - SERVE and FETCH: bytes of numbered pieces of memory, asked for and answered chunk
 * by chunk.
 *
 * The fetcher drives. It cuts what it lacks into chunks and keeps a window of requests under way
 * to each holder, so that a chunk goes to whichever holder has answered another one: a fast
 * holder gives more. A request carries the slot by which the server knows on which stream to
 * answer. Data is taken only if it is exactly what a request under way asked for: so nothing
 * arrives twice, and the fetch is complete when nothing is missing.
 *
 * The server keeps requests until it is their turn; the bytes are not touched before. Requests
 * may come before the START that names their slot. */
#include "engine.h"

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
        transfer->missing += op->kind == PCCL_FETCH ? piece->bytes : 0;
    }
    transfer->pieces = order->pieces;
    transfer->n_pieces = order->n_pieces;
}

void transfer_free(struct op *op)
{
    assert(op->transfer.n_requests == 0);
    free(op->transfer.wants);
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
    while ((request = take_request(first)) != NULL) {
        op->transfer.n_requests--;
        free(request);
    }
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
    while ((request = take_request(&all)) != NULL) {
        struct link *link = request->seq > op->seq ? NULL : find_slot(op, request->slot);
        if (request->seq < op->seq || (request->seq == op->seq && request->epoch != op->epoch)) {
            op->engine->dropped++;
            transfer->n_requests--;
            free(request);
        } else if (link != NULL) {
            append_request(&link->requests, &link->last_request, request);
            link_request_turn(link);
        } else {
            append_request(&transfer->unclaimed, &transfer->last_unclaimed, request);
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
        op->epoch = order->epoch;
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

/* Why a request cannot be answered, or NULL. */
static const char *check_request(const struct op *op, const struct wire_header *header,
                                 uint32_t index)
{
    const struct transfer *transfer = &op->transfer;
    uint64_t bytes = index < transfer->n_pieces ? transfer->pieces[index].bytes : 0;
    if (op->engine->inbox->bytes != 0)
        return "a request has a payload";
    if (op->started && header->seq == op->seq && header->epoch != op->epoch)
        return "a request has another epoch";
    if (header->length == 0 || header->length > PCCL_CHUNK_MAX || header->offset > bytes
        || header->length > bytes - header->offset)
        return "a request is out of bounds";
    if (transfer->n_requests == REQUESTS_MAX)
        return "too many requests wait";
    return NULL;
}

void serve_take(struct op *op, const struct wire_header *header)
{
    struct transfer *transfer = &op->transfer;
    uint32_t index = find_piece(transfer, header->piece);
    const char *why = check_request(op, header, index);
    struct request *request;
    bool early = !op->started || header->seq > op->seq;
    struct link *link = early ? NULL : find_slot(op, header->segment);
    if (why != NULL) {
        op_fail(op, PCCL_EPROTO, "%s", why);
        return;
    }
    request = calloc(1, sizeof *request);
    if (request == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for a request");
        return;
    }
    request->seq = header->seq;
    request->epoch = header->epoch;
    request->slot = header->segment;
    request->piece = index;
    request->length = header->length;
    request->offset = header->offset;
    transfer->n_requests++;
    if (link == NULL) {
        append_request(&transfer->unclaimed, &transfer->last_unclaimed, request);
        return;
    }
    append_request(&link->requests, &link->last_request, request);
    link_request_turn(link);
}

/* The header of a request or of its answer. */
static struct wire_header make_header(const struct link *link, enum wire_kind kind, uint32_t piece)
{
    const struct op *op = link->op;
    struct wire_header header = {0};
    header.kind = kind;
    header.segment = (uint16_t)link->position;
    header.epoch = op->epoch;
    header.run = op->run;
    header.seq = op->seq;
    header.tag = op->tag;
    header.piece = op->transfer.pieces[piece].piece;
    return header;
}

enum turn serve_send(struct link *link)
{
    struct op *op = link->op;
    struct request *request = link->requests;
    const unsigned char *data = op->transfer.pieces[request->piece].data;
    struct wire_header header = make_header(link, WIRE_DATA, request->piece);
    struct packet packet = {0};
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
    free(take_request(&link->requests));
    op->transfer.n_requests--;
    return link->requests != NULL ? TURN_MORE : TURN_OVER;
}

/* ---- FETCH ---- */

/* Moves on to the next piece of which something is still to be requested. False when there is
 * none. */
static bool find_next(struct transfer *transfer)
{
    while (transfer->piece < transfer->n_pieces
           && transfer->offset == transfer->pieces[transfer->piece].bytes) {
        transfer->piece++;
        transfer->offset = 0;
    }
    return transfer->piece < transfer->n_pieces;
}

/* Everything has come: no holder needs a turn any more. */
static void complete(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_links; i++)
        stream_drop_op(op->links[i]->stream, op);
    op_complete(op);
}

/* Makes room for the windows of `holders` more holders: 0 or PCCL_ENOMEM. */
static int grow_wants(struct op *op, uint32_t holders)
{
    struct transfer *transfer = &op->transfer;
    uint32_t n = transfer->n_wants + holders * op->engine->options.fetch_window;
    struct want *wants = realloc(transfer->wants, (n + (size_t)1) * sizeof *wants);
    if (wants == NULL)
        return PCCL_ENOMEM;
    memset(wants + transfer->n_wants, 0, (n - transfer->n_wants) * sizeof *wants);
    transfer->wants = wants;
    transfer->n_wants = n;
    return PCCL_OK;
}

void fetch_start(struct op *op, const pccl_order *order)
{
    struct transfer *transfer = &op->transfer;
    uint32_t i, chunk = order->chunk_bytes < PCCL_CHUNK_MAX ? order->chunk_bytes : PCCL_CHUNK_MAX;
    if (!op->started) {
        transfer->chunk = chunk > 0 ? chunk : 1;
        op->started = true;
        op->seq = order->seq;
        op->epoch = order->epoch;
    }
    if (grow_wants(op, order->n_rings) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for requests");
        return;
    }
    for (i = 0; i < order->n_rings; i++) {
        const pccl_ring *ring = &order->rings[i];
        struct stream *stream = stream_find(op->engine, ring->stream);
        struct link *link;
        if (stream == NULL || ring->position > UINT16_MAX) {
            op_fail(op, PCCL_ESTREAM, "stream %lu is not open", (unsigned long)ring->stream);
            return;
        }
        link = op_add_link(op, stream, ring);
        if (link == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a holder");
            return;
        }
        link_request_turn(link);
    }
    if (transfer->missing == 0)
        complete(op);
}

static struct want *free_want(struct transfer *transfer)
{
    struct want *want = transfer->wants;
    while (want->link != NULL)
        want++;
    assert(want < transfer->wants + transfer->n_wants);
    return want;
}

enum turn fetch_send(struct link *link)
{
    struct op *op = link->op;
    struct transfer *transfer = &op->transfer;
    struct wire_header header;
    struct packet packet = {0};
    struct want *want;
    uint64_t left;
    if (link->outstanding == op->engine->options.fetch_window || !find_next(transfer))
        return TURN_OVER;
    left = transfer->pieces[transfer->piece].bytes - transfer->offset;
    header = make_header(link, WIRE_REQUEST, transfer->piece);
    header.offset = transfer->offset;
    header.length = left < transfer->chunk ? (uint32_t)left : transfer->chunk;
    if (packet_build(op, &packet, &header, NULL, 0) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a request");
        return TURN_FAILED;
    }
    if (stream_send(link->stream, op, &packet) == BLOCKED) {
        packet_clear(op->engine->zmq, &packet);
        return TURN_BLOCKED;
    }
    want = free_want(transfer);
    want->link = link;
    want->piece = transfer->piece;
    want->offset = header.offset;
    want->length = header.length;
    transfer->offset += header.length;
    link->outstanding++;
    return TURN_MORE;
}

/* The request under way that this data answers, or NULL. */
static struct want *find_want(const struct op *op, const struct wire_header *header)
{
    const struct transfer *transfer = &op->transfer;
    uint32_t i;
    for (i = 0; i < transfer->n_wants; i++) {
        struct want *want = &transfer->wants[i];
        if (want->link != NULL && transfer->pieces[want->piece].piece == header->piece
            && want->offset == header->offset && want->length == header->length)
            return want;
    }
    return NULL;
}

void fetch_take(struct op *op, const struct wire_header *header)
{
    struct transfer *transfer = &op->transfer;
    struct packet *inbox = op->engine->inbox;
    struct want *want = op->started ? find_want(op, header) : NULL;
    if (want == NULL || inbox->bytes != header->length || header->epoch != op->epoch) {
        op_fail(op, PCCL_EPROTO, "data came that nobody asked for");
        return;
    }
    memcpy((unsigned char *)transfer->pieces[want->piece].data + want->offset,
           packet_payload(op->engine->zmq, inbox), (size_t)inbox->bytes);
    op->rx_bytes += inbox->bytes;
    transfer->missing -= inbox->bytes;
    want->link->outstanding--;
    link_request_turn(want->link);
    want->link = NULL;
    if (transfer->missing == 0)
        complete(op);
}
