/* op.c - the life of an op, whatever its kind.
 *
 * REGISTER puts an op into two indexes, by its number for orders and by (kind, run, tag) for
 * messages. COMMIT and ABORT take it out of the second, so that its tag is free again, and move
 * it to the engine's list of ending ops, where it stays until nothing of it waits to be sent and
 * ZeroMQ refers to none of its bytes. A message of an op that ends finds nothing and is dropped
 * as stale.
 *
 * A failed op sends and takes nothing more. It keeps its memory and its numbers until the
 * caller's ABORT. */
#include "engine/engine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- indexes ---- */

static size_t bucket(uint64_t key)
{
    return (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 54);    /* the upper 10 bits */
}

static size_t tag_bucket(enum pccl_op_kind kind, uint64_t run, uint64_t tag)
{
    return bucket(tag ^ run ^ (uint64_t)kind << 60);
}

struct op *op_find_by_tag(pccl_engine *engine, enum pccl_op_kind kind, uint64_t run, uint64_t tag)
{
    struct op *op = engine->by_tag[tag_bucket(kind, run, tag)];
    while (op != NULL && (op->kind != kind || op->run != run || op->tag != tag))
        op = op->next_by_tag;
    return op;
}

static struct op *find_by_id(pccl_engine *engine, uint64_t id)
{
    struct op *op = engine->by_id[bucket(id)];
    while (op != NULL && op->id != id)
        op = op->next_by_id;
    return op;
}

static void index_id(struct op *op)
{
    struct op **at = &op->engine->by_id[bucket(op->id)];
    op->next_by_id = *at;
    *at = op;
}

static void index_tag(struct op *op)
{
    struct op **at = &op->engine->by_tag[tag_bucket(op->kind, op->run, op->tag)];
    op->next_by_tag = *at;
    *at = op;
    op->by_tag = true;
}

static void unindex_id(struct op *op)
{
    struct op **at = &op->engine->by_id[bucket(op->id)];
    while (*at != op)
        at = &(*at)->next_by_id;
    *at = op->next_by_id;
}

static void unindex_tag(struct op *op)
{
    struct op **at = &op->engine->by_tag[tag_bucket(op->kind, op->run, op->tag)];
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
    pccl_engine *engine = op->engine;
    struct op **list = op->ending == LIVING ? &engine->ops : &engine->ending;
    if (op->prev != NULL)
        op->prev->next = op->next;
    else
        *list = op->next;
    if (op->next != NULL)
        op->next->prev = op->prev;
}

/* ---- references and events ---- */

int op_refer(struct op *op)
{
    const pccl_zmq *zmq = op->engine->zmq;
    if (op->counter == NULL)
        op->counter = zmq->atomic_counter_new();
    if (op->counter == NULL)
        return PCCL_ENOMEM;
    zmq->atomic_counter_inc(op->counter);
    return PCCL_OK;
}

void op_unrefer(struct op *op)
{
    op->engine->zmq->atomic_counter_dec(op->counter);
}

static bool is_referred(const struct op *op)
{
    return op->counter != NULL && op->engine->zmq->atomic_counter_value(op->counter) > 0;
}

/* Whether nothing of the op waits to be sent and none of its bytes are under way. */
static bool is_idle(const struct op *op)
{
    return op->queued == 0 && op->in_turn == 0 && !is_referred(op);
}

static pccl_event make_event(const struct op *op, enum pccl_event_kind kind)
{
    pccl_event event = {0};
    event.kind = kind;
    event.op = op->id;
    event.seq = op->seq;
    event.tx_bytes = op->tx_bytes;
    event.rx_bytes = op->rx_bytes;
    return event;
}

/* Drops all that the op wants to send. */
static void silence(struct op *op)
{
    uint32_t i;
    collective_drop_early(op);
    serve_drop_requests(op, NULL);
    for (i = 0; i < op->n_links; i++) {
        serve_drop_requests(op, op->links[i]);
        if (op->links[i]->stream != NULL)
            stream_drop_op(op->links[i]->stream, op);
    }
    assert(op->queued == 0 && op->in_turn == 0);
}

void op_report(struct op *op, int status, const char *format, ...)
{
    pccl_event event = make_event(op, PCCL_FAILED);
    va_list arguments;
    event.status = status;
    va_start(arguments, format);
    (void)vsnprintf(event.text, sizeof event.text, format, arguments);
    va_end(arguments);
    engine_emit(op->engine, &event);
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

void op_lose_stream(struct op *op, struct stream *stream)
{
    bool used = false;
    uint32_t i;
    for (i = 0; i < op->n_links; i++) {
        if (op->links[i]->stream != stream)
            continue;
        stream_drop_op(stream, op);
        serve_drop_requests(op, op->links[i]);
        op->links[i]->stream = NULL;
        used = true;
        if (op->kind == PCCL_FETCH && op->ending == LIVING && !op->failed)
            fetch_lose_link(op, op->links[i], stream->text);
    }
    if (!used || op->ending != LIVING || op->failed || op->kind == PCCL_FETCH)
        return;
    if (op->kind == PCCL_SERVE)      /* one requester is gone, the others are served on */
        op_report(op, PCCL_ESTREAM, "stream %lu: %s", (unsigned long)stream->number, stream->text);
    else
        op_fail(op, PCCL_ESTREAM, "stream %lu: %s", (unsigned long)stream->number, stream->text);
}

/* ---- the end ---- */

static void free_op(struct op *op)
{
    pccl_engine *engine = op->engine;
    uint32_t i;
    assert(op->queued == 0 && op->in_turn == 0);
    list_remove(op);
    unindex_id(op);
    unindex_tag(op);
    for (i = 0; i < op->n_links; i++)
        free(op->links[i]);
    free(op->links);
    collective_free(op);
    transfer_free(op);
    if (op->counter != NULL)
        engine->zmq->atomic_counter_destroy(&op->counter);
    free(op);
}

void op_complete(struct op *op)
{
    pccl_event event = make_event(op, PCCL_COMPLETE);
    assert(op->started && !op->failed && !op->complete);
    op->complete = true;
    event.settled = is_idle(op) && op->collective.shadow == NULL;
    engine_emit(op->engine, &event);
    if (event.settled)
        free_op(op);
}

static void settle(struct op *op)
{
    pccl_event event = make_event(op, PCCL_SETTLED);
    pccl_engine *engine = op->engine;
    if (op->ending == ABORTED)
        collective_restore(op);
    free_op(op);
    engine_emit(engine, &event);
}

bool ops_settle(pccl_engine *engine)
{
    struct op *op = engine->ending, *next;
    bool any = false;
    for (; op != NULL; op = next) {
        next = op->next;
        if (is_idle(op)) {
            settle(op);
            any = true;
        }
    }
    return any;
}

bool ops_await_release(const pccl_engine *engine)
{
    const struct op *op = engine->ending;
    while (op != NULL && (op->queued > 0 || op->in_turn > 0))
        op = op->next;
    return op != NULL;
}

/* ABORT cannot call back what libzmq holds, but for closing its socket. */
static void lose_streams(struct op *op)
{
    uint32_t i;
    for (i = 0; i < op->n_links; i++)
        if (op->links[i]->stream != NULL)
            stream_lose(op->links[i]->stream, PCCL_ESTREAM, "closed to abort op %llu",
                        (unsigned long long)op->id);
}

void op_order_end(pccl_engine *engine, const pccl_order *order)
{
    struct op *op = find_by_id(engine, order->op);
    bool commit = order->kind == PCCL_COMMIT;
    if (op == NULL) {            /* it settled when it completed: order and event have crossed */
        pccl_event event = {0};
        event.kind = PCCL_SETTLED;
        event.op = order->op;
        engine_emit(engine, &event);
        return;
    }
    if (op->ending != LIVING)
        return;
    if (commit && op->kind != PCCL_SERVE && !op->complete) {
        op_fail(op, PCCL_EINVAL, "COMMIT before COMPLETE");
        return;
    }
    list_remove(op);
    op->ending = commit ? COMMITTED : ABORTED;
    list_add(&engine->ending, op);
    unindex_tag(op);
    if (!commit || op->kind == PCCL_SERVE)
        silence(op);
    if (commit)
        collective_drop_shadow(op);
    else if (is_referred(op))
        lose_streams(op);
    if (is_idle(op))
        settle(op);
}

void ops_free(pccl_engine *engine)
{
    struct op *op;
    while ((op = engine->ops != NULL ? engine->ops : engine->ending) != NULL) {
        collective_drop_early(op);
        serve_drop_requests(op, NULL);
        assert(!is_referred(op));
        if (op->ending != COMMITTED)
            collective_restore(op);
        free_op(op);
    }
}

/* ---- the beginning ---- */

struct link *op_add_link(struct op *op, struct stream *stream, const pccl_ring *ring)
{
    struct link **links = realloc(op->links, (op->n_links + (size_t)1) * sizeof *links);
    struct link *link;
    if (links == NULL)
        return NULL;
    op->links = links;
    link = calloc(1, sizeof *link);
    if (link == NULL)
        return NULL;
    link->op = op;
    link->stream = stream;
    link->index = op->n_links;
    link->members = ring->members;
    link->position = ring->position;
    link->root = ring->root;
    link->ranks = ring->ranks;
    link->begin = ring->begin;
    link->count = ring->count;
    op->links[op->n_links++] = link;
    return link;
}

static void fail_unborn(pccl_engine *engine, uint64_t id)
{
    pccl_event event = {0};
    event.kind = PCCL_FAILED;
    event.op = id;
    event.status = PCCL_ENOMEM;
    (void)snprintf(event.text, sizeof event.text, "no memory for an op");
    engine_emit(engine, &event);
}

void op_order_register(pccl_engine *engine, const pccl_order *order)
{
    struct op *op = find_by_id(engine, order->op);
    if (op != NULL) {
        op_fail(op, PCCL_EINVAL, "op number registered twice");
        return;
    }
    op = calloc(1, sizeof *op);
    if (op == NULL) {
        fail_unborn(engine, order->op);
        return;
    }
    op->engine = engine;
    op->id = order->op;
    op->kind = (enum pccl_op_kind)order->op_kind;
    op->run = order->run;
    op->tag = order->tag;
    op->min_seq = order->min_seq;
    list_add(&engine->ops, op);
    index_id(op);
    if (op_find_by_tag(engine, op->kind, op->run, op->tag) != NULL)
        op_fail(op, PCCL_EINVAL, "another op of this kind has the tag");
    else if (op->kind == PCCL_COLLECTIVE)
        collective_register(op, order);
    else if (op->kind == PCCL_SERVE || op->kind == PCCL_FETCH)
        transfer_register(op, order);
    else
        op_fail(op, PCCL_EINVAL, "unknown kind of op");
    if (!op->failed)
        index_tag(op);
}

void op_order_start(pccl_engine *engine, const pccl_order *order)
{
    struct op *op = find_by_id(engine, order->op);
    if (op == NULL || op->failed || op->complete || op->ending != LIVING)
        return;
    if (order->n_rings > PCCL_RINGS_MAX || order->seq <= op->min_seq)
        op_fail(op, PCCL_EINVAL, "START with too many rings or a sequence number that was used");
    else if (op->started && op->kind == PCCL_COLLECTIVE)
        op_fail(op, PCCL_EINVAL, "started twice");
    else if (op->kind == PCCL_COLLECTIVE)
        collective_start(op, order);
    else if (op->kind == PCCL_SERVE)
        serve_start(op, order);
    else
        fetch_start(op, order);
}

void op_order_verdict(pccl_engine *engine, const pccl_order *order)
{
    struct op *op = find_by_id(engine, order->op);
    if (op != NULL && op->kind == PCCL_FETCH && !op->failed && op->ending == LIVING)
        fetch_judge(op, order);
}

void op_order_remind(pccl_engine *engine, const pccl_order *order)
{
    struct op *op = find_by_id(engine, order->op);
    if (op != NULL && op->kind == PCCL_FETCH && !op->failed && op->ending == LIVING)
        fetch_remind(op, order->limit);
}

void op_order_allow(pccl_engine *engine, const pccl_order *order)
{
    struct op *op = find_by_id(engine, order->op);
    if (op != NULL && op->kind == PCCL_SERVE && !op->failed && op->ending == LIVING)
        serve_allow(op, order->limit);
}
