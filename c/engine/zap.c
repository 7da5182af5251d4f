/* zap.c - see zap.h.
 *
 * The engine's thread answers, because it never waits for the interpreter: otherwise a peer whose
 * interpreter is busy for long would look unreachable. */
#include "engine/zap.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zmq/zmqdefs.h"

static const char ZAP_ENDPOINT[] = "inproc://zeromq.zap.01";    /* given by the RFC */
static const char ZAP_VERSION[] = "1.0";
static const char DIALLER[] = "dial";    /* the master's user name */

/* The frames of a request. */
enum {
    AT_ROUTE = 0, AT_NUMBER = 3, AT_MECHANISM = 7, AT_CREDENTIALS = 8, FRAMES = 10,
    FRAME_MAX = 48       /* most bytes of a frame that are read */
};

struct frame {
    size_t size;         /* may exceed FRAME_MAX; then the request is refused */
    unsigned char data[FRAME_MAX + 1];
};

enum decision { ALLOWED, REFUSED, UNDECIDED };

/* ---- credentials ---- */

/* Whether `a`, which was received, is our secret `b`, in constant time. An empty `b` is a secret
 * that we do not have yet, and equals nothing. */
static bool is_same(const char *a, const char *b, size_t size)
{
    unsigned difference = 0;
    size_t i;
    for (i = 0; i < size; i++)
        difference |= (unsigned char)a[i] ^ (unsigned char)b[i];
    return difference == 0 && b[0] != '\0';
}

void zap_name(uint64_t peer, char *text)
{
    (void)snprintf(text, ZAP_TEXT_MAX, "%" PRIu64, peer);
}

void zap_password(uint64_t nonce, char *text)
{
    (void)snprintf(text, ZAP_TEXT_MAX, "%016" PRIx64, nonce);
}

/* The text of a CURVE key of 32 bytes, in Z85 (ZeroMQ RFC 32). */
static void encode_key(const unsigned char *key, char *text)
{
    static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                 ".-:+=^!/*?&<>()[]{}@%$#";
    int word, i;
    for (word = 0; word < PCCL_KEY_CHARS / 5; word++) {
        uint32_t value = 0;
        for (i = 0; i < 4; i++)
            value = value << 8 | key[4 * word + i];
        for (i = 4; i >= 0; i--) {
            text[5 * word + i] = digits[value % 85];
            value /= 85;
        }
    }
    text[PCCL_KEY_CHARS] = '\0';
}

static enum decision decide_key(const struct zap *zap, const char *key)
{
    size_t i;
    if (is_same(key, zap->options->dialler, PCCL_KEY_CHARS))
        return ALLOWED;
    for (i = 0; i < zap->n_keys; i++)
        if (is_same(key, zap->keys[i], PCCL_KEY_CHARS))
            return ALLOWED;
    return UNDECIDED;
}

/* A connection to another peer is refused at once. One to us with an unknown password may know a
 * later epoch than we do, so it waits. */
static enum decision decide_password(const struct zap *zap, const char *name,
                                     const char *password)
{
    if (strcmp(name, DIALLER) == 0)
        return is_same(password, zap->options->dialler, PCCL_KEY_CHARS) ? ALLOWED : REFUSED;
    if (zap->name[0] == '\0')
        return UNDECIDED;
    if (strcmp(name, zap->name) != 0)
        return REFUSED;
    if (is_same(password, zap->passwords[0], ZAP_TEXT_MAX)
        || is_same(password, zap->passwords[1], ZAP_TEXT_MAX))
        return ALLOWED;
    return UNDECIDED;
}

static enum decision decide(const struct zap *zap, const struct zap_request *request)
{
    if (zap->options->curve_secret[0] != '\0')
        return decide_key(zap, request->secret);
    return decide_password(zap, request->name, request->secret);
}

/* ---- messages ---- */

/* Receives a request and keeps at most FRAMES frames. Returns the number that it has, or 0 if there
 * is not a request. */
static int receive_frames(struct zap *zap, struct frame *frames)
{
    const pccl_zmq *zmq = zap->events->zmq;
    bool more = true;
    int n = 0;
    memset(frames, 0, FRAMES * sizeof *frames);
    while (more) {
        pccl_msg message;
        zmq->msg_init(&message);
        if (zmq->msg_recv(&message, zap->socket, ZMQ_DONTWAIT) < 0) {
            (void)zmq->msg_close(&message);
            return 0;
        }
        more = zmq->msg_more(&message);
        if (n < FRAMES) {
            size_t size = zmq->msg_size(&message);
            frames[n].size = size;
            memcpy(frames[n].data, zmq->msg_data(&message), size < FRAME_MAX ? size : FRAME_MAX);
        }
        n++;
        (void)zmq->msg_close(&message);
    }
    return n;
}

/* Reads where to send the reply to a request; false if that is impossible. */
static bool read_sender(const struct frame *frames, int n, struct zap_request *request)
{
    memset(request, 0, sizeof *request);
    if (n <= AT_NUMBER || frames[AT_ROUTE].size > sizeof request->route
        || frames[AT_NUMBER].size > sizeof request->number)
        return false;
    request->route_size = frames[AT_ROUTE].size;
    memcpy(request->route, frames[AT_ROUTE].data, request->route_size);
    request->number_size = frames[AT_NUMBER].size;
    memcpy(request->number, frames[AT_NUMBER].data, request->number_size);
    return true;
}

/* Reads the credentials of a request; false if they are not of this engine's mechanism. */
static bool read_credentials(const struct zap *zap, const struct frame *frames, int n,
                         struct zap_request *request)
{
    bool curve = zap->options->curve_secret[0] != '\0';
    const char *mechanism = curve ? "CURVE" : "PLAIN";
    const struct frame *credentials = &frames[AT_CREDENTIALS];
    if (n != AT_CREDENTIALS + (curve ? 1 : 2)
        || strcmp((const char *)frames[AT_MECHANISM].data, mechanism) != 0
        || credentials[0].size > FRAME_MAX || credentials[1].size > FRAME_MAX)
        return false;
    if (curve) {
        encode_key(credentials[0].data, request->secret);
        return credentials[0].size == PCCL_KEY_CHARS / 5 * 4;
    }
    memcpy(request->name, credentials[0].data, credentials[0].size);
    memcpy(request->secret, credentials[1].data, credentials[1].size);
    return true;
}

static void send_frame(struct zap *zap, const void *data, size_t size, bool more)
{
    const pccl_zmq *zmq = zap->events->zmq;
    pccl_msg message;
    if (zmq->msg_init_size(&message, size) < 0) {
        events_stop(zap->events, PCCL_ENOMEM);
        return;
    }
    memcpy(zmq->msg_data(&message), data, size);
    if (zmq->msg_send(&message, zap->socket, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0)) < 0)
        (void)zmq->msg_close(&message);     /* the connection has hung up meanwhile */
}

static void reply(struct zap *zap, const struct zap_request *request, bool allowed)
{
    const char *status = allowed ? "200" : "400", *text = allowed ? "OK" : "not allowed";
    send_frame(zap, request->route, request->route_size, true);
    send_frame(zap, "", 0, true);
    send_frame(zap, ZAP_VERSION, sizeof ZAP_VERSION - 1, true);
    send_frame(zap, request->number, request->number_size, true);
    send_frame(zap, status, strlen(status), true);
    send_frame(zap, text, strlen(text), true);
    send_frame(zap, "", 0, true);
    send_frame(zap, "", 0, false);
}

/* ---- requests ---- */

/* Replies to waiting requests that can be decided now. The others keep waiting. */
static void decide_waiting(struct zap *zap)
{
    size_t i, kept = 0;
    for (i = 0; i < zap->n_waiting; i++) {
        enum decision decision = decide(zap, &zap->waiting[i]);
        if (decision == UNDECIDED)
            zap->waiting[kept++] = zap->waiting[i];
        else
            reply(zap, &zap->waiting[i], decision == ALLOWED);
    }
    zap->n_waiting = kept;
}

/* Keeps a request until it can be decided. If there are too many, the oldest one gets no reply: a
 * refusal would mean that another peer is here. */
static void await(struct zap *zap, const struct zap_request *request)
{
    if (zap->n_waiting == ZAP_WAITING_MAX)
        memmove(&zap->waiting[0], &zap->waiting[1], --zap->n_waiting * sizeof zap->waiting[0]);
    zap->waiting[zap->n_waiting++] = *request;
}

bool zap_answer(struct zap *zap)
{
    struct frame frames[FRAMES];
    bool any = false;
    int n;
    while (zap->socket != NULL && (n = receive_frames(zap, frames)) > 0) {
        struct zap_request request;
        enum decision decision;
        any = true;
        if (!read_sender(frames, n, &request))
            continue;
        decision = read_credentials(zap, frames, n, &request) ? decide(zap, &request) : REFUSED;
        if (decision == UNDECIDED)
            await(zap, &request);
        else
            reply(zap, &request, decision == ALLOWED);
    }
    return any;
}

/* ---- commands ---- */

void zap_command_expect(struct zap *zap, const pccl_command *command)
{
    memcpy(zap->passwords[1], zap->passwords[0], sizeof zap->passwords[1]);
    memset(zap->name, 0, sizeof zap->name);
    memset(zap->passwords[0], 0, sizeof zap->passwords[0]);
    zap_name(command->peer, zap->name);
    zap_password(command->nonce, zap->passwords[0]);
    zap->n_keys = 0;
    decide_waiting(zap);
}

void zap_command_admit(struct zap *zap, const pccl_command *command)
{
    if (zap->n_keys == zap->keys_room) {
        size_t room = 2 * zap->keys_room + 8;
        char (*keys)[PCCL_KEY_CHARS] = realloc(zap->keys, room * sizeof *keys);
        if (keys == NULL) {
            events_stop(zap->events, PCCL_ENOMEM);
            return;
        }
        zap->keys = keys;
        zap->keys_room = room;
    }
    memcpy(zap->keys[zap->n_keys++], command->curve_server, PCCL_KEY_CHARS);
    decide_waiting(zap);
}

/* ---- beginning and end ---- */

int zap_open(struct zap *zap, void *context)
{
    const pccl_zmq *zmq = zap->events->zmq;
    int zero = 0;
    zap->socket = zmq->socket(context, ZMQ_ROUTER);
    if (zap->socket == NULL
        || zmq->setsockopt(zap->socket, ZMQ_LINGER, &zero, sizeof zero) < 0
        || zmq->bind(zap->socket, ZAP_ENDPOINT) < 0)
        return PCCL_EZMQ;
    return PCCL_OK;
}

void zap_close(struct zap *zap)
{
    if (zap->socket != NULL)
        (void)zap->events->zmq->close(zap->socket);
    free(zap->keys);
}
