/* stream.c - see stream.h. A stream is one PUSH socket with several connections, the lanes, to one
 * neighbor.
 *
 * libzmq gives each message to a lane that has room, so a slow lane carries less and delays no
 * other. A lost lane may have swallowed messages, so a stream that loses a lane is lost as a whole
 * and never repaired. The socket's monitor reports lost lanes. Lanes that are opened later, because
 * lanes.c asks for them, carry nothing before they are connected, so they may fail. No clock is
 * needed here: libzmq does the heartbeats and the timeouts of connects and handshakes, and the
 * caller gives up streams that do not come up. The neighbor sends the heartbeats and says how long
 * the next one may take (engine.c): a ping of ours would queue behind all the data that the
 * neighbor has not received yet, which may take long if its own link is slow.
 *
 * Order of sending: first forwards, then requests and data, then our own chunks. Requests, data and
 * own chunks are built only when it is their turn. After a send that found no room the stream waits
 * until the socket reports room, because a send that fails looks at the socket's state only now and
 * then. */
#include "engine/stream.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/transport.h"
#include "engine/unexpected.h"
#include "engine/zap.h"
#include "zmq/zmqdefs.h"

enum {
    PUMP_BATCH = 16,         /* messages in one pass, so that receiving keeps its share */
    DISTANT_US = 1000,       /* a local network has shorter round trips */
    /* before START, as eager_cost() counts: 1 MiB in chunks of 32 to 512 KiB, because copying more,
     * or one larger chunk, takes longer than the vote */
    NEAR_CREDIT = (1 << 20) + 32 * EAGER_COST,
    LANES_UNKNOWN = 8,       /* if the round trip is not known */
    LANES_MAX = 16,          /* at first: more do not help on a link without losses */
    LANES_MEETING = 8,       /* at a rendezvous point, where both sides must know the number */
    LANE_US = 7000           /* round trip for each additional lane: see choose_lanes() */
};

/* ---- opening and closing ---- */

static const pccl_zmq *table(const struct stream *stream)
{
    return stream->streams->events->zmq;
}

struct stream *streams_find(struct streams *streams, uint32_t number)
{
    struct stream *stream = streams->first;
    while (stream != NULL && (stream->number != number || stream->lost))
        stream = stream->next;
    return stream;
}

void stream_lose(struct stream *stream, int status, const char *format, ...)
{
    va_list arguments;
    if (stream->lost)
        return;
    stream->lost = true;
    stream->status = status;
    va_start(arguments, format);
    (void)vsnprintf(stream->text, sizeof stream->text, format, arguments);
    va_end(arguments);
}

/* Sets an int option: 0, or -1 as setsockopt. */
static int set_option(struct stream *stream, int option, int value)
{
    return table(stream)->setsockopt(stream->push, option, &value, sizeof value);
}

/* Sets the user name (the peer to reach) and the password: 0, or -1 as setsockopt. */
static int set_plain_client(struct stream *stream, const pccl_command *command)
{
    const pccl_zmq *zmq = table(stream);
    char name[ZAP_TEXT_MAX], password[ZAP_TEXT_MAX];
    int failed;
    zap_name(command->peer, name);
    zap_password(command->nonce, password);
    failed = zmq->setsockopt(stream->push, ZMQ_PLAIN_USERNAME, name, strlen(name));
    failed |= zmq->setsockopt(stream->push, ZMQ_PLAIN_PASSWORD, password, strlen(password));
    return failed;
}

/* Encrypts for the owner of the key in the command: 0, or -1 as setsockopt. */
static int set_curve_client(struct stream *stream, const pccl_command *command)
{
    const pccl_zmq *zmq = table(stream);
    const pccl_options *options = stream->streams->options;
    int failed;
    failed = zmq->setsockopt(stream->push, ZMQ_CURVE_PUBLICKEY, options->curve_public,
                             PCCL_KEY_CHARS);
    failed |= zmq->setsockopt(stream->push, ZMQ_CURVE_SECRETKEY, options->curve_secret,
                              PCCL_KEY_CHARS);
    failed |= zmq->setsockopt(stream->push, ZMQ_CURVE_SERVERKEY, command->curve_server,
                              PCCL_KEY_CHARS);
    return failed;
}

static int set_options(struct stream *stream, const pccl_command *command)
{
    const pccl_options *options = stream->streams->options;
    const char *where = command->via[0] != '\0' ? command->via : command->endpoint;
    int failed = set_option(stream, ZMQ_LINGER, 0);
    failed |= set_option(stream, ZMQ_IMMEDIATE, 1);
    failed |= set_option(stream, ZMQ_RECONNECT_IVL, -1);
    failed |= set_option(stream, ZMQ_SNDHWM, (int)command->hwm);
    failed |= set_option(stream, ZMQ_IPV6, strchr(where, '[') != NULL);
    failed |= set_option(stream, ZMQ_CONNECT_TIMEOUT, (int)options->connect_timeout_ms);
    failed |= set_option(stream, ZMQ_HANDSHAKE_IVL, (int)options->connect_timeout_ms);
    if (options->curve_secret[0] != '\0')
        failed |= set_curve_client(stream, command);
    else if (options->dialler[0] != '\0')
        failed |= set_plain_client(stream, command);
    if (options->heartbeat_ms > 0)
        failed |= set_option(stream, ZMQ_TCP_MAXRT, tcp_unheard_ms(options->heartbeat_timeout_ms));
    if (command->via[0] != '\0')
        failed |= table(stream)->setsockopt(stream->push, ZMQ_SOCKS_PROXY, command->via,
                                            strlen(command->via));
    return failed;
}

/* ---- the most lanes that streams over long links to a peer have had ---- */

static uint32_t recall(const struct streams *streams, uint64_t peer)
{
    uint32_t i;
    for (i = 0; i < LEARNED_MAX; i++)
        if (streams->learned[i].peer == peer)
            return streams->learned[i].lanes;
    return 0;
}

/* Notes the lanes of a stream that closes, if they are more; for a new peer in the oldest place. */
static void learn(struct stream *stream)
{
    struct streams *streams = stream->streams;
    const uint32_t known = recall(streams, stream->peer);
    uint32_t i = 0;
    if (stream->running.n <= known)
        return;
    while (known > 0 && streams->learned[i].peer != stream->peer)
        i++;
    if (known == 0)
        i = streams->learnt_next++ % LEARNED_MAX;
    streams->learned[i].peer = stream->peer;
    streams->learned[i].lanes = stream->running.n;
}

/* Creates the monitor, before the first connect, so that it misses no event: 0 or -1. */
static int open_monitor(struct stream *stream)
{
    const pccl_zmq *zmq = table(stream);
    const int events = ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CLOSED | ZMQ_EVENT_DISCONNECTED
        | ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
    char endpoint[64];
    (void)snprintf(endpoint, sizeof endpoint, "inproc://pccl-monitor-%lu",
                   (unsigned long)stream->number);
    if (zmq->socket_monitor(stream->push, endpoint, events) < 0)
        return -1;
    stream->monitor = zmq->socket(stream->streams->context, ZMQ_PAIR);
    if (stream->monitor == NULL)
        return -1;
    return zmq->connect(stream->monitor, endpoint);
}

static int open_sockets(struct stream *stream, const pccl_command *command)
{
    const pccl_zmq *zmq = table(stream);
    uint32_t lane;
    stream->push = zmq->socket(stream->streams->context, ZMQ_PUSH);
    if (stream->push == NULL || set_options(stream, command) < 0 || open_monitor(stream) < 0)
        return -1;
    for (lane = 0; lane < stream->lanes; lane++)
        if (zmq->connect(stream->push, command->endpoint) < 0)
            return -1;
    return 0;
}

static uint32_t lanes_requested(const pccl_command *command)
{
    return command->lanes != 0 ? command->lanes : LANES_MEETING;
}

void streams_command_open(struct streams *streams, const pccl_command *command)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        events_stop(streams->events, PCCL_ENOMEM);
        return;
    }
    stream->streams = streams;
    stream->number = command->stream;
    stream->next = streams->first;
    streams->first = stream;
}

void streams_command_connect(struct streams *streams, const pccl_command *command)
{
    struct stream *stream = streams_find(streams, command->stream);
    if (stream == NULL)
        return;
    if (stream->push != NULL) {
        stream_lose(stream, PCCL_EINVAL, "CONNECT_STREAM twice");
        return;
    }
    stream->peer = command->peer;
    stream->distant = command->via[0] != '\0';
    stream->automatic = command->lanes == 0 && !stream->distant;
    stream->shares = command->shares > 0 ? command->shares : 1;
    stream->lanes = stream->automatic ? 1 : lanes_requested(command);
    stream->learned = recall(streams, command->peer);
    memcpy(stream->endpoint, command->endpoint, sizeof stream->endpoint);
    if (command->hwm == 0 || memchr(command->endpoint, 0, sizeof command->endpoint) == NULL
        || memchr(command->via, 0, sizeof command->via) == NULL) {
        stream_lose(stream, PCCL_EINVAL, "a stream needs a high-water mark and an endpoint");
        return;
    }
    stream->port = tcp_port(command->via[0] != '\0' ? command->via : command->endpoint);
    if (open_sockets(stream, command) < 0) {
        int error = table(stream)->errno_();
        streams->events->error = error;
        stream_lose(stream, PCCL_EZMQ, "cannot open a stream to %.80s: %.40s", command->endpoint,
                    strerror(error));
    }
}

void streams_command_lose(struct streams *streams, const pccl_command *command)
{
    struct stream *stream = streams_find(streams, command->stream);
    if (stream != NULL && memchr(command->endpoint, 0, sizeof command->endpoint) != NULL)
        stream_lose(stream, PCCL_EREACH, "%s", command->endpoint);
}

void streams_command_close(struct streams *streams, const pccl_command *command)
{
    struct stream *stream = streams_find(streams, command->stream);
    if (stream == NULL)
        return;
    stream->silent = true;
    stream_lose(stream, PCCL_ESTREAM, "closed by command");
}

/* The monitor goes first: libzmq may crash when a monitored socket is closed under its monitor. */
static void close_sockets(struct stream *stream)
{
    const pccl_zmq *zmq = table(stream);
    if (stream->push != NULL)
        (void)zmq->socket_monitor(stream->push, NULL, 0);
    if (stream->monitor != NULL) {
        int zero = 0;
        (void)zmq->setsockopt(stream->monitor, ZMQ_LINGER, &zero, sizeof zero);
        (void)zmq->close(stream->monitor);
    }
    if (stream->push != NULL)
        (void)zmq->close(stream->push);
}

static void notify_up(struct stream *stream)
{
    pccl_event event = {0};
    if (stream->up)
        return;
    stream->up = true;
    event.kind = PCCL_STREAM_UP;
    event.stream = stream->number;
    (void)events_emit(stream->streams->events, &event);
}

static void notify_lost(struct stream *stream)
{
    pccl_event event = {0};
    if (stream->silent)
        return;
    event.kind = PCCL_STREAM_LOST;
    event.status = stream->status;
    event.stream = stream->number;
    memcpy(event.text, stream->text, sizeof event.text);
    (void)events_emit(stream->streams->events, &event);
}

struct stream *streams_take_lost(struct streams *streams)
{
    struct stream **at = &streams->first, *stream;
    while ((stream = *at) != NULL && !stream->lost)
        at = &stream->next;
    if (stream == NULL)
        return NULL;
    *at = stream->next;
    learn(stream);
    close_sockets(stream);
    packets_drop(table(stream), &stream->forwards, NULL);
    notify_lost(stream);
    return stream;
}

void stream_free(struct stream *stream)
{
    assert(!stream_pending(stream));
    free(stream);
}

/* Reconnecting is off: a connection ends when its sender's does, and a new one would find no
 * partner at the rendezvous point. */
bool stream_meet(const pccl_zmq *zmq, void *pull, const pccl_command *command)
{
    uint32_t lane, lanes = lanes_requested(command);
    int never = -1, ipv6 = command->via[0] == '[';
    if (memchr(command->endpoint, 0, sizeof command->endpoint) == NULL
        || memchr(command->via, 0, sizeof command->via) == NULL || command->via[0] == '\0'
        || zmq->setsockopt(pull, ZMQ_RECONNECT_IVL, &never, sizeof never) < 0
        || zmq->setsockopt(pull, ZMQ_IPV6, &ipv6, sizeof ipv6) < 0
        || zmq->setsockopt(pull, ZMQ_SOCKS_PROXY, command->via, strlen(command->via)) < 0)
        return false;
    for (lane = 0; lane < lanes; lane++)
        if (zmq->connect(pull, command->endpoint) < 0)
            return false;
    return true;
}

/* ---- monitors ---- */

/* A link with a longer round trip needs more lanes to be full: the kernel's buffers limit the
 * window of a connection, which starts small and grows again after each loss and each pause. */
static uint32_t choose_lanes(uint32_t round_trip_us)
{
    uint32_t lanes = 1 + round_trip_us / LANE_US + (round_trip_us >= DISTANT_US);
    if (round_trip_us == 0)
        return LANES_UNKNOWN;
    return lanes < LANES_MAX ? lanes : LANES_MAX;
}

/* Opens lanes until there are `wanted`, if the engine chooses their number: 0, or -1 as connect. */
static int open_lanes(struct stream *stream, uint32_t wanted)
{
    while (stream->automatic && stream->lanes < wanted) {
        if (table(stream)->connect(stream->push, stream->endpoint) < 0)
            return -1;
        stream->lanes++;
    }
    return 0;
}

/* Handles a new connection. It may be closed already, and its descriptor belong to another one. */
static void greet_lane(struct stream *stream, int fd)
{
    struct tcp_connection connection;
    bool known = tcp_know(fd, stream->port, &connection);
    uint32_t round_trip_us = known ? tcp_round_trip_us(&connection) : 0, wanted;
    ipc_prepare(fd, stream->endpoint);
    if (round_trip_us >= DISTANT_US) {
        stream->distant = true;
        tcp_prepare_distant(&connection);
        lanes_add(&stream->running, &connection);
    }
    wanted = (choose_lanes(round_trip_us) + stream->shares - 1) / stream->shares;
    if (!stream->measured && open_lanes(stream, wanted) < 0)
        stream_lose(stream, PCCL_EZMQ, "cannot open one more lane: %.60s",
                    strerror(table(stream)->errno_()));
    stream->measured = true;
}

uint64_t stream_chunk(const struct stream *stream, uint64_t chunk)
{
    return stream->distant ? lanes_chunk(&stream->running, chunk) : chunk;
}

/* Looks at the lanes, and opens more if they are needed, or were by an earlier stream. If that
 * fails, the stream keeps those that it has. */
static void tend_lanes(struct stream *stream)
{
    uint32_t more = lanes_look(&stream->running), had = stream->lanes;
    if (stream->learned > had)
        more = stream->learned - had;
    if (more == 0 || stream->coming > 0 || stream->standing + stream->lanes_failed < had)
        return;                  /* a handshake under way could be that of an older lane */
    stream->learned = 0;
    if (open_lanes(stream, had + more) < 0)
        stream->automatic = false;
    stream->coming = stream->lanes - had;
}

/* Handles a later lane that does not come up. Nothing was sent on it, so the stream goes on. */
static void forgo_lane(struct stream *stream, uint16_t event)
{
    stream->coming--;
    stream->lanes_failed++;
    stream->denied += event != ZMQ_EVENT_CLOSED;
    stream->automatic = false;
}

bool stream_lends(const struct stream *stream, uint64_t cost)
{
    uint64_t most = stream->distant ? EAGER_MAX : NEAR_CREDIT;
    return cost <= most / 2 && stream->eager + cost <= most;
}

/* Whether a failed handshake shows that another process answers: it refuses because it is not the
 * peer that we want, or hangs up because it does not have the key that we have encrypted for, or
 * uses another protocol. (A peer that has just ended may look like that, too; a slow one does
 * not.) */
static bool is_another(uint16_t event, int32_t value)
{
    return event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH || event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL
        || (event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL && value == EPIPE);
}

/* Handles a lane that does not come up, or is lost. */
static void fail_lane(struct stream *stream, uint16_t event, int32_t value)
{
    if (is_another(event, value))
        stream_lose(stream, PCCL_EOTHER, "another process answers at %.80s, not peer %llu: check "
                    "the port forwarding", stream->endpoint, (unsigned long long)stream->peer);
    else if (event != ZMQ_EVENT_CLOSED)
        stream_lose(stream, stream->up ? PCCL_ESTREAM : PCCL_EREACH, "%s",
                    event == ZMQ_EVENT_DISCONNECTED
                    ? "a lane was disconnected" : "a lane could not be set up: handshake failed");
    else if (++stream->lanes_failed == stream->lanes)   /* the others may still carry everything */
        stream_lose(stream, PCCL_EREACH, "no lane could be connected: refused or timed out");
}

/* An event frame is a 16-bit event and a 32-bit value in native byte order; the endpoint follows
 * in a second frame. */
static void handle_monitor(struct stream *stream, const unsigned char *data, size_t size)
{
    uint16_t event;
    int32_t value;
    if (size < sizeof event + sizeof value)
        return;
    memcpy(&event, data, sizeof event);
    memcpy(&value, data + sizeof event, sizeof value);
    if (event == ZMQ_EVENT_CONNECTED) {
        greet_lane(stream, value);
    } else if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
        stream->standing++;
        stream->coming -= stream->coming > 0;
        notify_up(stream);
    } else if (event == ZMQ_EVENT_DISCONNECTED && stream->denied > 0) {
        stream->denied--;
        lanes_drop(&stream->running, value);
    } else if (event != ZMQ_EVENT_DISCONNECTED && stream->coming > 0) {
        forgo_lane(stream, event);
    } else {
        fail_lane(stream, event, value);
    }
}

static bool listen_one(struct stream *stream)
{
    const pccl_zmq *zmq = table(stream);
    pccl_msg frame;
    bool any = false, first = true;
    while (stream->monitor != NULL && !stream->lost) {
        zmq->msg_init(&frame);
        if (zmq->msg_recv(&frame, stream->monitor, ZMQ_DONTWAIT) < 0) {
            int error = zmq->errno_();
            zmq->msg_close(&frame);
            if (error != EAGAIN && error != EINTR)
                stream_lose(stream, PCCL_EZMQ, "the monitor failed: %.60s", strerror(error));
            break;
        }
        if (first)
            handle_monitor(stream, zmq->msg_data(&frame), zmq->msg_size(&frame));
        first = !zmq->msg_more(&frame);
        zmq->msg_close(&frame);
        any = true;
    }
    return any;
}

bool streams_listen(struct streams *streams)
{
    struct stream *stream;
    bool any = false;
    for (stream = streams->first; stream != NULL; stream = stream->next)
        any |= listen_one(stream);
    return any;
}

/* ---- sending ---- */

enum sent stream_send(struct stream *stream, struct source *source, struct packet *packet)
{
    const pccl_zmq *zmq = table(stream);
    int i = 0, error;
    assert(packet->frames > 0);
    if (stream->lost || stream->blocked || stream->push == NULL)
        return BLOCKED;
    while (i < packet->frames) {
        int more = i + 1 < packet->frames ? ZMQ_SNDMORE : 0;
        if (zmq->msg_send(&packet->frame[i], stream->push, ZMQ_DONTWAIT | more) >= 0) {
            i++;
            continue;
        }
        error = zmq->errno_();
        if (error == EINTR)
            continue;
        if (error == EAGAIN && i == 0) {
            stream->blocked = true;
            return BLOCKED;
        }
        stream->streams->events->error = error;
        if (error == EAGAIN)     /* a second frame always has room, unless its lane is lost */
            stream_lose(stream, PCCL_ESTREAM, "a lane was disconnected in the middle of a message");
        else
            stream_lose(stream, PCCL_EZMQ, "a lane failed while sending: %.60s", strerror(error));
        return BLOCKED;
    }
    source->tx_bytes += packet->bytes;
    if (stream->running.n > 0 && lanes_count(&stream->running, packet->bytes))
        tend_lanes(stream);
    packet_clear(zmq, packet);
    return SENT;
}

static struct turns *turns_of(const struct flow *flow)
{
    return flow->urgent ? &flow->stream->urgent : &flow->stream->others;
}

void flow_request_turn(struct flow *flow)
{
    struct turns *turns;
    if (flow->in_turn || flow->stream == NULL)
        return;
    turns = turns_of(flow);
    flow->next = NULL;
    if (turns->tail != NULL)
        turns->tail->next = flow;
    else
        turns->head = flow;
    turns->tail = flow;
    flow->in_turn = true;
    flow->source->pending++;
}

/* Takes the first flow out of its turns. */
static void end_turn(struct turns *turns)
{
    struct flow *flow = turns->head;
    turns->head = flow->next;
    if (turns->head == NULL)
        turns->tail = NULL;
    flow->next = NULL;
    flow->in_turn = false;
    assert(flow->source->pending > 0);
    flow->source->pending--;
}

/* Takes the flows of a source out of the turns. The others keep their order. */
static void drop_turns(struct turns *turns, const struct source *source)
{
    struct flow *all = turns->head, *flow;
    struct turns kept = {NULL, NULL};
    while ((flow = all) != NULL) {
        all = flow->next;
        flow->next = NULL;
        if (flow->source == source) {
            flow->in_turn = false;
            flow->source->pending--;
            continue;
        }
        if (kept.tail != NULL)
            kept.tail->next = flow;
        else
            kept.head = flow;
        kept.tail = flow;
    }
    *turns = kept;
}

void stream_drop(struct stream *stream, const struct source *source)
{
    packets_drop(table(stream), &stream->forwards, source);
    drop_turns(&stream->urgent, source);
    drop_turns(&stream->others, source);
}

/* Gives the first flow its turn. Returns whether anything moved. */
static bool pump_turns(struct turns *turns)
{
    struct flow *flow = turns->head;
    switch (flow->send(flow)) {
    case TURN_MORE:
        end_turn(turns);
        flow_request_turn(flow);
        return true;
    case TURN_OVER:
        end_turn(turns);
        return true;
    case TURN_BLOCKED:
    case TURN_FAILED:        /* the failed op has taken its flows out */
        return false;
    }
    return false;
}

static bool pump_forwards(struct stream *stream)
{
    struct packet *packet = stream->forwards.head;
    if (stream_send(stream, packet->source, packet) == BLOCKED)
        return false;
    (void)packets_take(&stream->forwards);
    packet_unawait(packet);
    packet_free(table(stream), packet);
    return true;
}

bool stream_pending(const struct stream *stream)
{
    return stream->forwards.head != NULL || stream->urgent.head != NULL
        || stream->others.head != NULL;
}

bool stream_has_room(struct stream *stream)
{
    int events = 0;
    size_t size = sizeof events;
    if (stream->lost || stream->push == NULL)
        return false;
    if (table(stream)->getsockopt(stream->push, ZMQ_EVENTS, &events, &size) < 0)
        return false;
    return (events & ZMQ_POLLOUT) != 0;
}

bool stream_pump(struct stream *stream)
{
    int batch = PUMP_BATCH;
    bool any = false;
    if (stream->lost || stream->push == NULL || !stream_pending(stream))
        return false;
    if (stream->blocked && !stream_has_room(stream))
        return false;
    stream->blocked = false;
    while (batch-- > 0 && !stream->lost && !stream->blocked && stream_pending(stream)) {
        if (stream->forwards.head != NULL)
            any |= pump_forwards(stream);
        else if (stream->urgent.head != NULL)
            any |= pump_turns(&stream->urgent);
        else
            any |= pump_turns(&stream->others);
    }
    return any;
}
