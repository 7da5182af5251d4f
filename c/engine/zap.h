/* zap.h - who may connect to the engine's PULL socket (pccl_core.h, WHO MAY CONNECT). libzmq asks
 * by ZAP (ZeroMQ RFC 27), in messages over inproc, before it accepts anything else from a
 * connection. */
#ifndef PCCL_ZAP_H
#define PCCL_ZAP_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/events.h"

enum {
    ZAP_TEXT_MAX = 24,       /* bytes of a name or password, padded with zeros */
    ZAP_WAITING_MAX = 64     /* connections that cannot be decided on yet */
};

/* A connection that asks: whom it wants to reach, and with what credentials. */
struct zap_request {
    size_t route_size, number_size;
    unsigned char route[16], number[16];    /* of the question, for its answer */
    char name[49];           /* PLAIN */
    char secret[49];         /* PLAIN: the password; CURVE: the public key */
};

struct zap {
    struct events *events;
    const pccl_options *options;
    void *socket;            /* NULL: whoever wants may connect */
    char name[ZAP_TEXT_MAX];                /* ours; empty: not known yet */
    char passwords[2][ZAP_TEXT_MAX];        /* of this epoch and of the one before */
    char (*keys)[PCCL_KEY_CHARS];           /* of those who may connect */
    size_t n_keys, keys_room;
    struct zap_request waiting[ZAP_WAITING_MAX];
    size_t n_waiting;
};

/* Becomes the context's authenticator: 0 or PCCL_EZMQ. Ends that. */
int zap_open(struct zap *zap, void *context);
void zap_close(struct zap *zap);

/* Answers all requests that can be decided. Whether any came. */
bool zap_answer(struct zap *zap);

/* EXPECT and ADMIT. */
void zap_command_expect(struct zap *zap, const pccl_command *command);
void zap_command_admit(struct zap *zap, const pccl_command *command);

/* The user name and password by which a stream says whom it wants to reach: ZAP_TEXT_MAX bytes. */
void zap_name(uint64_t peer, char *text);
void zap_password(uint64_t nonce, char *text);

#endif
