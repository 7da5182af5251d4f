/* fetch.c - see fetch.h.
 *
 * The fetcher keeps a window of requests under way to each holder, and requests the next chunk from
 * a holder as soon as it answers: so a fast holder gives more. The windows depend on how much each
 * holder has delivered recently; otherwise a slow holder would still have a window of requests to
 * answer when all others are done. Requests are smaller when little is left, so that it is divided
 * among all lanes: a message travels on one lane, which takes several round trips for it after a
 * pause. The fetcher accepts data only if it answers a request under way
 * exactly, so no data arrives twice. A request carries the index of its holder, and the answer
 * repeats it: so late answers of a lost holder can be told from impossible ones.
 *
 * Requests to a lost holder are "returned": other holders are asked instead. When no holder is
 * left, the fetch reports it and waits for a START that names others.
 *
 * Late requests are repeated, even if their holder is connected. The caller's reminders are the
 * clock; they are only counted, so a request is late in comparison with others. A holder answers in
 * order, and a lane delivers in order. So a request that a later one has overtaken is stuck in a
 * lane that retransmits, and the answer to its repetition comes over another lane. A holder that
 * does not answer while others do, or while no holder does, is "silent": it is asked only when all
 * are silent. A repetition goes to another holder if possible; the first answer is taken, and the
 * other one is dropped. On a link that is slow all the time, patience grows with the gaps between
 * answers.
 *
 * Pieces are cut into leaves, which the caller verifies (for instance by their digests). A wrong
 * leaf is requested again. If one holder gave all of it, that holder gets no more requests. If
 * several did, one holder becomes the leaf's owner and gives all of it, so that a wrong holder can
 * be identified. So a leaf takes at most about as many attempts as there are holders. */
#include "engine/fetch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Sources of a leaf other than the index of a holder. */
static const uint32_t FROM_NOBODY = UINT32_MAX, FROM_SEVERAL = UINT32_MAX - 1;

enum {
    WINDOW_MIN = 4,          /* chunks: lets a slow holder show that it is fast again */
    WINDOW_LAST = 8,         /* chunks: the smallest limit when little is left */
    SMALLEST = 1 << 14,      /* bytes of a request that is smaller than a chunk, */
    SMALL = 4,               /* and how many of these may replace a chunk */
    LATELY = 64,             /* recent answers of each holder that count */
    PATIENCE_MIN = 2,        /* reminders */
    PATIENCE_MAX = 32,
    REPEATED_MAX = 8
};

/* What to request next from a holder. */
struct range {
    struct want *returned;   /* the returned want to repeat, or NULL */
    struct leaf *leaf;       /* NULL: request nothing */
    uint64_t offset;         /* in the piece */
    uint32_t length;
};

static struct fetch *fetch_of(struct op *op)
{
    return (struct fetch *)op;
}

static struct holder *holder_of(struct flow *flow)
{
    return (struct holder *)flow;
}

static struct fetch *fetch_from(const struct holder *holder)
{
    return fetch_of(op_of(&holder->flow));
}

static struct holder *holder_at(const struct fetch *fetch, uint32_t index)
{
    return holder_of(fetch->op.flows[index]);
}

/* ---- leaves ---- */

static uint64_t count_leaves(uint64_t bytes, uint64_t leaf_bytes)
{
    return bytes / leaf_bytes + (bytes % leaf_bytes != 0);
}

/* Cuts the pieces into leaves. `leaf` is the first of the array fetch->leaves. */
static void cut_leaves(struct fetch *fetch, struct leaf *leaf, uint64_t leaf_bytes)
{
    uint64_t offset;
    uint32_t i;
    for (i = 0; i < fetch->pieces.n; i++)
        for (offset = 0; offset < fetch->pieces.piece[i].bytes; offset += leaf->bytes, leaf++) {
            uint64_t left = fetch->pieces.piece[i].bytes - offset;
            leaf->piece = i;
            leaf->source = FROM_NOBODY;
            leaf->offset = offset;
            leaf->bytes = leaf->missing = left < leaf_bytes ? left : leaf_bytes;
            fetch->unproven += leaf->bytes;
            fetch->unrequested += leaf->bytes;
        }
    assert(leaf == fetch->leaves + fetch->n_leaves);
}

void fetch_enter(struct op *op, const pccl_command *command)
{
    struct fetch *fetch = fetch_of(op);
    uint64_t leaf_bytes = command->leaf_bytes > 0 ? command->leaf_bytes : UINT64_MAX, n = 0;
    uint32_t i;
    if (!pieces_enter(&fetch->pieces, op, command))
        return;
    for (i = 0; i < fetch->pieces.n; i++)
        n += count_leaves(fetch->pieces.piece[i].bytes, leaf_bytes);
    fetch->leaf_bytes = command->leaf_bytes;
    fetch->patience = PATIENCE_MIN;
    if (n < SIZE_MAX / sizeof *fetch->leaves)
        fetch->leaves = calloc((size_t)n + 1, sizeof *fetch->leaves);
    if (fetch->leaves == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for leaves");
        return;
    }
    fetch->n_leaves = (size_t)n;
    cut_leaves(fetch, fetch->leaves, leaf_bytes);
}

void fetch_free(struct op *op)
{
    free(fetch_of(op)->wants);
    free(fetch_of(op)->leaves);
}

/* The leaf with that index in the piece with that number, or NULL. Leaves are in order. */
static struct leaf *find_leaf(const struct fetch *fetch, uint32_t piece, uint32_t index)
{
    size_t low = 0, high = fetch->n_leaves;
    struct leaf *leaf;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (fetch->pieces.piece[fetch->leaves[middle].piece].piece < piece)
            low = middle + 1;
        else
            high = middle;
    }
    if (index >= fetch->n_leaves - low)
        return NULL;
    leaf = &fetch->leaves[low + index];
    return fetch->pieces.piece[leaf->piece].piece == piece ? leaf : NULL;
}

static void request_turns(const struct fetch *fetch)
{
    uint32_t i;
    for (i = 0; i < fetch->op.n_flows; i++)
        flow_request_turn(fetch->op.flows[i]);
}

/* Completes the fetch when all data is here: takes the turns of all holders away. */
static void complete(struct fetch *fetch)
{
    struct op *op = &fetch->op;
    uint32_t i;
    for (i = 0; i < op->n_flows; i++)
        if (op->flows[i]->stream != NULL)
            stream_drop(op->flows[i]->stream, &op->source);
    op_complete(op);
}

static void accept(struct fetch *fetch, struct leaf *leaf)
{
    leaf->state = LEAF_PROVEN;
    fetch->unproven -= leaf->bytes;
    if (fetch->unproven == 0)
        complete(fetch);
}

static void reject(struct fetch *fetch, struct leaf *leaf)
{
    struct flow *flow = leaf->source < fetch->op.n_flows ? fetch->op.flows[leaf->source] : NULL;
    if (flow != NULL && flow->stream != NULL)
        stream_lose(flow->stream, PCCL_EPROTO, "the peer has sent wrong data");
    leaf->state = LEAF_MISSING;
    leaf->wrong = true;
    leaf->source = FROM_NOBODY;
    leaf->owner = NULL;
    fetch->unrequested += leaf->requested;
    leaf->requested = 0;
    leaf->missing = leaf->bytes;
    leaf->next = NULL;
    if (fetch->again != NULL)
        fetch->last_again->next = leaf;
    else
        fetch->again = leaf;
    fetch->last_again = leaf;
    request_turns(fetch);
}

/* VERIFIED */
static void verify(struct fetch *fetch, const pccl_command *command)
{
    struct leaf *leaf = find_leaf(fetch, command->piece, command->leaf);
    if (leaf == NULL || leaf->state != LEAF_ARRIVED)
        op_fail(&fetch->op, PCCL_EINVAL, "VERIFIED for a leaf that has not arrived");
    else if (command->good)
        accept(fetch, leaf);
    else
        reject(fetch, leaf);
}

/* ---- holders ---- */

static uint32_t count_holders(const struct fetch *fetch)
{
    uint32_t i, n = 0;
    for (i = 0; i < fetch->op.n_flows; i++)
        n += fetch->op.flows[i]->stream != NULL;
    return n;
}

/* The number of holders that are not silent. */
static uint32_t count_asked(const struct fetch *fetch)
{
    uint32_t i, n = 0;
    for (i = 0; i < fetch->op.n_flows; i++)
        n += fetch->op.flows[i]->stream != NULL && !holder_at(fetch, i)->silent;
    return n;
}

/* Whether other holders are preferred to this one. */
static bool is_passed_over(const struct holder *holder)
{
    return holder->silent && count_asked(fetch_from(holder)) > 0;
}

/* Allocates wants for the windows of `holders` more holders: 0 or PCCL_ENOMEM. */
static int grow_wants(struct fetch *fetch, uint32_t holders)
{
    uint32_t n = fetch->n_wants + holders * SMALL * fetch->op.ops->options->fetch_window;
    struct want *wants = realloc(fetch->wants, (n + (size_t)1) * sizeof *wants);
    if (wants == NULL)
        return PCCL_ENOMEM;
    memset(wants + fetch->n_wants, 0, (n - fetch->n_wants) * sizeof *wants);
    fetch->wants = wants;
    fetch->n_wants = n;
    return PCCL_OK;
}

/* Returns a want, so that another holder can be asked. If the leaf was wrong before, its next owner
 * must give all of it, so the former holder's answer no longer counts. */
static void return_want(struct fetch *fetch, struct want *want)
{
    want->former = want->leaf->wrong ? NULL : want->holder;
    want->holder->outstanding -= want->length;
    want->leaf->owner = NULL;
    want->holder = NULL;
    fetch->n_returned++;
}

/* Returns all wants of a holder, and releases the leaf that it owns. */
static void return_wants(struct fetch *fetch, struct holder *holder)
{
    uint32_t i;
    for (i = 0; i < fetch->n_wants; i++)
        if (fetch->wants[i].leaf != NULL && fetch->wants[i].holder == holder)
            return_want(fetch, &fetch->wants[i]);
    if (holder->leaf != NULL) {
        holder->leaf->owner = NULL;
        holder->leaf->next = fetch->again;
        if (fetch->again == NULL)
            fetch->last_again = holder->leaf;
        fetch->again = holder->leaf;
        holder->leaf = NULL;
    }
    fetch->delivered -= holder->delivered;
    holder->delivered = 0;
    holder->quiet = 0;
    assert(holder->outstanding == 0);
}

/* Returns the wants of holders that are lost. */
static void return_lost(struct fetch *fetch)
{
    uint32_t i;
    for (i = 0; i < fetch->op.n_flows; i++) {
        struct holder *holder = holder_at(fetch, i);
        bool counts = holder->outstanding > 0 || holder->leaf != NULL || holder->delivered > 0;
        if (counts && holder->flow.stream == NULL)
            return_wants(fetch, holder);
    }
}

/* Returns all wants. Returns whether there were any. */
static bool return_all(struct fetch *fetch)
{
    uint32_t i, silent = 0;
    bool any = false;
    for (i = 0; i < fetch->op.n_flows; i++) {
        struct holder *holder = holder_at(fetch, i);
        holder->silent |= holder->outstanding > 0;
        any |= holder->outstanding > 0;
        silent += holder->flow.stream != NULL && holder->silent;
        if (holder->outstanding > 0)
            return_wants(fetch, holder);
    }
    if (!any || silent == count_holders(fetch))
        for (i = 0; i < fetch->op.n_flows; i++)
            holder_at(fetch, i)->silent = false;
    return any;
}

/* Returns the wants that were overtaken for too long. */
static void return_overtaken(struct fetch *fetch)
{
    uint32_t i;
    for (i = 0; i < fetch->n_wants; i++) {
        struct want *want = &fetch->wants[i];
        if (want->leaf == NULL || want->holder == NULL || want->leaf->owner != NULL)
            continue;
        want->overtaken += want->overtaken > 0 || want->number < want->holder->answered;
        if (want->repeated < REPEATED_MAX && want->overtaken > fetch->patience << want->repeated) {
            want->repeated++;
            return_want(fetch, want);
        }
    }
}

/* Returns the wants of holders that have been quiet for too long, and marks them silent. */
static void return_quiet(struct fetch *fetch)
{
    uint32_t i;
    for (i = 0; i < fetch->op.n_flows; i++) {
        struct holder *holder = holder_at(fetch, i);
        if (holder->outstanding == 0 || ++holder->quiet <= 2 * fetch->patience)
            continue;
        holder->silent = true;
        return_wants(fetch, holder);
    }
}

/* REMIND */
static void remind(struct fetch *fetch, uint64_t limit)
{
    uint32_t n = fetch->reminders++ / fetch->patience;
    bool due = fetch->reminders % fetch->patience == 1 && n > 0 && (n & (n - 1)) == 0;
    if (!fetch->op.started || fetch->op.complete) {
        fetch->reminders = 0;
    } else if (fetch->reminders > limit) {
        fetch->reminders = 0;
        op_report(&fetch->op, PCCL_ESTREAM, "no holder answers");
    } else if (due) {
        if (!return_all(fetch))
            fetch->reminders = 1;    /* no requests are under way: we wait for our own caller */
        request_turns(fetch);
    } else if (fetch->reminders <= fetch->patience) {    /* some holder has answered recently */
        return_overtaken(fetch);
        return_quiet(fetch);
        request_turns(fetch);
    }
}

void fetch_progress(const struct op *op, uint64_t *done, uint64_t *wanted)
{
    const struct fetch *fetch = (const struct fetch *)op;
    uint32_t i;
    for (i = 0; i < fetch->pieces.n; i++)
        *wanted += fetch->pieces.piece[i].bytes;
    *done = *wanted - fetch->unproven;
}

void fetch_command(struct op *op, const pccl_command *command)
{
    if (command->kind == PCCL_VERIFIED)
        verify(fetch_of(op), command);
    else if (command->kind == PCCL_REMIND)
        remind(fetch_of(op), command->limit);
}

void fetch_lose(struct op *op, const struct stream *stream)
{
    struct fetch *fetch = fetch_of(op);
    return_lost(fetch);
    if (op->complete)
        return;
    request_turns(fetch);
    if (count_holders(fetch) == 0)
        op_report(op, PCCL_ESTREAM, "no holder is left: %s", stream->text);
}

/* Begins another round, with other holders. */
static void begin_round(struct fetch *fetch, const pccl_command *command)
{
    struct op *op = &fetch->op;
    uint32_t i, chunk = op_chunk_bytes(command);
    op_forget_flows(op);
    return_lost(fetch);
    for (i = 0; i < fetch->n_wants; i++)
        fetch->wants[i].former = NULL;
    fetch->chunk = chunk > 0 ? chunk : 1;
    op_begin(op, command);
}

void fetch_start(struct op *op, const pccl_command *command)
{
    struct fetch *fetch = fetch_of(op);
    uint32_t i;
    if (!op->started || command->seq > op->seq)
        begin_round(fetch, command);
    if (op->n_flows + command->n_ends > UINT16_MAX
        || grow_wants(fetch, command->n_ends) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for requests");
        return;
    }
    for (i = 0; i < command->n_ends; i++) {
        const pccl_end *end = &command->ends[i];
        struct stream *stream = streams_find(op->ops->streams, end->stream);
        struct flow *flow = end->slot > UINT16_MAX ? NULL : op_add_flow(op, stream);
        if (flow == NULL) {
            op_fail(op, PCCL_ENOMEM, "no memory for a holder, or its slot is too large");
            return;
        }
        holder_of(flow)->slot = end->slot;
        flow_request_turn(flow);
    }
    if (fetch->unproven == 0)
        complete(fetch);
    else if (command->n_ends > 0 && count_holders(fetch) == 0)
        op_report(op, PCCL_ESTREAM, "no holder is left: no stream is open");
}

/* ---- requests ---- */

/* The most bytes that may be under way from a holder: proportional to its share of the recent
 * answers, and few enough near the end to leave some for a holder that connects later. */
static uint64_t window_of(const struct holder *holder)
{
    const struct fetch *fetch = fetch_from(holder);
    uint64_t chunk = fetch->chunk, most = chunk * fetch->op.ops->options->fetch_window;
    uint64_t least = most < WINDOW_MIN * chunk ? most : WINDOW_MIN * chunk;
    uint64_t window, holders = count_holders(fetch), rest = fetch->unproven / 2 / holders;
    if (rest < WINDOW_LAST * chunk)
        rest = WINDOW_LAST * chunk;
    if (rest < most)
        most = rest;
    window = most;
    if (fetch->delivered > LATELY)
        window = most / fetch->delivered * holders * holder->delivered;
    return window < least ? least : window > most ? most : window;
}

/* Counts an answer, and halves all counts from time to time, so that old answers weigh less. */
static void count_delivery(struct holder *holder)
{
    struct fetch *fetch = fetch_from(holder);
    uint32_t i;
    holder->delivered++;
    if (++fetch->delivered < 2 * LATELY * fetch->op.n_flows)
        return;
    fetch->delivered = 0;
    for (i = 0; i < fetch->op.n_flows; i++) {
        holder_at(fetch, i)->delivered /= 2;
        fetch->delivered += holder_at(fetch, i)->delivered;
    }
}

/* A returned want that this holder may be asked for, or NULL. */
static struct want *find_returned(const struct holder *holder)
{
    const struct fetch *fetch = fetch_from(holder);
    uint32_t i, left = fetch->n_returned;
    bool alone = count_asked(fetch) < 2;
    for (i = 0; left > 0; i++) {
        struct want *want = &fetch->wants[i];
        assert(i < fetch->n_wants);
        if (want->leaf == NULL || want->holder != NULL)
            continue;
        left--;
        if (want->former != holder || alone)
            return want;
    }
    return NULL;
}

/* The leaf to request the next part of from this holder, or NULL. */
static struct leaf *next_leaf(const struct holder *holder)
{
    struct fetch *fetch = fetch_from(holder);
    if (holder->leaf != NULL)
        return holder->leaf;
    if (fetch->again != NULL)
        return fetch->again;
    while (fetch->cursor < fetch->n_leaves
           && fetch->leaves[fetch->cursor].requested
               == fetch->leaves[fetch->cursor].bytes)
        fetch->cursor++;
    return fetch->cursor < fetch->n_leaves ? &fetch->leaves[fetch->cursor] : NULL;
}

/* An unused want, or NULL. */
static struct want *free_want(const struct fetch *fetch)
{
    uint32_t i;
    for (i = 0; i < fetch->n_wants; i++)
        if (fetch->wants[i].leaf == NULL)
            return &fetch->wants[i];
    return NULL;
}

/* The size of a request in bytes. What is left is divided among all lanes of all holders; a stream
 * to a holder has as many lanes as the one back. */
static uint32_t request_bytes(const struct fetch *fetch, uint64_t most)
{
    uint64_t lanes = 0, share;
    uint32_t i;
    for (i = 0; i < fetch->op.n_flows; i++)
        if (fetch->op.flows[i]->stream != NULL)
            lanes += fetch->op.flows[i]->stream->lanes;
    share = fetch->unrequested / (lanes > 0 ? lanes : 1);
    if (share < SMALLEST)
        share = SMALLEST;
    if (share < most)
        most = share;
    return most < fetch->chunk ? (uint32_t)most : fetch->chunk;
}

static struct range next_range(const struct holder *holder)
{
    const struct fetch *fetch = fetch_from(holder);
    struct range range = {0};
    range.returned = find_returned(holder);
    if (range.returned != NULL) {
        range.leaf = range.returned->leaf;
        range.offset = range.returned->offset;
        range.length = range.returned->length;
        return range;
    }
    if (free_want(fetch) != NULL)
        range.leaf = next_leaf(holder);
    if (range.leaf != NULL) {
        range.offset = range.leaf->offset + range.leaf->requested;
        range.length = request_bytes(fetch, range.leaf->bytes - range.leaf->requested);
    }
    return range;
}

/* Notes that a range was requested from a holder. */
static void note_request(struct holder *holder, const struct range *range)
{
    struct fetch *fetch = fetch_from(holder);
    struct want *want = range->returned;
    holder->outstanding += range->length;
    fetch->requests++;
    if (want != NULL) {
        want->holder = holder;
        want->number = fetch->requests;
        fetch->n_returned--;
        return;
    }
    if (range->leaf == fetch->again && holder->leaf == NULL) {     /* becomes this holder's own */
        fetch->again = range->leaf->next;
        range->leaf->owner = holder;
    }
    range->leaf->requested += range->length;
    fetch->unrequested -= range->length;
    holder->leaf = NULL;
    if (range->leaf->owner == holder && range->leaf->requested < range->leaf->bytes)
        holder->leaf = range->leaf;
    want = free_want(fetch);
    want->leaf = range->leaf;
    want->holder = holder;
    want->former = NULL;
    want->number = fetch->requests;
    want->overtaken = want->repeated = 0;
    want->offset = range->offset;
    want->length = range->length;
}

enum turn fetch_send(struct flow *flow)
{
    struct op *op = op_of(flow);
    struct fetch *fetch = fetch_of(op);
    struct holder *holder = holder_of(flow);
    struct range range = {0};
    struct wire_header header;
    struct packet packet = {0};
    if (holder->outstanding < window_of(holder) && !is_passed_over(holder))
        range = next_range(holder);
    if (range.leaf == NULL)
        return TURN_OVER;
    header = pieces_header(&fetch->pieces, op, WIRE_REQUEST, holder->slot, range.leaf->piece);
    header.step = (uint16_t)flow->index;
    header.offset = range.offset;
    header.length = range.length;
    if (packet_build(&op->source, &packet, &header, NULL, 0) != PCCL_OK) {
        op_fail(op, PCCL_ENOMEM, "no memory for a request");
        return TURN_FAILED;
    }
    if (stream_send(flow->stream, &op->source, &packet) == BLOCKED) {
        packet_clear(op->source.zmq, &packet);
        return TURN_BLOCKED;
    }
    note_request(holder, &range);
    return TURN_MORE;
}

/* ---- data ---- */

/* The want that this data from a holder answers, where the holder is or was asked; or NULL. */
static struct want *find_want(const struct fetch *fetch, const struct holder *holder,
                              const struct wire_header *header)
{
    uint32_t i;
    for (i = 0; i < fetch->n_wants; i++) {
        struct want *want = &fetch->wants[i];
        if (want->leaf != NULL && (want->holder == holder || want->former == holder)
            && want->offset == header->offset && want->length == header->length
            && fetch->pieces.piece[want->leaf->piece].piece == header->piece)
            return want;
    }
    return NULL;
}

static void leaf_arrived(struct fetch *fetch, struct leaf *leaf)
{
    pccl_event event;
    if (fetch->leaf_bytes == 0) {
        accept(fetch, leaf);
        return;
    }
    leaf->state = LEAF_ARRIVED;
    event = op_event(&fetch->op, PCCL_LEAF);
    event.piece = fetch->pieces.piece[leaf->piece].piece;
    event.leaf = (uint32_t)(leaf->offset / fetch->leaf_bytes);
    (void)events_emit(fetch->op.ops->events, &event);
}

/* The want that a message answers, or NULL. The holder must be connected still. */
static struct want *check_data(const struct fetch *fetch, const struct wire_header *header,
                               uint64_t bytes)
{
    const struct op *op = &fetch->op;
    const struct holder *holder;
    if (!op->started || header->step >= op->n_flows || bytes != header->length)
        return NULL;
    holder = holder_at(fetch, header->step);
    return holder->flow.stream != NULL ? find_want(fetch, holder, header) : NULL;
}

/* Notes that a holder has answered a want, and frees the want. */
static void note_answer(struct holder *holder, struct want *want)
{
    struct fetch *fetch = fetch_from(holder);
    uint32_t gap = 2 * fetch->reminders;
    if (want->overtaken > fetch->patience + 2 && want->overtaken > gap)
        gap = want->overtaken;       /* repeating it did not help: all lanes are that slow */
    if (want->holder == NULL) {
        fetch->n_returned--;
    } else {
        want->holder->outstanding -= want->length;
        flow_request_turn(&want->holder->flow);
    }
    if (want->holder == holder && want->number > holder->answered)
        holder->answered = want->number;
    want->leaf = NULL;
    want->holder = want->former = NULL;
    holder->silent = false;
    holder->quiet = 0;
    fetch->reminders = 0;
    if (gap > fetch->patience)
        fetch->patience = gap < PATIENCE_MAX ? gap : PATIENCE_MAX;
}

void fetch_take(struct op *op, const struct wire_header *header, struct packet **packet)
{
    struct fetch *fetch = fetch_of(op);
    uint64_t bytes = (*packet)->bytes;
    struct want *want = check_data(fetch, header, bytes);
    const pccl_piece *piece;
    struct holder *holder;
    struct leaf *leaf;
    if (want == NULL) {              /* answered by another holder already, or never requested */
        op->ops->dropped++;
        return;
    }
    holder = holder_at(fetch, header->step);
    leaf = want->leaf;
    piece = &fetch->pieces.piece[leaf->piece];
    memcpy((unsigned char *)piece->data + want->offset,
           packet_payload(op->source.zmq, *packet), (size_t)bytes);
    note_answer(holder, want);
    op->rx_bytes += piece->uncounted ? 0 : bytes;
    count_delivery(holder);
    flow_request_turn(&holder->flow);
    if (leaf->source == FROM_NOBODY)
        leaf->source = holder->flow.index;
    else if (leaf->source != holder->flow.index)
        leaf->source = FROM_SEVERAL;
    leaf->missing -= header->length;
    if (leaf->missing == 0)
        leaf_arrived(fetch, leaf);
}
