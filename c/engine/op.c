/* op.c - see op.h.
 *
 * REGISTER puts an op into two indexes, by its number for commands and by (kind, run, tag) for
 * messages. COMMIT and ABORT take it out of the second index, so that its tag is free again, and
 * move it to the list of ending ops. There it stays until none of its messages waits to be sent and
 * ZeroMQ refers to none of its memory. A message for an ending op finds no op and is dropped.
 *
 * A failed op sends and receives nothing more. It keeps its memory, number and tag until the
 * caller's ABORT. */
#include "engine/op.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- indexes ---- */

static size_t bucket(uint64_t key)
{
    return (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 54);    /* the upper 10 bits */
}

static size_t tag_bucket(const struct op_kind *kind, uint64_t run, uint64_t tag)
{
    return bucket(tag ^ run ^ (uint64_t)kind->message << 60);
}

struct op *ops_find(const struct ops *ops, const struct op_kind *kind, uint64_t run, uint64_t tag)
{
    struct op *op = ops->by_tag[tag_bucket(kind, run, tag)];
    while (op != NULL && (op->kind != kind || op->run != run || op->tag != tag))
        op = op->next_by_tag;
    return op;
}

static struct op *find_by_id(const struct ops *ops, uint64_t id)
{
    struct op *op = ops->by_id[bucket(id)];
    while (op != NULL && op->id != id)
        op = op->next_by_id;
    return op;
}

static void index_id(struct op *op)
{
    struct op **at = &op->ops->by_id[bucket(op->id)];
    op->next_by_id = *at;
    *at = op;
}

static void index_tag(struct op *op)
{
    struct op **at = &op->ops->by_tag[tag_bucket(op->kind, op->run, op->tag)];
    op->next_by_tag = *at;
    *at = op;
    op->by_tag = true;
}

static void unindex_id(struct op *op)
{
    struct op **at = &op->ops->by_id[bucket(op->id)];
    while (*at != op)
        at = &(*at)->next_by_id;
    *at = op->next_by_id;
}

static void unindex_tag(struct op *op)
{
    struct op **at = &op->ops->by_tag[tag_bucket(op->kind, op->run, op->tag)];
    if (!op->by_tag)
        return;
    while (*at != op)
        at = &(*at)->next_by_tag;
    *at = op->next_by_tag;
    op->by_tag = false;
}

static void list_add(struct op **list, struct op *op)
{
    op->prev = NULL;
    op->next = *list;
    if (*list != NULL)
        (*list)->prev = op;
    *list = op;
}

static void list_remove(struct op *op)
{
    struct op **list = op->ending == LIVING ? &op->ops->living : &op->ops->ending;
    if (op->prev != NULL)
        op->prev->next = op->next;
    else
        *list = op->next;
    if (op->next != NULL)
        op->next->prev = op->prev;
}

/* ---- flows and events ---- */

struct flow *op_add_flow(struct op *op, struct stream *stream)
{
    struct flow **flows = realloc(op->flows, (op->n_flows + (size_t)1) * sizeof *flows);
    struct flow *flow;
    if (flows == NULL)
        return NULL;
    op->flows = flows;
    flow = calloc(1, op->kind->flow_bytes);
    if (flow == NULL)
        return NULL;
    flow->source = &op->source;
    flow->stream = stream;
    flow->send = op->kind->send;
    flow->urgent = op->kind->urgent;
    flow->index = op->n_flows;
    op->flows[op->n_flows++] = flow;
    return flow;
}

struct flow *op_add_ring(struct op *op, const pccl_ring *place, bool needs_stream)
{
    struct stream *stream = needs_stream ? streams_find(op->ops->streams, place->stream) : NULL;
    struct flow *flow;
    if (needs_stream && stream == NULL) {
        op_fail_stream(op, place->stream, "it is not open");
        return NULL;
    }
    flow = op_add_flow(op, stream);
    if (flow == NULL)
        op_fail(op, PCCL_ENOMEM, "no memory for a ring");
    else
        op->is_spread |= stream != op->flows[0]->stream;
    return flow;
}

struct flow *op_add_direct(struct op *op, uint32_t stream, struct flow *around)
{
    struct stream *direct = stream != 0 ? streams_find(op->ops->streams, stream) : NULL;
    struct flow *flow = op_add_flow(op, direct != NULL ? direct : around->stream);
    if (flow == NULL)
        op_fail(op, PCCL_ENOMEM, "no memory for the way to a member");
    else if (direct != NULL)
        flow->around = around;
    return flow;
}

/* Drops what a flow has to send; NULL: what waits without a flow. */
static void drop(struct op *op, struct flow *flow)
{
    if (op->kind->drop != NULL)
        op->kind->drop(op, flow);
    if (flow != NULL && flow->stream != NULL)
        stream_drop(flow->stream, &op->source);
}

/* Drops everything that the op has to send. */
static void silence(struct op *op)
{
    uint32_t i;
    drop(op, NULL);
    for (i = 0; i < op->n_flows; i++)
        drop(op, op->flows[i]);
    assert(op->source.pending == 0);
}

void op_forget_flows(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_flows; i++) {
        if (op->flows[i]->stream == NULL)
            continue;
        drop(op, op->flows[i]);
        op->flows[i]->stream = NULL;
    }
}

static void free_flows(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_flows; i++)
        free(op->flows[i]);
    op->n_flows = 0;
}

void op_remove_flows(struct op *op)
{
    op_forget_flows(op);
    free_flows(op);
    op->is_spread = false;
}

void op_begin(struct op *op, const pccl_command *command)
{
    op->started = true;
    op->seq = command->seq;
    op->nonce = command->nonce;
    op->ops->n_spread += op->is_spread;
}

struct wire_header op_header(const struct op *op, enum wire_kind kind)
{
    struct wire_header header = {0};
    header.kind = kind;
    header.run = op->run;
    header.seq = op->seq;
    header.tag = op->tag;
    header.nonce = op->nonce;
    return header;
}

pccl_event op_event(const struct op *op, enum pccl_event_kind kind)
{
    pccl_event event = {0};
    event.kind = kind;
    event.op = op->id;
    event.seq = op->seq;
    event.tx_bytes = op->source.tx_bytes;
    event.rx_bytes = op->rx_bytes;
    return event;
}

void op_report(struct op *op, int status, const char *format, ...)
{
    pccl_event event = op_event(op, PCCL_FAILED);
    va_list arguments;
    event.status = status;
    va_start(arguments, format);
    (void)vsnprintf(event.text, sizeof event.text, format, arguments);
    va_end(arguments);
    (void)events_emit(op->ops->events, &event);
}

void op_report_stream(struct op *op, uint32_t stream, const char *text)
{
    pccl_event event = op_event(op, PCCL_FAILED);
    event.status = PCCL_ESTREAM;
    event.stream = stream;
    (void)snprintf(event.text, sizeof event.text, "%s", text);
    (void)events_emit(op->ops->events, &event);
}

void op_fail(struct op *op, int status, const char *format, ...)
{
    char text[PCCL_TEXT_MAX];
    va_list arguments;
    if (op->failed)
        return;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    op->failed = true;
    silence(op);
    op_report(op, status, "%s", text);
}

void op_fail_stream(struct op *op, uint32_t stream, const char *text)
{
    if (op->failed)
        return;
    op->failed = true;
    silence(op);
    op_report_stream(op, stream, text);
}

/* ---- forwards ---- */

void op_forward(struct op *op, struct stream *stream, struct packets *early,
                struct packet **packet)
{
    struct packet *fresh, *waiting = *packet;
    if (stream != NULL && stream->forwards.head == NULL
        && stream_send(stream, &op->source, waiting) == SENT)
        return;
    fresh = packet_new();
    if (fresh == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for a message");
        return;
    }
    *packet = fresh;
    packets_append(stream != NULL ? &stream->forwards : early, waiting);
    packet_await(&op->source, waiting);
}

void op_take_early(struct op *op, struct packets *early)
{
    const pccl_zmq *zmq = op->source.zmq;
    struct packet *packet;
    while ((packet = packets_take(early)) != NULL) {
        struct wire_header header;
        packet_unawait(packet);
        if (wire_decode(&header, packet_header(zmq, packet)) && header.seq == op->seq
            && header.nonce == op->nonce && !op->failed)
            op->kind->take(op, &header, &packet);
        else
            op->ops->dropped++;
        packet_free(zmq, packet);
    }
}

/* ---- messages and lost streams ---- */

/* Whether commands and lost streams still concern an op. */
static bool is_active(const struct op *op)
{
    return op->ending == LIVING && !op->failed;
}

/* Whether a message belongs to the call of an op. */
static bool is_current(const struct op *op, const struct wire_header *header)
{
    if (!op->started)
        return header->seq > op->min_seq;
    if (op->kind->early_rounds && header->seq > op->seq)
        return true;
    return header->seq == op->seq && header->nonce == op->nonce;
}

/* Gives an op a chunk that was sent before START. The header becomes that of a usual chunk of the
 * call, so that the chunk is checked, and sent on, like all others. `op` may be NULL. */
static void adopt(struct ops *ops, struct op *op, const struct wire_header *header,
                  struct packet **packet)
{
    struct wire_header adopted = *header;
    if (op == NULL || !op->started || op->failed || header->nonce != op->epoch) {
        ops->dropped++;
        return;
    }
    adopted.eager = false;
    adopted.seq = op->seq;
    adopted.nonce = op->nonce;
    wire_encode(&adopted, packet_header(op->source.zmq, *packet));
    op->kind->take(op, &adopted, packet);
}

/* Handles a chunk that was sent before START. If it belongs to the call that our START has named,
 * the op takes it; otherwise it may be for a later START, and is held. */
static void take_eager(struct ops *ops, struct op *op, const struct wire_header *header,
                       struct packet **packet)
{
    bool known = header->ring < PCCL_RINGS_MAX && header->seq > 0;
    uint64_t call = known && op != NULL && op->started ? op->calls[header->ring] : 0;
    if (known && header->seq == call)
        adopt(ops, op, header, packet);
    else if (!known
             || !unexpected_hold(&ops->unexpected, header, packet, op != NULL && !op->started))
        ops->dropped++;
}

void ops_take(struct ops *ops, struct op *op, const struct wire_header *header,
              struct packet **packet)
{
    if (header->eager)
        take_eager(ops, op, header, packet);
    else if (op != NULL && !op->failed && is_current(op, header))
        op->kind->take(op, header, packet);
    else
        ops->dropped++;
}

/* Lets a flow that has sent nothing take another stream. Returns whether there is one. */
static bool go_around(struct flow *flow)
{
    if (flow->around == NULL || flow->used || flow->around->stream == NULL)
        return false;
    flow->stream = flow->around->stream;
    flow->around = NULL;
    flow_request_turn(flow);
    return true;
}

static void lose_stream(struct op *op, struct stream *stream)
{
    bool used = false;
    uint32_t i;
    for (i = 0; i < op->n_flows; i++) {
        if (op->flows[i]->stream != stream)
            continue;
        drop(op, op->flows[i]);
        op->flows[i]->stream = NULL;
        used |= !is_active(op) || !go_around(op->flows[i]);
    }
    if (used && is_active(op))
        op->kind->lose(op, stream);
}

void ops_lose_stream(struct ops *ops, struct stream *stream)
{
    struct op *op;
    for (op = ops->living; op != NULL; op = op->next)
        lose_stream(op, stream);
    for (op = ops->ending; op != NULL; op = op->next)
        lose_stream(op, stream);
}

/* ---- the end ---- */

static void free_op(struct op *op)
{
    list_remove(op);
    unindex_id(op);
    unindex_tag(op);
    if (op->started && op->is_spread)
        op->ops->n_spread--;
    if (op->kind->free != NULL)
        op->kind->free(op);
    free_flows(op);
    free(op->flows);
    source_free(&op->source);
    free(op);
}

void op_complete(struct op *op)
{
    pccl_event event = op_event(op, PCCL_COMPLETE);
    assert(op->started && !op->failed && !op->complete);
    op->complete = true;
    event.settled = source_is_idle(&op->source) && !op->reversible && !op->kind->obliging;
    (void)events_emit(op->ops->events, &event);
    if (event.settled)
        free_op(op);
}

static void end(struct op *op, bool keep)
{
    if (op->kind->end != NULL)
        op->kind->end(op, keep);
}

/* SETTLED gives the memory back to the caller. If the event cannot be sent, the caller counts the
 * op as failed, so the old content is restored even after COMMIT. */
static void settle(struct op *op)
{
    pccl_event event = op_event(op, PCCL_SETTLED);
    bool told;
    if (op->ending == ABORTED)
        end(op, false);
    told = events_emit(op->ops->events, &event);
    if (op->ending == COMMITTED)
        end(op, told);
    free_op(op);
}

bool ops_settle(struct ops *ops)
{
    struct op *op = ops->ending, *next;
    bool any = false;
    for (; op != NULL; op = next) {
        next = op->next;
        if (source_is_idle(&op->source)) {
            settle(op);
            any = true;
        }
    }
    return any;
}

bool ops_await_release(const struct ops *ops)
{
    const struct op *op = ops->ending;
    while (op != NULL && op->source.pending > 0)
        op = op->next;
    return op != NULL;
}

/* ABORT must take messages back from libzmq, which only closing its socket does. */
static void lose_streams(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_flows; i++)
        if (op->flows[i]->stream != NULL)
            stream_lose(op->flows[i]->stream, PCCL_ESTREAM, "closed to abort op %llu",
                        (unsigned long long)op->id);
}

void ops_end(struct ops *ops, const pccl_command *command)
{
    struct op *op = find_by_id(ops, command->op);
    bool commit = command->kind == PCCL_COMMIT;
    if (op == NULL) {            /* it settled at COMPLETE: that event has crossed this command */
        pccl_event event = {0};
        event.kind = PCCL_SETTLED;
        event.op = command->op;
        (void)events_emit(ops->events, &event);
        return;
    }
    if (op->ending != LIVING)
        return;
    if (commit && !op->kind->endless && !op->complete) {
        op_fail(op, PCCL_EINVAL, "COMMIT before COMPLETE");
        return;
    }
    list_remove(op);
    op->ending = commit ? COMMITTED : ABORTED;
    list_add(&ops->ending, op);
    unindex_tag(op);
    unexpected_await(&ops->unexpected, op->run, op->tag, false);
    if (!commit || op->kind->endless)
        silence(op);
    if (!commit && source_is_referred(&op->source))
        lose_streams(op);
    if (source_is_idle(&op->source))
        settle(op);
}

void ops_free(struct ops *ops)
{
    struct op *op;
    while ((op = ops->living != NULL ? ops->living : ops->ending) != NULL) {
        drop(op, NULL);
        assert(!source_is_referred(&op->source));
        end(op, false);
        free_op(op);
    }
    unexpected_free(&ops->unexpected, ops->events->zmq);
    free(ops->spare.memory);
}

/* ---- the beginning ---- */

static void fail_unborn(struct ops *ops, uint64_t id)
{
    pccl_event event = {0};
    event.kind = PCCL_FAILED;
    event.op = id;
    event.status = PCCL_ENOMEM;
    (void)snprintf(event.text, sizeof event.text, "no memory for an op");
    (void)events_emit(ops->events, &event);
}

/* Creates an op and puts it into the index by number. Returns NULL without memory. */
static struct op *new_op(struct ops *ops, const struct op_kind *kind, const pccl_command *command)
{
    struct op *op = calloc(1, kind->bytes);
    if (op == NULL)
        return NULL;
    op->source.zmq = ops->events->zmq;
    op->source.backlog = &ops->backlog;
    op->source.copy_max = ops->options->copy_max;
    op->ops = ops;
    op->kind = kind;
    op->id = command->op;
    op->run = command->run;
    op->tag = command->tag;
    op->min_seq = command->min_seq;
    list_add(&ops->living, op);
    index_id(op);
    return op;
}

void ops_register(struct ops *ops, const struct op_kind *kind, const pccl_command *command)
{
    static const struct op_kind unknown = {.bytes = sizeof(struct op)};
    struct op *op = find_by_id(ops, command->op);
    if (op != NULL) {
        op_fail(op, PCCL_EINVAL, "this op number is registered twice");
        return;
    }
    op = new_op(ops, kind != NULL ? kind : &unknown, command);
    if (op == NULL)
        fail_unborn(ops, command->op);
    else if (kind == NULL)
        op_fail(op, PCCL_EINVAL, "unknown kind of op");
    else if (ops_find(ops, kind, op->run, op->tag) != NULL)
        op_fail(op, PCCL_EINVAL, "another op of this kind has the tag");
    else
        kind->enter(op, command);
    if (op != NULL && !op->failed)
        index_tag(op);
    if (kind != NULL && kind->eager != NULL)
        unexpected_await(&ops->unexpected, command->run, command->tag, true);
}

void ops_eager(struct ops *ops, const pccl_command *command)
{
    struct op *op = find_by_id(ops, command->op);
    if (op == NULL || !is_active(op) || op->started || op->kind->eager == NULL)
        return;
    if (command->n_rings == 0 || command->n_rings > PCCL_RINGS_MAX || op->n_flows > 0) {
        op_fail(op, PCCL_EINVAL, "EAGER twice, without a ring, or with too many rings");
        return;
    }
    op->epoch = ops->unexpected.nonce;
    op->kind->eager(op, command);
}

/* Gives an op that has just started the chunks that were held for it. The op may have completed,
 * and be freed, already. */
static void take_unexpected(struct ops *ops, const pccl_command *command, uint64_t run,
                            uint64_t tag)
{
    struct wire_header call = {0}, header;
    struct packet *packet;
    uint32_t i;
    call.run = run;
    call.tag = tag;
    call.nonce = ops->unexpected.nonce;
    for (i = 0; i < command->n_rings; i++) {
        call.ring = (uint8_t)i;
        call.seq = command->rings[i].call;
        while ((packet = unexpected_take(&ops->unexpected, &call)) != NULL) {
            (void)wire_decode(&header, packet_header(ops->events->zmq, packet));
            adopt(ops, find_by_id(ops, command->op), &header, &packet);
            packet_free(ops->events->zmq, packet);
        }
        unexpected_forget(&ops->unexpected, ops->events->zmq, &call);
    }
    unexpected_await(&ops->unexpected, run, tag, false);
}

/* Starts an op whose predecessors may have sent chunks before START. */
static void start_eager(struct ops *ops, struct op *op, const pccl_command *command)
{
    uint64_t run = op->run, tag = op->tag;
    bool lacks = false;
    uint32_t i;
    for (i = 0; i < command->n_rings; i++) {
        op->calls[i] = command->rings[i].call;
        lacks |= ops->unexpected.torn && op->calls[i] > 0;
    }
    op->epoch = ops->unexpected.nonce;
    if (lacks)
        op_fail(op, PCCL_ENOMEM, "no memory for a chunk that came before START");
    else
        op->kind->start(op, command);
    take_unexpected(ops, command, run, tag);
}

void ops_start(struct ops *ops, const pccl_command *command)
{
    struct op *op = find_by_id(ops, command->op);
    if (op == NULL || op->complete || !is_active(op))
        return;
    if (command->n_rings > PCCL_RINGS_MAX || command->n_ends > PCCL_ENDS_MAX
        || command->seq <= op->min_seq)
        op_fail(op, PCCL_EINVAL, "START with too many rings, or with a used sequence number");
    else if (op->started && !op->kind->rounds)
        op_fail(op, PCCL_EINVAL, "START twice");
    else if (op->kind->eager != NULL)
        start_eager(ops, op, command);
    else
        op->kind->start(op, command);
}

void ops_expect(struct ops *ops, const pccl_command *command)
{
    unexpected_expect(&ops->unexpected, ops->events->zmq, command->nonce);
}

void ops_command(struct ops *ops, const pccl_command *command)
{
    struct op *op = find_by_id(ops, command->op);
    if (op != NULL && is_active(op) && op->kind->command != NULL)
        op->kind->command(op, command);
}

void ops_query(const struct ops *ops, const pccl_command *command)
{
    const struct op *op = find_by_id(ops, command->op);
    uint64_t done = 0, wanted = 0;
    pccl_event event;
    double share;
    if (op == NULL || !is_active(op) || !op->started || op->complete || op->kind->progress == NULL)
        return;
    op->kind->progress(op, &done, &wanted);
    share = wanted > 0 ? 1000 * (double)done / (double)wanted : 0;
    event = op_event(op, PCCL_PROGRESS);
    event.done = share < 999 ? (uint64_t)share : 999;
    (void)events_emit(ops->events, &event);
}
