/* zap.h - decides who may connect to the engine's PULL socket (pccl_core.h, WHO MAY CONNECT).
 * libzmq asks over ZAP (ZeroMQ RFC 27), in messages over inproc, before it accepts anything else
 * from a connection. */
#ifndef PCCL_ZAP_H
#define PCCL_ZAP_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/events.h"

enum {
    ZAP_TEXT_MAX = 24,       /* bytes of a name or password, padded with zeros */
    ZAP_WAITING_MAX = 64     /* requests that cannot be decided yet */
};

/* A request of a connection, with its credentials. */
struct zap_request {
    size_t route_size, number_size;
    unsigned char route[16], number[16];    /* where to send the reply */
    char name[49];           /* PLAIN: the user name */
    char secret[49];         /* PLAIN: the password; CURVE: the public key */
};

struct zap {
    struct events *events;
    const pccl_options *options;
    void *socket;            /* NULL: anyone may connect */
    char name[ZAP_TEXT_MAX];                /* our user name; empty: not known yet */
    char passwords[2][ZAP_TEXT_MAX];        /* of this epoch and of the previous one */
    char (*keys)[PCCL_KEY_CHARS];           /* public keys that may connect */
    size_t n_keys, keys_room;
    struct zap_request waiting[ZAP_WAITING_MAX];
    size_t n_waiting;
};

/* Opens the socket on which the context authenticates connections: 0 or PCCL_EZMQ. */
int zap_open(struct zap *zap, void *context);
void zap_close(struct zap *zap);

/* Answers all requests that can be decided. Returns whether there were requests. */
bool zap_answer(struct zap *zap);

/* EXPECT and ADMIT. */
void zap_command_expect(struct zap *zap, const pccl_command *command);
void zap_command_admit(struct zap *zap, const pccl_command *command);

/* The PLAIN user name and password of a connection to a peer: up to ZAP_TEXT_MAX bytes each. */
void zap_name(uint64_t peer, char *text);
void zap_password(uint64_t nonce, char *text);

#endif
