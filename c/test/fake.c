/* fake.c - see fake.h. A socket is a struct with queues; a lane is a queue that a PUSH owns and a
 * PULL reads. */
#include "fake.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zmq/zmqdefs.h"

enum { FRAMES_MAX = 4, SOCKETS_MAX = 256, LANES_MAX = 64, NAME_MAX_BYTES = 64, RELEASE_ONE_IN = 4 };

struct message {
    struct message *next;
    int n, taken;                    /* number of frames, and of those already received */
    pccl_msg frame[FRAMES_MAX];
};

struct queue {
    struct message *head, *tail;
    int n;
};

struct socket;

struct lane {
    struct socket *to;               /* NULL: not connected, or cut */
    char endpoint[NAME_MAX_BYTES];
    bool up, stalled;
    int fd;
    struct queue queue;
};

struct socket {
    void *context;
    int type, hwm;
    char bound[NAME_MAX_BYTES];
    struct socket *peer;             /* PAIR */
    struct queue in;                 /* PAIR; PULL: injected messages */
    struct lane lanes[LANES_MAX];    /* PUSH */
    int n_lanes;
    struct message *partial;         /* first frames sent, or last frames not yet received */
    int partial_lane;
    struct socket *monitor;
};

static struct {
    uint64_t state;
    struct socket *sockets[SOCKETS_MAX];
    unsigned n_sockets, n_contexts, n_names;
    unsigned refuse_percent;
    int fail_call, fail_second, deny, linger, n_descriptors;
    int fail_step, step_error;
    bool step_failed;
    unsigned n_delivered;            /* messages that lanes have delivered */
    struct queue graveyard;          /* messages that have arrived and are not released yet */
} world;

/* ---- random numbers, queues ---- */

uint32_t fake_random(uint32_t bound)
{
    world.state ^= world.state << 13;
    world.state ^= world.state >> 7;
    world.state ^= world.state << 17;
    return (uint32_t)((world.state >> 32) % bound);
}

static void append(struct queue *queue, struct message *message)
{
    message->next = NULL;
    if (queue->tail != NULL)
        queue->tail->next = message;
    else
        queue->head = message;
    queue->tail = message;
    queue->n++;
}

static struct message *take(struct queue *queue)
{
    struct message *message = queue->head;
    if (message == NULL)
        return NULL;
    queue->head = message->next;
    if (queue->head == NULL)
        queue->tail = NULL;
    queue->n--;
    return message;
}

static void destroy(struct message *message)
{
    int i;
    for (i = 0; i < message->n; i++)
        fake_table()->msg_close(&message->frame[i]);
    free(message);
}

static void bury(struct queue *queue)
{
    struct message *message;
    while ((message = take(queue)) != NULL)
        append(&world.graveyard, message);
}

volatile bool fake_allocates;

/* Zeroed memory for the fake itself. */
static void *new_block(size_t size)
{
    void *block;
    fake_allocates = true;
    block = calloc(1, size);
    fake_allocates = false;
    if (block == NULL)
        abort();
    return block;
}

static struct message *new_message(void)
{
    return new_block(sizeof(struct message));
}

static void free_block(void *data, void *hint)
{
    (void)hint;
    free(data);
}

/* Appends a frame with a copy of the bytes to a message. */
static void add_frame(struct message *message, const void *data, size_t size)
{
    void *block = new_block(size + 1);
    assert(message->n < FRAMES_MAX);
    if (size > 0)
        memcpy(block, data, size);
    if (message->n > 0)
        pccl_plain_set_more(&message->frame[message->n - 1], 1);
    (void)fake_table()->msg_init_data(&message->frame[message->n++], block, size, free_block, NULL);
}

volatile bool fake_in_step;

/* Whether this call must fail (fake_fail_in_step). Sets errno. */
static bool fails_in_step(void)
{
    if (!fake_in_step || world.fail_step < 0 || world.fail_step-- > 0)
        return false;
    errno = world.step_error;
    world.step_failed = true;
    return true;
}

static bool should_fail(void)
{
    return world.fail_call >= 0 && world.fail_call-- == 0;
}

static int fail(int error)
{
    errno = error;
    return -1;
}

/* ---- contexts and sockets ---- */

static void *ctx_new(void)
{
    if (should_fail())
        return NULL;
    world.n_contexts++;
    return malloc(1);
}

static int ctx_set(void *context, int option, int value)
{
    (void)context;
    (void)option;
    (void)value;
    return should_fail() ? fail(EINVAL) : 0;
}

static int ctx_term(void *context)
{
    struct message *message;
    unsigned i;
    for (i = 0; i < world.n_sockets; i++)
        if (world.sockets[i]->context == context)
            abort();                 /* libzmq would wait forever */
    while ((message = take(&world.graveyard)) != NULL)
        destroy(message);
    world.n_contexts--;
    free(context);
    return 0;
}

static struct socket *add_socket(void *context, int type)
{
    struct socket *socket = new_block(sizeof *socket);
    assert(world.n_sockets < SOCKETS_MAX);
    socket->context = context;
    socket->type = type;
    socket->hwm = 1000;
    world.sockets[world.n_sockets++] = socket;
    return socket;
}

static void *open_socket(void *context, int type)
{
    return fails_in_step() || should_fail() ? NULL : add_socket(context, type);
}

static struct socket *find_bound(const void *context, const char *name)
{
    bool local = strncmp(name, "inproc://", 9) == 0;
    unsigned i;
    for (i = 0; i < world.n_sockets; i++)
        if (strcmp(world.sockets[i]->bound, name) == 0
            && (!local || world.sockets[i]->context == context))
            return world.sockets[i];
    return NULL;
}

static void notify(const struct socket *push, uint16_t event, const struct lane *lane)
{
    unsigned char frame[6];
    const int32_t value = lane->fd;
    struct message *message;
    if (push->monitor == NULL || push->monitor->peer == NULL)
        return;
    message = new_message();
    memcpy(frame, &event, sizeof event);
    memcpy(frame + sizeof event, &value, sizeof value);
    add_frame(message, frame, sizeof frame);
    add_frame(message, lane->endpoint, strlen(lane->endpoint));
    append(&push->monitor->peer->in, message);
}

static void cut(struct socket *push, struct lane *lane)
{
    lane->up = false;
    lane->to = NULL;
    bury(&lane->queue);
    notify(push, ZMQ_EVENT_DISCONNECTED, lane);
}

/* Cuts the lanes that lead to a socket. */
static void cut_lanes_to(const struct socket *pull)
{
    unsigned i;
    int j;
    for (i = 0; i < world.n_sockets; i++)
        for (j = 0; j < world.sockets[i]->n_lanes; j++)
            if (world.sockets[i]->lanes[j].to == pull)
                cut(world.sockets[i], &world.sockets[i]->lanes[j]);
}

static int close_socket(void *handle)
{
    struct socket *socket = handle;
    unsigned i;
    int j;
    assert(socket->monitor == NULL);     /* the monitor must be stopped first */
    cut_lanes_to(socket);
    for (j = 0; j < socket->n_lanes; j++)
        bury(&socket->lanes[j].queue);
    bury(&socket->in);
    if (socket->partial != NULL)
        append(&world.graveyard, socket->partial);
    if (socket->peer != NULL)
        socket->peer->peer = NULL;
    for (i = 0; world.sockets[i] != socket; i++)
        continue;
    world.sockets[i] = world.sockets[--world.n_sockets];
    free(socket);
    return 0;
}

static int set_option(void *handle, int option, const void *value, size_t size)
{
    struct socket *socket = handle;
    if (fails_in_step())
        return -1;
    if (should_fail())
        return fail(EINVAL);
    if (option == ZMQ_SNDHWM) {
        assert(size == sizeof(int));
        memcpy(&socket->hwm, value, sizeof(int));
    }
    return 0;
}

static bool has_room(const struct socket *push, int lane)
{
    return push->lanes[lane].up && push->lanes[lane].queue.n < push->hwm;
}

static int get_option(void *handle, int option, void *value, size_t *size)
{
    const struct socket *socket = handle;
    int events = 0, i;
    if (fails_in_step())
        return -1;
    if (option == ZMQ_LAST_ENDPOINT) {
        *size = strlen(socket->bound) + 1;
        memcpy(value, socket->bound, *size);
        return 0;
    }
    assert(option == ZMQ_EVENTS && socket->type == ZMQ_PUSH);
    for (i = 0; i < socket->n_lanes; i++)
        if (has_room(socket, i))
            events = ZMQ_POLLOUT;
    memcpy(value, &events, sizeof events);
    return 0;
}

static int bind_socket(void *handle, const char *endpoint)
{
    struct socket *socket = handle;
    if (should_fail())
        return fail(EADDRINUSE);
    if (strchr(endpoint, '*') != NULL)
        (void)snprintf(socket->bound, sizeof socket->bound, "tcp://fake:%u", ++world.n_names);
    else
        (void)snprintf(socket->bound, sizeof socket->bound, "%s", endpoint);
    return 0;
}

static int connect_socket(void *handle, const char *endpoint)
{
    struct socket *socket = handle, *to = find_bound(socket->context, endpoint);
    struct lane *lane;
    if (fails_in_step())
        return -1;
    if (should_fail())
        return fail(EINVAL);
    if (socket->type == ZMQ_PAIR) {
        assert(to != NULL && to->peer == NULL);
        socket->peer = to;
        to->peer = socket;
        return 0;
    }
    assert(socket->type == ZMQ_PUSH && socket->n_lanes < LANES_MAX);
    lane = &socket->lanes[socket->n_lanes++];
    lane->to = to;
    lane->fd = FAKE_DESCRIPTOR + world.n_descriptors++;
    (void)snprintf(lane->endpoint, NAME_MAX_BYTES, "%s", endpoint);
    notify(socket, to != NULL ? ZMQ_EVENT_CONNECTED : ZMQ_EVENT_CLOSED, lane);
    return 0;
}

static int monitor_socket(void *handle, const char *endpoint, int events)
{
    struct socket *socket = handle;
    (void)events;
    if (endpoint == NULL) {
        if (socket->monitor != NULL)
            (void)close_socket(socket->monitor);
        socket->monitor = NULL;
        return 0;
    }
    if (fails_in_step())
        return -1;
    if (should_fail())
        return fail(EINVAL);
    socket->monitor = add_socket(socket->context, ZMQ_PAIR);
    (void)snprintf(socket->monitor->bound, NAME_MAX_BYTES, "%s", endpoint);
    return 0;
}

static int poll_nothing(pccl_pollitem *items, int n, long timeout_ms)
{
    (void)items;
    (void)n;
    (void)timeout_ms;
    abort();                         /* engines of the fake are stepped, never run */
}

/* ---- sending and receiving ---- */

/* A random lane with room, or -1. */
static int pick_lane(const struct socket *push)
{
    int i, n = 0, picked = -1;
    for (i = 0; i < push->n_lanes; i++)
        if (has_room(push, i) && fake_random((uint32_t)++n) == 0)
            picked = i;
    return picked;
}

/* The queue that a first frame goes to, or NULL for EAGAIN. */
static struct queue *pick_queue(struct socket *socket)
{
    if (socket->type == ZMQ_PAIR)
        return socket->peer != NULL ? &socket->peer->in : NULL;
    if (fake_random(100) < world.refuse_percent)
        return NULL;
    socket->partial_lane = pick_lane(socket);
    return socket->partial_lane >= 0 ? &socket->lanes[socket->partial_lane].queue : NULL;
}

static int msg_send(pccl_msg *msg, void *handle, int flags)
{
    struct socket *socket = handle;
    struct message *message = socket->partial;
    int size = (int)fake_table()->msg_size(msg);
    struct queue *queue;
    assert(flags & ZMQ_DONTWAIT);
    if (fails_in_step())
        return -1;
    if (message != NULL && world.fail_second >= 0 && world.fail_second-- == 0) {
        cut(socket, &socket->lanes[socket->partial_lane]);
        append(&world.graveyard, message);
        socket->partial = NULL;
        return fail(EAGAIN);
    }
    queue = message != NULL ? &socket->lanes[socket->partial_lane].queue : pick_queue(socket);
    if (queue == NULL)
        return fail(EAGAIN);
    if (message == NULL)
        message = new_message();
    message->frame[message->n++] = *msg;
    fake_table()->msg_init(msg);
    pccl_plain_set_more(&message->frame[message->n - 1], flags & ZMQ_SNDMORE);
    socket->partial = flags & ZMQ_SNDMORE ? message : NULL;
    if (socket->partial == NULL)
        append(queue, message);
    return size;
}

/* The next message for a PULL, from a lane picked at random, or NULL. */
static struct message *pick_message(struct socket *pull)
{
    struct queue *picked = pull->in.n > 0 ? &pull->in : NULL;
    uint32_t n = picked != NULL;
    unsigned i;
    int j;
    for (i = 0; i < world.n_sockets; i++)
        for (j = 0; j < world.sockets[i]->n_lanes; j++) {
            struct lane *lane = &world.sockets[i]->lanes[j];
            bool any = lane->to == pull && lane->queue.n > 0 && !lane->stalled;
            if (any && fake_random(++n) == 0)
                picked = &lane->queue;
        }
    return picked != NULL ? take(picked) : NULL;
}

/* Delivers a copy of a message, as a network does. The sender's memory is released later. */
static struct message *arrive(struct message *sent)
{
    struct message *message = new_message();
    int i;
    for (i = 0; i < sent->n; i++)
        add_frame(message, fake_table()->msg_data(&sent->frame[i]),
                  fake_table()->msg_size(&sent->frame[i]));
    append(&world.graveyard, sent);
    return message;
}

static int msg_recv(pccl_msg *msg, void *handle, int flags)
{
    struct socket *socket = handle;
    struct message *message = socket->partial;
    assert(flags & ZMQ_DONTWAIT);
    if (fails_in_step())
        return -1;
    if (message == NULL) {
        message = socket->type == ZMQ_PULL ? pick_message(socket) : take(&socket->in);
        if (message == NULL)
            return fail(EAGAIN);
        message = arrive(message);
        world.n_delivered += socket->type == ZMQ_PULL;
    }
    fake_table()->msg_close(msg);
    *msg = message->frame[message->taken];
    fake_table()->msg_init(&message->frame[message->taken++]);
    socket->partial = message->taken < message->n ? message : NULL;
    if (socket->partial == NULL)
        destroy(message);
    return (int)fake_table()->msg_size(msg);
}

static int get_errno(void)
{
    return errno;
}

/* ---- functions for tests ---- */

void fake_reset(uint64_t seed)
{
    assert(world.n_sockets == 0 && world.n_contexts == 0 && world.graveyard.n == 0);
    memset(&world, 0, sizeof world);
    world.state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    world.fail_call = world.fail_second = world.fail_step = -1;
}

const pccl_zmq *fake_table(void)
{
    static pccl_zmq table;
    if (table.ctx_new == NULL) {
        pccl_plain_fill(&table);
        table.ctx_set = ctx_set;
        table.ctx_term = ctx_term;
        table.socket = open_socket;
        table.close = close_socket;
        table.setsockopt = set_option;
        table.getsockopt = get_option;
        table.bind = bind_socket;
        table.connect = connect_socket;
        table.socket_monitor = monitor_socket;
        table.poll = poll_nothing;
        table.msg_send = msg_send;
        table.msg_recv = msg_recv;
        table.errno_ = get_errno;
        table.ctx_new = ctx_new;
    }
    return &table;
}

void fake_fail_in_step(int nth, int error)
{
    world.fail_step = nth;
    world.step_error = error;
    world.step_failed = false;
}

bool fake_failed_in_step(void)
{
    return world.step_failed;
}

void fake_refuse(unsigned percent)
{
    world.refuse_percent = percent;
}

bool fake_tick(void)
{
    struct queue still = {NULL, NULL, 0};
    struct message *message;
    bool waiting = false;
    unsigned i;
    int j;
    while ((message = take(&world.graveyard)) != NULL) {
        if (fake_random(RELEASE_ONE_IN) == 0)
            destroy(message);
        else
            append(&still, message);
    }
    world.graveyard = still;
    for (i = 0; i < world.n_sockets; i++)
        for (j = 0; j < world.sockets[i]->n_lanes; j++) {
            struct lane *lane = &world.sockets[i]->lanes[j];
            if (world.linger > 0 && lane->fd - FAKE_DESCRIPTOR >= world.linger)
                continue;
            if (lane->to != NULL && !lane->up && world.deny > 0) {
                world.deny--;
                notify(world.sockets[i], ZMQ_EVENT_HANDSHAKE_FAILED_AUTH, lane);
                cut(world.sockets[i], lane);
                waiting = true;
            } else if (lane->to != NULL && !lane->up) {
                lane->up = fake_random(2) == 0;
                if (lane->up)
                    notify(world.sockets[i], ZMQ_EVENT_HANDSHAKE_SUCCEEDED, lane);
                waiting = true;
            }
        }
    return waiting || still.n > 0;
}

void fake_linger(int first)
{
    world.linger = first;
}

void fake_deny(int n)
{
    world.deny = n;
}

bool fake_cut(const char *endpoint)
{
    unsigned i;
    int j;
    for (i = 0; i < world.n_sockets; i++)
        for (j = 0; j < world.sockets[i]->n_lanes; j++) {
            struct lane *lane = &world.sockets[i]->lanes[j];
            if (lane->to != NULL && strcmp(lane->endpoint, endpoint) == 0) {
                cut(world.sockets[i], lane);
                return true;
            }
        }
    return false;
}

void fake_stall(const char *endpoint, bool stalled)
{
    unsigned i;
    int j;
    for (i = 0; i < world.n_sockets; i++)
        for (j = 0; j < world.sockets[i]->n_lanes; j++) {
            struct lane *lane = &world.sockets[i]->lanes[j];
            if (lane->to != NULL && strcmp(lane->endpoint, endpoint) == 0) {
                lane->stalled = stalled;
                return;
            }
        }
}

void fake_fail_call(int nth)
{
    world.fail_call = nth;
}

void fake_fail_second_frame(int nth)
{
    world.fail_second = nth;
}

void fake_inject(const char *endpoint, const void *header, size_t header_bytes, const void *payload,
                 size_t payload_bytes)
{
    struct message *message = new_message();
    struct socket *pull = find_bound(NULL, endpoint);
    assert(pull != NULL);
    add_frame(message, header, header_bytes);
    if (payload != NULL)
        add_frame(message, payload, payload_bytes);
    append(&pull->in, message);
}

unsigned fake_open(void)
{
    return world.n_sockets + world.n_contexts;
}

unsigned fake_delivered(void)
{
    return world.n_delivered;
}

unsigned fake_lanes(void)
{
    unsigned i, lanes = 0;
    int j;
    for (i = 0; i < world.n_sockets; i++)
        for (j = 0; j < world.sockets[i]->n_lanes; j++)
            lanes += world.sockets[i]->lanes[j].to != NULL;
    return lanes;
}
