/* engine.c - the loop: commands in, messages in, messages out, events out (pccl_core.h, THE
 * ENGINE).
 *
 * The modules of the engine. Each uses only modules above it (tests/unit/test_layers.py):
 *
 * wire         the header in front of every payload
 * bitmap       which parts of a buffer have been handled
 * transport    the operating system's data and settings of a connection
 * lanes        how much the connections of a stream hold, and when there are too few
 * parts        the arrays of a collective: their places in memory, and what ABORT restores
 * events       messages to the caller
 * zap          who may connect to the PULL socket
 * packet       messages of one or two frames, and references to the memory that they point into
 * unexpected   chunks that came before START, held for it
 * stream       PUSH sockets, their lanes and monitors, and the order of sending
 * op           the life of an op of any kind
 * serve        SERVE: answers requests for pieces
 * fetch        FETCH: requests pieces
 * collective   COLLECTIVE: its arrays, which elements of them are done, how it ends
 * ring         how the chunks of a collective go around a ring
 * oneshot      how two members send each other their whole contributions
 * progressive  collectives whose memory is filled, and read, while they run
 * twostage     how contributions go to the owners of segments, which reduce them
 * start        START of a collective, and EAGER before it
 * chunk        the chunks of a collective: sends our own; checks and handles those of others
 * exchange     EXCHANGE: rows from member to member
 *
 * One pass takes commands, receives a bounded batch, lets every stream send, settles ops, reads the
 * monitors and closes lost streams. It never blocks; after a pass that has moved nothing,
 * pccl_engine_run() waits until a socket has news. The engine needs no clock.
 *
 * It waits for the sockets' descriptors (ZMQ_FD), because zmq_poll on the sockets themselves makes
 * two system calls for each socket before it waits, and two after. A descriptor only signals events
 * since its socket was last used. So the pass before the wait must find each socket empty, or full,
 * and not use it after that.
 *
 * All functions run in the thread that is in pccl_engine_run(), except release() in packet.c:
 * libzmq calls it from its own threads, and it only touches an atomic counter.
 *
 * Streams and ops must not disappear in the middle of a pass, because callers up the stack hold
 * pointers to them. So a lost stream is only marked, and closed at the end of the pass; and a
 * failed op keeps its memory until its ABORT. Only op_complete(), ops_end(), ops_settle() and
 * ops_free() free an op. */
#include "pccl_core.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chunk.h"
#include "engine/collective.h"
#include "engine/events.h"
#include "engine/exchange.h"
#include "engine/fetch.h"
#include "engine/op.h"
#include "engine/packet.h"
#include "engine/progressive.h"
#include "engine/serve.h"
#include "engine/start.h"
#include "engine/stream.h"
#include "engine/transport.h"
#include "engine/wire.h"
#include "engine/zap.h"
#include "zmq/zmqdefs.h"

static const char COMMANDS_ENDPOINT[] = "inproc://pccl-engine";

enum {
    COMMAND_BATCH = 64,      /* messages with commands in one pass */
    RECEIVE_BATCH = 16,      /* messages received in one pass, */
    RECEIVE_BYTES = 1 << 20, /* or bytes: reducing them takes as long as sending them */
    FORWARD_BYTES = 32 << 20, /* payload that may wait to be sent on, besides ops' own memory */
    LISTEN_INTERVAL = 16,    /* busy passes between looks at the monitors (system calls) */
    RELEASE_WAIT_MS = 1,     /* libzmq releases written memory at once, but does not notify us */
    SOCKETS_MAX = 8192       /* of the context; a stream takes three */
};

struct pccl_engine {
    pccl_options options;
    void *context, *pull;
    struct events events;
    struct zap zap;
    struct streams streams;
    struct ops ops;
    struct packet *inbox;    /* the message being received */
    bool stopped;
    uint32_t passes;
    uint64_t dropped;        /* commands and messages that could not be read */
    pccl_pollitem *items;    /* descriptors to wait for, */
    void **watched;          /* and the socket of each */
    size_t items_room;       /* capacity of both arrays */
};

/* ---- the kinds of ops ---- */

static const struct op_kind kinds[] = {
    [PCCL_COLLECTIVE] = {
        .message = WIRE_CHUNK,
        .bytes = sizeof(struct collective),
        .flow_bytes = sizeof(struct ring),
        .enter = collective_enter,
        .eager = start_eagerly,
        .start = start_collective,
        .progress = collective_progress,
        .command = progressive_command,
        .take = chunk_take,
        .send = chunk_send,
        .drop = collective_drop,
        .lose = collective_lose,
        .end = collective_end,
        .free = collective_free,
    },
    [PCCL_SERVE] = {
        .message = WIRE_REQUEST,
        .bytes = sizeof(struct serve),
        .flow_bytes = sizeof(struct requester),
        .urgent = true,
        .rounds = true,
        .early_rounds = true,
        .endless = true,
        .enter = serve_enter,
        .start = serve_start,
        .command = serve_command,
        .take = serve_take,
        .send = serve_send,
        .drop = serve_drop,
        .lose = serve_lose,
    },
    [PCCL_FETCH] = {
        .message = WIRE_DATA,
        .bytes = sizeof(struct fetch),
        .flow_bytes = sizeof(struct holder),
        .urgent = true,
        .rounds = true,
        .enter = fetch_enter,
        .start = fetch_start,
        .progress = fetch_progress,
        .command = fetch_command,
        .take = fetch_take,
        .send = fetch_send,
        .lose = fetch_lose,
        .free = fetch_free,
    },
    [PCCL_EXCHANGE] = {
        .message = WIRE_ROW,
        .bytes = sizeof(struct exchange),
        .flow_bytes = sizeof(struct route),
        .obliging = true,
        .enter = exchange_enter,
        .start = exchange_start,
        .progress = exchange_progress,
        .take = exchange_take,
        .send = exchange_send,
        .drop = exchange_drop,
        .lose = exchange_lose,
        .free = exchange_free,
    },
};

/* The kind with that number (a pccl_op_kind), or NULL. */
static const struct op_kind *op_kind_numbered(uint32_t number)
{
    const uint32_t n = sizeof kinds / sizeof kinds[0];
    return number > 0 && number < n ? &kinds[number] : NULL;
}

/* The kind of op that takes messages of a kind. */
static const struct op_kind *op_kind_taking(enum wire_kind message)
{
    static const enum pccl_op_kind taking[] = {
        [WIRE_CHUNK] = PCCL_COLLECTIVE, [WIRE_REQUEST] = PCCL_SERVE, [WIRE_DATA] = PCCL_FETCH,
        [WIRE_ROW] = PCCL_EXCHANGE};
    return &kinds[taking[message]];
}

/* ---- creation ---- */

static void *open_socket(pccl_engine *engine, int type, int recv_hwm)
{
    const pccl_zmq *zmq = engine->events.zmq;
    void *socket = zmq->socket(engine->context, type);
    int zero = 0, failed;
    if (socket == NULL)
        return NULL;
    failed = zmq->setsockopt(socket, ZMQ_LINGER, &zero, sizeof zero);
    failed |= zmq->setsockopt(socket, ZMQ_RCVHWM, &recv_hwm, sizeof recv_hwm);
    failed |= zmq->setsockopt(socket, ZMQ_SNDHWM, &zero, sizeof zero);
    if (failed) {
        (void)zmq->close(socket);
        return NULL;
    }
    return socket;
}

/* Lets zap.c decide who may connect: 0, or -1 as setsockopt. The domain is enforced, because
 * otherwise libzmq lets everybody in when there is no handler. */
static int set_server(pccl_engine *engine)
{
    static const char domain[] = "pccl";
    const pccl_zmq *zmq = engine->events.zmq;
    const char *secret = engine->options.curve_secret;
    int one = 1, failed;
    if (zap_open(&engine->zap, engine->context) < 0)
        return -1;
    if (secret[0] == '\0') {
        failed = zmq->setsockopt(engine->pull, ZMQ_PLAIN_SERVER, &one, sizeof one);
    } else {
        failed = zmq->setsockopt(engine->pull, ZMQ_CURVE_SERVER, &one, sizeof one);
        failed |= zmq->setsockopt(engine->pull, ZMQ_CURVE_SECRETKEY, secret, PCCL_KEY_CHARS);
    }
    failed |= zmq->setsockopt(engine->pull, ZMQ_ZAP_DOMAIN, domain, sizeof domain - 1);
    failed |= zmq->setsockopt(engine->pull, ZMQ_ZAP_ENFORCE_DOMAIN, &one, sizeof one);
    return failed;
}

static bool is_guarded(const pccl_options *options)
{
    return options->curve_secret[0] != '\0' || options->dialler[0] != '\0';
}

/* Pings every sender to us; a sender that gets no ping for the timeout counts us as lost. We ignore
 * how late its answers are, because they queue behind its data, which we may take slowly: TCP
 * detects a sender that is lost. 0, or -1 as setsockopt. */
static int set_heartbeats(pccl_engine *engine)
{
    const pccl_zmq *zmq = engine->events.zmq;
    const pccl_options *options = &engine->options;
    int interval = (int)options->heartbeat_ms, ttl = (int)options->heartbeat_timeout_ms;
    int unheard = tcp_unheard_ms(options->heartbeat_timeout_ms), never = 0, failed;
    if (interval == 0)
        return 0;
    failed = zmq->setsockopt(engine->pull, ZMQ_HEARTBEAT_IVL, &interval, sizeof interval);
    failed |= zmq->setsockopt(engine->pull, ZMQ_HEARTBEAT_TTL, &ttl, sizeof ttl);
    failed |= zmq->setsockopt(engine->pull, ZMQ_HEARTBEAT_TIMEOUT, &never, sizeof never);
    failed |= zmq->setsockopt(engine->pull, ZMQ_TCP_MAXRT, &unheard, sizeof unheard);
    return failed;
}

/* Opens the context, the PAIR for commands and the PULL for everything else: 0 or PCCL_EZMQ. The
 * limits bound the memory that a stranger can take in libzmq: one message on each connection, for
 * as long as a handshake may take. */
static int open_sockets(pccl_engine *engine)
{
    const pccl_zmq *zmq = engine->events.zmq;
    int handshake = (int)engine->options.connect_timeout_ms;
    int64_t message_max = (int64_t)PCCL_CHUNK_MAX + WIRE_HEADER_BYTES;
    engine->context = engine->streams.context = zmq->ctx_new();
    if (engine->context == NULL
        || zmq->ctx_set(engine->context, ZMQ_IO_THREADS, (int)engine->options.io_threads) < 0
        || zmq->ctx_set(engine->context, ZMQ_MAX_SOCKETS, SOCKETS_MAX) < 0)
        return PCCL_EZMQ;
    engine->events.socket = open_socket(engine, ZMQ_PAIR, 0);
    if (engine->events.socket == NULL || zmq->bind(engine->events.socket, COMMANDS_ENDPOINT) < 0)
        return PCCL_EZMQ;
    engine->pull = open_socket(engine, ZMQ_PULL, (int)engine->options.recv_hwm);
    if (engine->pull == NULL
        || zmq->setsockopt(engine->pull, ZMQ_MAXMSGSIZE, &message_max, sizeof message_max) < 0
        || zmq->setsockopt(engine->pull, ZMQ_HANDSHAKE_IVL, &handshake, sizeof handshake) < 0
        || set_heartbeats(engine) < 0 || (is_guarded(&engine->options) && set_server(engine) < 0))
        return PCCL_EZMQ;
    return PCCL_OK;
}

/* Whether both texts are keys, or both are empty. */
static bool are_keys(const char *public_key, const char *secret)
{
    size_t n = public_key[0] == '\0' ? 0 : PCCL_KEY_CHARS;
    return memchr(public_key, 0, n + 1) == public_key + n && memchr(secret, 0, n + 1) == secret + n;
}

/* Gives each module its pointers to the others. */
static void connect_modules(pccl_engine *engine, const pccl_zmq *table,
                            const pccl_options *options)
{
    engine->options = *options;
    engine->events.zmq = table;
    engine->zap.events = &engine->events;
    engine->zap.options = &engine->options;
    engine->streams.events = &engine->events;
    engine->streams.options = &engine->options;
    engine->ops.events = &engine->events;
    engine->ops.options = &engine->options;
    engine->ops.streams = &engine->streams;
}

pccl_engine *pccl_engine_new(const pccl_zmq *table, const pccl_options *options, int *error)
{
    pccl_engine *engine = NULL;
    *error = PCCL_EINVAL;
    if (options->io_threads == 0 || options->forward_max == 0 || options->recv_hwm == 0
        || options->fetch_window == 0 || options->connect_timeout_ms == 0
        || !are_keys(options->curve_public, options->curve_secret)
        || memchr(options->dialler, 0, sizeof options->dialler) == NULL)
        return NULL;
    *error = PCCL_ENOMEM;
    engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return NULL;
    connect_modules(engine, table, options);
    engine->inbox = packet_new();
    if (engine->inbox != NULL)
        *error = open_sockets(engine);
    if (*error == PCCL_OK)
        return engine;
    pccl_engine_free(engine);
    return NULL;
}

int pccl_engine_bind(pccl_engine *engine, const char *endpoint, char *bound, size_t size)
{
    const pccl_zmq *zmq = engine->events.zmq;
    int ipv6 = strchr(endpoint, '[') != NULL;
    if (zmq->setsockopt(engine->pull, ZMQ_IPV6, &ipv6, sizeof ipv6) < 0
        || zmq->bind(engine->pull, endpoint) < 0
        || zmq->getsockopt(engine->pull, ZMQ_LAST_ENDPOINT, bound, &size) < 0) {
        engine->events.error = zmq->errno_();
        return PCCL_EZMQ;
    }
    return PCCL_OK;
}

void *pccl_engine_context(pccl_engine *engine)
{
    return engine->context;
}

int pccl_engine_errno(const pccl_engine *engine)
{
    return engine->events.error;
}

uint64_t pccl_engine_dropped(const pccl_engine *engine)
{
    return engine->dropped + engine->ops.dropped;
}

/* Closes the lost streams, and tells the ops. Returns whether there were any. */
static bool close_lost_streams(pccl_engine *engine)
{
    struct stream *stream;
    bool any = false;
    while ((stream = streams_take_lost(&engine->streams)) != NULL) {
        ops_lose_stream(&engine->ops, stream);
        stream_free(stream);
        any = true;
    }
    return any;
}

void pccl_engine_free(pccl_engine *engine)
{
    const pccl_zmq *zmq;
    struct stream *stream;
    if (engine == NULL)
        return;
    zmq = engine->events.zmq;
    for (stream = engine->streams.first; stream != NULL; stream = stream->next) {
        stream->silent = true;
        stream_lose(stream, PCCL_ESTREAM, "the engine is freed");
    }
    (void)close_lost_streams(engine);
    if (engine->pull != NULL)
        (void)zmq->close(engine->pull);
    zap_close(&engine->zap);
    if (engine->events.socket != NULL)
        (void)zmq->close(engine->events.socket);
    /* Waits until libzmq has released every message. */
    if (engine->context != NULL)
        while (zmq->ctx_term(engine->context) < 0 && zmq->errno_() == EINTR)
            continue;
    ops_free(&engine->ops);
    if (engine->inbox != NULL)
        packet_free(zmq, engine->inbox);
    free(engine->items);
    free(engine->watched);
    free(engine);
}

/* ---- commands ---- */

static void dispatch(pccl_engine *engine, const pccl_command *command)
{
    switch (command->kind) {
    case PCCL_OPEN_STREAM:
        streams_command_open(&engine->streams, command);
        break;
    case PCCL_CONNECT_STREAM:
        streams_command_connect(&engine->streams, command);
        break;
    case PCCL_LOSE_STREAM:
        streams_command_lose(&engine->streams, command);
        break;
    case PCCL_CLOSE_STREAM:
        streams_command_close(&engine->streams, command);
        break;
    case PCCL_MEET:
        engine->dropped += !stream_meet(engine->events.zmq, engine->pull, command);
        break;
    case PCCL_EXPECT:
        zap_command_expect(&engine->zap, command);
        ops_expect(&engine->ops, command);
        break;
    case PCCL_ADMIT:
        zap_command_admit(&engine->zap, command);
        break;
    case PCCL_REGISTER:
        ops_register(&engine->ops, op_kind_numbered(command->op_kind), command);
        break;
    case PCCL_EAGER:
        ops_eager(&engine->ops, command);
        break;
    case PCCL_START:
        ops_start(&engine->ops, command);
        break;
    case PCCL_VERIFIED:
    case PCCL_ALLOW:
    case PCCL_REMIND:
    case PCCL_READY:
        ops_command(&engine->ops, command);
        break;
    case PCCL_QUERY:
        ops_query(&engine->ops, command);
        break;
    case PCCL_COMMIT:
    case PCCL_ABORT:
        ops_end(&engine->ops, command);
        break;
    case PCCL_STOP:
        engine->stopped = true;
        break;
    default:
        engine->dropped++;
    }
}

/* Receives one message and dispatches its commands. Returns whether there was one. */
static bool take_command(pccl_engine *engine)
{
    const pccl_zmq *zmq = engine->events.zmq;
    size_t at, size;
    pccl_command command;
    pccl_msg message;
    bool got;
    zmq->msg_init(&message);
    got = zmq->msg_recv(&message, engine->events.socket, ZMQ_DONTWAIT) >= 0;
    if (!got) {
        int error = zmq->errno_();
        if (error != EAGAIN && error != EINTR) {
            engine->events.error = error;
            events_stop(&engine->events, PCCL_EZMQ);
        }
    }
    size = got ? zmq->msg_size(&message) : 0;
    for (at = 0; at + sizeof command <= size && !engine->stopped; at += sizeof command) {
        memcpy(&command, (const unsigned char *)zmq->msg_data(&message) + at, sizeof command);
        dispatch(engine, &command);
    }
    engine->dropped += size % sizeof command != 0;
    (void)zmq->msg_close(&message);
    return got;
}

static bool take_commands(pccl_engine *engine)
{
    int batch = COMMAND_BATCH;
    bool any = false;
    while (batch-- > 0 && !engine->stopped && take_command(engine))
        any = true;
    return any;
}

/* ---- messages ---- */

/* Gives the message in the inbox to its op. */
static void deliver(pccl_engine *engine)
{
    const pccl_zmq *zmq = engine->events.zmq;
    struct packet *inbox = engine->inbox;
    const struct op_kind *kind;
    struct wire_header header;
    struct op *op;
    if (inbox->frames == 0 || !wire_decode(&header, packet_header(zmq, inbox))) {
        engine->dropped++;
        return;
    }
    kind = op_kind_taking(header.kind);
    /* The caller sent REGISTER before the vote that let the neighbor send this message, so
     * REGISTER is here by now; but it may have come after this pass looked for commands. */
    do
        op = ops_find(&engine->ops, kind, header.run, header.tag);
    while (op == NULL && take_commands(engine));
    ops_take(&engine->ops, op, &header, &engine->inbox);
}

/* Whether to receive. The members of one ring may stop receiving while many messages wait to be
 * sent on: that cannot deadlock (pccl_core.h, THE RING). With several rings it can: one member is
 * full of messages for its successor in the first ring, that successor is full of messages for its
 * own successor in the second ring, and so on around a circle. */
static bool has_room(const pccl_engine *engine)
{
    const struct backlog *backlog = &engine->ops.backlog;
    return engine->ops.n_spread > 0
        || (backlog->packets < engine->options.forward_max && backlog->bytes < FORWARD_BYTES);
}

static bool receive(pccl_engine *engine)
{
    int batch = RECEIVE_BATCH, got;
    uint64_t bytes = 0;
    bool any = false;
    while (batch-- > 0 && bytes < RECEIVE_BYTES && has_room(engine)) {
        got = packet_receive(&engine->events, engine->pull, engine->inbox);
        if (got < 0)
            events_stop(&engine->events, got);
        if (got <= 0)
            break;
        bytes += engine->inbox->bytes;
        deliver(engine);
        packet_clear(engine->events.zmq, engine->inbox);
        any = true;
    }
    return any;
}

/* ---- the loop ---- */

int pccl_engine_step(pccl_engine *engine)
{
    struct stream *stream;
    bool moved;
    engine->events.emitted = false;
    moved = take_commands(engine);
    if (engine->stopped)
        return 2;
    moved |= receive(engine);
    for (stream = engine->streams.first; stream != NULL; stream = stream->next)
        moved |= stream_pump(stream);
    moved |= ops_settle(&engine->ops);
    if (!moved || ++engine->passes % LISTEN_INTERVAL == 0) {
        moved |= streams_listen(&engine->streams);
        moved |= zap_answer(&engine->zap);
    }
    moved |= close_lost_streams(engine);
    moved |= engine->events.emitted;     /* sending has used the socket of commands: look again */
    return engine->events.status < 0 ? engine->events.status : moved;
}

/* Allocates room to watch `n` sockets: 0 or PCCL_ENOMEM. */
static int reserve_items(pccl_engine *engine, size_t n)
{
    pccl_pollitem *items;
    void **watched;
    if (n <= engine->items_room)
        return PCCL_OK;
    items = realloc(engine->items, 2 * n * sizeof *items);
    if (items != NULL)
        engine->items = items;
    watched = realloc(engine->watched, 2 * n * sizeof *watched);
    if (watched != NULL)
        engine->watched = watched;
    if (items == NULL || watched == NULL)
        return PCCL_ENOMEM;
    engine->items_room = 2 * n;
    return PCCL_OK;
}

/* Adds a socket to the descriptors to wait for. Returns whether it has a descriptor. */
static bool watch(pccl_engine *engine, int *n, void *socket)
{
    pccl_pollitem *item = &engine->items[*n];
    size_t size = sizeof item->fd;
    memset(item, 0, sizeof *item);
    item->events = ZMQ_POLLIN;
    engine->watched[(*n)++] = socket;
    return engine->events.zmq->getsockopt(socket, ZMQ_FD, &item->fd, &size) == 0;
}

/* Adds all sockets to the descriptors to wait for. Returns their number, or -1. */
static int watch_all(pccl_engine *engine)
{
    struct stream *stream;
    int n = 0;
    bool all = watch(engine, &n, engine->events.socket);
    if (engine->zap.socket != NULL)
        all &= watch(engine, &n, engine->zap.socket);
    if (has_room(engine))
        all &= watch(engine, &n, engine->pull);
    for (stream = engine->streams.first; stream != NULL; stream = stream->next) {
        if (stream->push == NULL)
            continue;
        all &= watch(engine, &n, stream->monitor);
        if (stream_pending(stream))
            all &= watch(engine, &n, stream->push);
    }
    return all ? n : -1;
}

/* Lets each socket whose descriptor is ready process its events. Returns whether all succeeded. */
static bool take_note(pccl_engine *engine, int n)
{
    bool all = true;
    int i, events;
    for (i = 0; i < n; i++) {
        size_t size = sizeof events;
        if (engine->items[i].revents != 0)
            all &= engine->events.zmq->getsockopt(engine->watched[i], ZMQ_EVENTS, &events, &size)
                == 0;
    }
    return all;
}

/* Waits until there may be work: 0 or an error. */
static int wait_for_work(pccl_engine *engine)
{
    const pccl_zmq *zmq = engine->events.zmq;
    long patience_ms = ops_await_release(&engine->ops) ? RELEASE_WAIT_MS : -1;
    struct stream *stream;
    size_t room = 3;
    int n;
    for (stream = engine->streams.first; stream != NULL; stream = stream->next)
        room += 2;
    if (reserve_items(engine, room) != PCCL_OK)
        return PCCL_ENOMEM;
    n = watch_all(engine);
    if (n < 0 || zmq->poll(engine->items, n, patience_ms) < 0 || !take_note(engine, n)) {
        int error = zmq->errno_();
        if (n < 0 || error != EINTR) {
            engine->events.error = error;
            return PCCL_EZMQ;
        }
    }
    return PCCL_OK;
}

int pccl_engine_run(pccl_engine *engine)
{
    for (;;) {
        int moved = pccl_engine_step(engine);
        if (moved == 2)
            return PCCL_OK;
        if (moved == 0)
            moved = wait_for_work(engine);
        if (moved < 0)
            return moved;
    }
}
