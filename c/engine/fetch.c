/* fetch.c - FETCH: numbered pieces of memory, asked for chunk by chunk from whoever holds them.
 *
 * The fetcher drives. It keeps a window of requests under way to each holder, so that a chunk goes
 * to whichever holder has answered another one: a fast holder gives more. Windows are shared out
 * by what each holder delivered lately, or a slow one would sit on a window of requests when all
 * others have done their part. Data is taken only if it is exactly what a request under way asked
 * for: so nothing arrives twice. The number by which a request and its answer know their holder
 * lets late answers of one that is gone be told from impossible ones.
 *
 * What a lost holder owes is asked of the others: the wants that it leaves are "returned". When no
 * holder is left, the fetch says so and waits for a START that names others. A holder that does not
 * answer, while no other does either, is "silent": what it owes is returned too (REMIND), and it is
 * asked only when all are silent. Its answer, when it comes at last, is dropped if that is by then
 * asked of another.
 *
 * Pieces are cut into leaves, which the caller proves (by their digests, say). A leaf that is wrong
 * is asked for again. If one holder gave all of it, that one is asked no more; if several did,
 * another one is from then on the leaf's owner and gives all of it, so that it can be told who is
 * wrong. A leaf thus costs as many attempts as there are holders, and a bit more. */
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

enum {
    FROM_NOBODY = UINT32_MAX,
    FROM_SEVERAL = UINT32_MAX - 1,
    WINDOW_MIN = 4,          /* requests: a holder that was slow can show that it is no more */
    WINDOW_LAST = 8,         /* requests: not fewer when little is left */
    LATELY = 64              /* answers for each holder */
};

/* What a link is to be asked for next. */
struct range {
    struct want *returned;   /* not NULL: this one, again */
    struct leaf *leaf;       /* NULL: nothing */
    uint64_t offset;         /* of the piece */
    uint32_t length;
};

/* ---- leaves ---- */

static uint64_t count_leaves(uint64_t bytes, uint64_t leaf_bytes)
{
    return bytes / leaf_bytes + (bytes % leaf_bytes != 0);
}

void fetch_register(struct op *op, const pccl_order *order)
{
    struct transfer *transfer = &op->transfer;
    uint64_t leaf_bytes = order->leaf_bytes > 0 ? order->leaf_bytes : UINT64_MAX, n = 0, offset;
    struct leaf *leaf;
    uint32_t i;
    for (i = 0; i < transfer->n_pieces; i++)
        n += count_leaves(transfer->pieces[i].bytes, leaf_bytes);
    transfer->leaf_bytes = order->leaf_bytes;
    if (n < SIZE_MAX / sizeof *leaf)
        transfer->leaves = calloc((size_t)n + 1, sizeof *leaf);
    leaf = transfer->leaves;
    if (leaf == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for leaves");
        return;
    }
    transfer->n_leaves = (size_t)n;
    for (i = 0; i < transfer->n_pieces; i++)
        for (offset = 0; offset < transfer->pieces[i].bytes; offset += leaf->bytes, leaf++) {
            uint64_t left = transfer->pieces[i].bytes - offset;
            leaf->piece = i;
            leaf->source = FROM_NOBODY;
            leaf->offset = offset;
            leaf->bytes = leaf->missing = left < leaf_bytes ? left : leaf_bytes;
            transfer->unproven += leaf->bytes;
        }
    assert(leaf == transfer->leaves + transfer->n_leaves);
}

/* The leaf of a piece by their numbers, or NULL. Leaves are in order. */
static struct leaf *find_leaf(const struct transfer *transfer, uint32_t piece, uint32_t index)
{
    size_t low = 0, high = transfer->n_leaves;
    struct leaf *leaf;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (transfer->pieces[transfer->leaves[middle].piece].piece < piece)
            low = middle + 1;
        else
            high = middle;
    }
    if (index >= transfer->n_leaves - low)
        return NULL;
    leaf = &transfer->leaves[low + index];
    return transfer->pieces[leaf->piece].piece == piece ? leaf : NULL;
}

static void request_turns(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_links; i++)
        link_request_turn(op->links[i]);
}

/* Everything is here: no holder needs a turn any more. */
static void complete(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_links; i++)
        if (op->links[i]->stream != NULL)
            stream_drop_op(op->links[i]->stream, op);
    op_complete(op);
}

static void accept(struct op *op, struct leaf *leaf)
{
    leaf->state = LEAF_PROVEN;
    op->transfer.unproven -= leaf->bytes;
    if (op->transfer.unproven == 0)
        complete(op);
}

static void reject(struct op *op, struct leaf *leaf)
{
    struct transfer *transfer = &op->transfer;
    struct link *link = leaf->source < op->n_links ? op->links[leaf->source] : NULL;
    if (link != NULL && link->stream != NULL)
        stream_lose(link->stream, PCCL_EPROTO, "what came from there is not what was asked for");
    leaf->state = LEAF_MISSING;
    leaf->source = FROM_NOBODY;
    leaf->owner = NULL;
    leaf->requested = 0;
    leaf->missing = leaf->bytes;
    leaf->next = NULL;
    if (transfer->again != NULL)
        transfer->last_again->next = leaf;
    else
        transfer->again = leaf;
    transfer->last_again = leaf;
    request_turns(op);
}

void fetch_judge(struct op *op, const pccl_order *order)
{
    struct leaf *leaf = find_leaf(&op->transfer, order->piece, order->leaf);
    if (leaf == NULL || leaf->state != LEAF_ARRIVED)
        op_fail(op, PCCL_EINVAL, "a verdict on a leaf that has not arrived");
    else if (order->good)
        accept(op, leaf);
    else
        reject(op, leaf);
}

/* ---- holders ---- */

static uint32_t count_holders(const struct op *op)
{
    uint32_t i, n = 0;
    for (i = 0; i < op->n_links; i++)
        n += op->links[i]->stream != NULL;
    return n;
}

/* Whether other holders should be asked than this one. */
static bool is_passed_over(const struct link *link)
{
    const struct op *op = link->op;
    uint32_t i, others = 0;
    for (i = 0; i < op->n_links; i++)
        others += op->links[i]->stream != NULL && !op->links[i]->silent;
    return link->silent && others > 0;
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

/* Nothing is asked of a link any more; others may be asked for what it owes. */
static void return_wants(struct op *op, struct link *link)
{
    struct transfer *transfer = &op->transfer;
    uint32_t i;
    for (i = 0; i < transfer->n_wants; i++) {
        struct want *want = &transfer->wants[i];
        if (want->leaf == NULL || want->link != link)
            continue;
        want->leaf->owner = NULL;
        want->link = NULL;
        transfer->n_returned++;
    }
    if (link->leaf != NULL) {
        link->leaf->owner = NULL;
        link->leaf->next = transfer->again;
        if (transfer->again == NULL)
            transfer->last_again = link->leaf;
        transfer->again = link->leaf;
        link->leaf = NULL;
    }
    transfer->delivered -= link->delivered;
    link->delivered = 0;
    link->outstanding = 0;
}

/* What all holders owe may be asked for again. Whether there is anything. */
static bool return_all(struct op *op)
{
    uint32_t i, silent = 0;
    bool any = false;
    for (i = 0; i < op->n_links; i++) {
        struct link *link = op->links[i];
        link->silent |= link->outstanding > 0;
        any |= link->outstanding > 0;
        silent += link->stream != NULL && link->silent;
        if (link->outstanding > 0)
            return_wants(op, link);
    }
    if (!any || silent == count_holders(op))
        for (i = 0; i < op->n_links; i++)
            op->links[i]->silent = false;
    return any;
}

void fetch_remind(struct op *op, uint64_t limit)
{
    struct transfer *transfer = &op->transfer;
    uint32_t n = transfer->reminders;
    if (!op->started || op->complete)
        return;
    transfer->reminders++;
    if (n > 0 && n >= limit) {
        transfer->reminders = 0;
        op_report(op, PCCL_ESTREAM, "its holders do not answer");
    } else if (n > 0 && (n & (n - 1)) == 0) {
        if (!return_all(op))
            transfer->reminders = 1; /* nobody is asked: our own caller keeps us waiting */
        request_turns(op);
    }
}

void fetch_lose_link(struct op *op, struct link *link, const char *why)
{
    return_wants(op, link);
    if (op->complete)
        return;
    request_turns(op);
    if (count_holders(op) == 0)
        op_report(op, PCCL_ESTREAM, "no holder is left: %s", why);
}

/* Another round begins, with other holders. */
static void forget_holders(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_links; i++) {
        struct link *link = op->links[i];
        if (link->stream == NULL)
            continue;
        stream_drop_op(link->stream, op);
        link->stream = NULL;
        return_wants(op, link);
    }
}

void fetch_start(struct op *op, const pccl_order *order)
{
    struct transfer *transfer = &op->transfer;
    uint32_t i, chunk = order->chunk_bytes < PCCL_CHUNK_MAX ? order->chunk_bytes : PCCL_CHUNK_MAX;
    if (!op->started || order->seq > op->seq) {
        forget_holders(op);
        transfer->chunk = chunk > 0 ? chunk : 1;
        op->started = true;
        op->seq = order->seq;
        op->nonce = order->nonce;
    }
    if (op->n_links + order->n_rings > UINT16_MAX || grow_wants(op, order->n_rings) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for requests");
        return;
    }
    for (i = 0; i < order->n_rings; i++) {
        const pccl_ring *ring = &order->rings[i];
        struct stream *stream = stream_find(op->engine, ring->stream);
        struct link *link = ring->position > UINT16_MAX ? NULL : op_add_link(op, stream, ring);
        if (link == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a holder, or its slot is too large");
            return;
        }
        link_request_turn(link);
    }
    if (transfer->unproven == 0)
        complete(op);
    else if (order->n_rings > 0 && count_holders(op) == 0)
        op_report(op, PCCL_ESTREAM, "no holder is left: no stream is open");
}

/* ---- requests ---- */

/* How many requests may be under way to a holder: its share of all that came lately, and never so
 * many that nothing would be left for a holder that connects later. */
static uint32_t window_of(const struct link *link)
{
    const struct op *op = link->op;
    uint32_t most = op->engine->options.fetch_window, holders = count_holders(op);
    uint32_t least = most < WINDOW_MIN ? most : WINDOW_MIN;
    uint64_t window, rest = op->transfer.unproven / op->transfer.chunk / 2 / holders;
    if (rest < WINDOW_LAST)
        rest = WINDOW_LAST;
    if (rest < most)
        most = (uint32_t)rest;
    window = most;
    if (op->transfer.delivered > LATELY)
        window = (uint64_t)most * holders * link->delivered / op->transfer.delivered;
    return window < least ? least : window > most ? most : (uint32_t)window;
}

/* Counts an answer, and lets what came earlier count for less. */
static void count_delivery(struct link *link)
{
    struct op *op = link->op;
    uint32_t i;
    link->delivered++;
    if (++op->transfer.delivered < 2 * LATELY * op->n_links)
        return;
    op->transfer.delivered = 0;
    for (i = 0; i < op->n_links; i++) {
        op->links[i]->delivered /= 2;
        op->transfer.delivered += op->links[i]->delivered;
    }
}

/* A want that was returned and that this link may be asked for, or NULL. */
static struct want *find_returned(const struct link *link)
{
    const struct transfer *transfer = &link->op->transfer;
    uint32_t i;
    if (transfer->n_returned == 0)
        return NULL;
    for (i = 0; i < transfer->n_wants; i++) {
        struct want *want = &transfer->wants[i];
        if (want->leaf != NULL && want->link == NULL)
            return want;
    }
    assert(!"the wants that were returned are counted");
    return NULL;
}

/* The leaf of which this link is to be asked for the next part, or NULL. */
static struct leaf *next_leaf(const struct link *link)
{
    struct transfer *transfer = &link->op->transfer;
    if (link->leaf != NULL)
        return link->leaf;
    if (transfer->again != NULL)
        return transfer->again;
    while (transfer->cursor < transfer->n_leaves
           && transfer->leaves[transfer->cursor].requested
               == transfer->leaves[transfer->cursor].bytes)
        transfer->cursor++;
    return transfer->cursor < transfer->n_leaves ? &transfer->leaves[transfer->cursor] : NULL;
}

static struct range next_range(const struct link *link)
{
    struct range range = {0};
    uint64_t left;
    range.returned = find_returned(link);
    if (range.returned != NULL) {
        range.leaf = range.returned->leaf;
        range.offset = range.returned->offset;
        range.length = range.returned->length;
        return range;
    }
    range.leaf = next_leaf(link);
    if (range.leaf != NULL) {
        left = range.leaf->bytes - range.leaf->requested;
        range.offset = range.leaf->offset + range.leaf->requested;
        range.length = left < link->op->transfer.chunk ? (uint32_t)left : link->op->transfer.chunk;
    }
    return range;
}

static struct want *free_want(struct transfer *transfer)
{
    struct want *want = transfer->wants;
    while (want->leaf != NULL)
        want++;
    assert(want < transfer->wants + transfer->n_wants);
    return want;
}

/* Notes that a link was asked for a range. */
static void note_request(struct link *link, const struct range *range)
{
    struct transfer *transfer = &link->op->transfer;
    struct want *want = range->returned;
    link->outstanding++;
    if (want != NULL) {
        want->link = link;
        transfer->n_returned--;
        return;
    }
    if (range->leaf == transfer->again && link->leaf == NULL) {     /* from now on it is ours */
        transfer->again = range->leaf->next;
        range->leaf->owner = link;
    }
    range->leaf->requested += range->length;
    link->leaf = NULL;
    if (range->leaf->owner == link && range->leaf->requested < range->leaf->bytes)
        link->leaf = range->leaf;
    want = free_want(transfer);
    want->leaf = range->leaf;
    want->link = link;
    want->offset = range->offset;
    want->length = range->length;
}

enum turn fetch_send(struct link *link)
{
    struct op *op = link->op;
    struct range range = {0};
    struct wire_header header;
    struct packet packet = {0};
    if (link->outstanding < window_of(link) && !is_passed_over(link))
        range = next_range(link);
    if (range.leaf == NULL)
        return TURN_OVER;
    header = transfer_header(link, WIRE_REQUEST, range.leaf->piece);
    header.hop = (uint16_t)link->index;
    header.offset = range.offset;
    header.length = range.length;
    if (packet_build(op, &packet, &header, NULL, 0) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a request");
        return TURN_FAILED;
    }
    if (stream_send(link->stream, op, &packet) == BLOCKED) {
        packet_clear(op->engine->zmq, &packet);
        return TURN_BLOCKED;
    }
    note_request(link, &range);
    return TURN_MORE;
}

/* ---- data ---- */

/* The request under way to a link that this data answers, or NULL. */
static struct want *find_want(const struct link *link, const struct wire_header *header)
{
    const struct transfer *transfer = &link->op->transfer;
    uint32_t i;
    for (i = 0; i < transfer->n_wants; i++) {
        struct want *want = &transfer->wants[i];
        if (want->leaf != NULL && want->link == link && want->offset == header->offset
            && want->length == header->length
            && transfer->pieces[want->leaf->piece].piece == header->piece)
            return want;
    }
    return NULL;
}

static void leaf_arrived(struct op *op, struct leaf *leaf)
{
    pccl_event event = {0};
    if (op->transfer.leaf_bytes == 0) {
        accept(op, leaf);
        return;
    }
    leaf->state = LEAF_ARRIVED;
    event.kind = PCCL_LEAF;
    event.op = op->id;
    event.seq = op->seq;
    event.tx_bytes = op->tx_bytes;
    event.rx_bytes = op->rx_bytes;
    event.piece = op->transfer.pieces[leaf->piece].piece;
    event.leaf = (uint32_t)(leaf->offset / op->transfer.leaf_bytes);
    engine_emit(op->engine, &event);
}

void fetch_take(struct op *op, const struct wire_header *header)
{
    struct transfer *transfer = &op->transfer;
    struct packet *inbox = op->engine->inbox;
    struct link *link = op->started && header->hop < op->n_links ? op->links[header->hop] : NULL;
    struct want *want = link != NULL ? find_want(link, header) : NULL;
    struct leaf *leaf;
    if (want == NULL || link->stream == NULL || inbox->bytes != header->length) {
        op->engine->dropped++;       /* late: it was asked for again; or what nobody asked for */
        return;
    }
    leaf = want->leaf;
    memcpy((unsigned char *)transfer->pieces[leaf->piece].data + want->offset,
           packet_payload(op->engine->zmq, inbox), (size_t)inbox->bytes);
    want->leaf = NULL;
    want->link = NULL;
    op->rx_bytes += transfer->pieces[leaf->piece].uncounted ? 0 : inbox->bytes;
    link->outstanding--;
    link->silent = false;
    transfer->reminders = 0;
    count_delivery(link);
    link_request_turn(link);
    leaf->source = leaf->source == FROM_NOBODY || leaf->source == link->index ? link->index
                                                                             : FROM_SEVERAL;
    leaf->missing -= header->length;
    if (leaf->missing == 0)
        leaf_arrived(op, leaf);
}
