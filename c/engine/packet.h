/* packet.h - messages of one or two frames, and who may not go away while they are under way. */
#ifndef PCCL_PACKET_H
#define PCCL_PACKET_H

#include <stdbool.h>

#include "engine/events.h"
#include "engine/wire.h"

/* Packets that wait to be sent on, of all sources together. */
struct backlog {
    uint32_t packets;
    uint64_t bytes;          /* of payload that is memory of their own */
};

/* Whose memory packets refer to. It must stay until source_is_idle(). */
struct source {
    const pccl_zmq *zmq;
    struct backlog *backlog;
    uint32_t copy_max;       /* bytes: a payload up to this size is copied */
    uint32_t pending;        /* packets and flows (stream.h) of it that wait to send */
    void *references;        /* libzmq's counter of messages that refer to its memory. NULL: there
                              * has never been one */
    uint64_t tx_bytes;       /* of payload that was sent */
};

/* A message that has come in or waits to be sent: header and payload in one frame or in two. */
struct packet {
    struct packet *next;
    struct source *source;   /* while it waits */
    uint64_t bytes;          /* of payload */
    uint64_t held;           /* of payload that counts in the backlog while it waits */
    bool refers;             /* the payload is memory of its source */
    int frames;              /* how many of `frame` are open */
    pccl_msg frame[2];
};

/* A FIFO of packets. */
struct packets {
    struct packet *head, *tail;
};

/* Whether ZeroMQ still refers to memory of the source. */
bool source_is_referred(const struct source *source);

/* Whether besides nothing of it waits to be sent. */
bool source_is_idle(const struct source *source);

/* Frees what a source, which is idle, has allocated. Cannot fail. */
void source_free(struct source *source);

/* A new empty packet, or NULL without memory. */
struct packet *packet_new(void);

/* Closes the frames of a packet, which is then empty. Cannot fail. */
void packet_clear(const pccl_zmq *zmq, struct packet *packet);

/* Clears and frees a packet. Cannot fail. */
void packet_free(const pccl_zmq *zmq, struct packet *packet);

/* Receives a message from a socket into an empty packet: 1; 0 when there is none; PCCL_EZMQ on
 * failure. A message that cannot be a header with its payload leaves the packet empty and gives
 * 1. */
int packet_receive(struct events *events, void *socket, struct packet *packet);

/* Makes an empty packet the message of `header` and the `bytes` bytes at `data`. Few bytes are
 * copied; many are referred to, and `source` counts the reference. 0 or PCCL_ENOMEM. */
int packet_build(struct source *source, struct packet *packet, const struct wire_header *header,
                 const void *data, uint64_t bytes);

/* The same for `bytes` bytes of payload that the caller is about to write. */
int packet_reserve(struct source *source, struct packet *packet, const struct wire_header *header,
                   uint64_t bytes);

/* The payload of a packet that is not empty, and its encoded header. */
unsigned char *packet_payload(const pccl_zmq *zmq, struct packet *packet);
unsigned char *packet_header(const pccl_zmq *zmq, struct packet *packet);

/* Counts a packet of `source` among those that wait to be sent on; takes it back. */
void packet_await(struct source *source, struct packet *packet);
void packet_unawait(struct packet *packet);

/* Appends a packet; takes the first, or NULL. */
void packets_append(struct packets *queue, struct packet *packet);
struct packet *packets_take(struct packets *queue);

/* Drops the waiting packets of a source; NULL: of all. */
void packets_drop(const pccl_zmq *zmq, struct packets *queue, const struct source *source);

#endif
