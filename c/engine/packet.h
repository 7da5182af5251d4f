/* packet.h - messages of one or two frames, and the sources whose memory they refer to. */
#ifndef PCCL_PACKET_H
#define PCCL_PACKET_H

#include <stdbool.h>

#include "engine/events.h"
#include "engine/wire.h"

/* The packets of all sources that wait to be sent on. */
struct backlog {
    uint32_t packets;
    uint64_t bytes;          /* of payload in the packets' own memory */
};

/* The owner of memory that packets refer to. It must stay until source_is_idle(). */
struct source {
    const pccl_zmq *zmq;
    struct backlog *backlog;
    uint32_t copy_max;       /* bytes: payloads up to this size are copied */
    uint32_t pending;        /* its packets and flows (stream.h) that wait to send */
    void *references;        /* libzmq's counter of messages that refer to its memory; NULL: no
                              * message ever has */
    uint64_t tx_bytes;       /* of payload that was sent */
};

/* A message that was received or waits to be sent: header and payload in one frame or in two. */
struct packet {
    struct packet *next;
    struct source *source;   /* while it waits */
    uint64_t bytes;          /* of payload */
    uint64_t held;           /* of payload that count in the backlog while it waits */
    bool refers;             /* the payload is memory of its source */
    int frames;              /* number of open frames */
    pccl_msg frame[2];
};

/* A FIFO of packets. */
struct packets {
    struct packet *head, *tail;
};

/* Whether ZeroMQ still refers to memory of the source. */
bool source_is_referred(const struct source *source);

/* Whether nothing of the source waits to be sent, and ZeroMQ refers to none of its memory. */
bool source_is_idle(const struct source *source);

/* Frees the memory of an idle source. Cannot fail. */
void source_free(struct source *source);

/* A new empty packet, or NULL without memory. */
struct packet *packet_new(void);

/* Empties a packet: closes its frames. Cannot fail. */
void packet_clear(const pccl_zmq *zmq, struct packet *packet);

/* Clears and frees a packet. Cannot fail. */
void packet_free(const pccl_zmq *zmq, struct packet *packet);

/* Receives a message from a socket into an empty packet. Returns 1, 0 if there is no message, or
 * PCCL_EZMQ. A message with impossible frames leaves the packet empty and gives 1. */
int packet_receive(struct events *events, void *socket, struct packet *packet);

/* Builds a message in an empty packet, of `header` and the `bytes` bytes at `data`. A small payload
 * is copied; the packet refers to a large one, and `source` counts the reference. Returns 0 or
 * PCCL_ENOMEM. */
int packet_build(struct source *source, struct packet *packet, const struct wire_header *header,
                 const void *data, uint64_t bytes);

/* Builds a message in an empty packet, with room for `bytes` bytes of payload, which the caller
 * writes. Returns 0 or PCCL_ENOMEM. */
int packet_reserve(struct source *source, struct packet *packet, const struct wire_header *header,
                   uint64_t bytes);

/* The payload of a packet that is not empty, and its encoded header. */
unsigned char *packet_payload(const pccl_zmq *zmq, struct packet *packet);
unsigned char *packet_header(const pccl_zmq *zmq, struct packet *packet);

/* Counts a packet of `source` as waiting to be sent on, and stops counting it. */
void packet_await(struct source *source, struct packet *packet);
void packet_unawait(struct packet *packet);

/* Appends a packet, and takes the first one (NULL: there is none). */
void packets_append(struct packets *queue, struct packet *packet);
struct packet *packets_take(struct packets *queue);

/* Drops the waiting packets of a source, or of all sources (NULL). */
void packets_drop(const pccl_zmq *zmq, struct packets *queue, const struct source *source);

#endif
