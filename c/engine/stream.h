/* stream.h - a stream to a neighbor, and the flows that take turns at sending on it. */
#ifndef PCCL_STREAM_H
#define PCCL_STREAM_H

#include <stdbool.h>

#include "engine/events.h"
#include "engine/lanes.h"
#include "engine/packet.h"

#if defined __GNUC__
#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))
#else
#define PRINTF_LIKE(text, first)
#endif

enum sent { SENT, BLOCKED };

/* The outcome of a flow's turn. */
enum turn {
    TURN_MORE,               /* it has more to send */
    TURN_OVER,               /* it has no more to send for now */
    TURN_BLOCKED,            /* the stream has no room */
    TURN_FAILED              /* its op has failed, which has ended the turn already */
};

/* The messages of an op on one stream. */
struct flow {
    struct source *source;
    struct stream *stream;   /* NULL: lost, or not needed */
    enum turn (*send)(struct flow *flow);       /* uses a turn */
    bool urgent;             /* its turns come before those of flows that are not */
    bool in_turn;
    struct flow *next;       /* in the stream's turns */
    uint32_t index;          /* among the source's flows */
    struct flow *around;     /* takes over if the stream is lost before it has carried anything;
                              * NULL: then the op fails */
    bool used;               /* the stream has carried something; set only if there is `around` */
};

/* Flows that have something to send, in turn. */
struct turns {
    struct flow *head, *tail;
};

struct stream {
    struct stream *next;
    struct streams *streams;
    uint32_t number;
    uint32_t lanes, lanes_failed;
    uint32_t shares;         /* streams that send at the same time as this one, itself included */
    uint32_t standing;       /* handshakes that have succeeded */
    uint32_t port;           /* TCP port that the lanes connect to; 0: they are not TCP */
    uint32_t coming;         /* lanes that were opened later and are not connected yet */
    uint32_t denied;         /* those of them that were refused and will be disconnected */
    uint32_t learned;        /* lanes that an earlier stream to the peer had; 0: none, or opened */
    bool automatic;          /* the engine chooses the number of lanes */
    bool measured;           /* it has chosen it, from the round trip */
    struct lanes running;    /* over a long link: the connected lanes */
    bool distant;            /* the peer is not in the local network: the round trip is long */
    bool up;                 /* a lane has been connected */
    uint64_t eager;          /* bytes (eager_cost) that ops have sent here without a START yet */
    void *push, *monitor;    /* NULL until CONNECT_STREAM */
    bool blocked;            /* the last send found no lane with room */
    bool lost;               /* it is closed at the end of the pass */
    bool silent;             /* closed by command: no STREAM_LOST */
    int status;              /* why it is lost: a pccl_error, */
    char text[PCCL_TEXT_MAX];    /* and in words */
    uint64_t peer;           /* number of the peer to reach */
    char endpoint[PCCL_ENDPOINT_MAX];
    struct packets forwards; /* received messages to be sent on, before all others */
    struct turns urgent, others;
};

enum { LEARNED_MAX = 16 };    /* peers */

/* All streams of an engine. */
struct streams {
    struct events *events;
    const pccl_options *options;
    void *context;
    struct stream *first;
    struct { uint64_t peer; uint32_t lanes; } learned[LEARNED_MAX];  /* of streams that are closed */
    uint32_t learnt_next;    /* the oldest */
};

/* OPEN_STREAM, CONNECT_STREAM, CLOSE_STREAM and LOSE_STREAM. */
void streams_command_open(struct streams *streams, const pccl_command *command);
void streams_command_connect(struct streams *streams, const pccl_command *command);
void streams_command_lose(struct streams *streams, const pccl_command *command);
void streams_command_close(struct streams *streams, const pccl_command *command);

/* MEET: connects the PULL socket to a rendezvous point. False if it cannot. */
bool stream_meet(const pccl_zmq *zmq, void *pull, const pccl_command *command);

/* The open stream with that number, or NULL. */
struct stream *streams_find(struct streams *streams, uint32_t number);

/* Handles the monitor events of all streams. Returns whether there were any. */
bool streams_listen(struct streams *streams);

/* Removes a lost stream from the list: closes its sockets, drops its forwards, and emits
 * STREAM_LOST. The caller must take the flows off it and then free it. NULL: no stream is lost. */
struct stream *streams_take_lost(struct streams *streams);
void stream_free(struct stream *stream);

/* Marks a stream lost; only the first reason counts. Cannot fail. */
void stream_lose(struct stream *stream, int status, const char *format, ...) PRINTF_LIKE(3, 4);

/* Whether a message could be sent now. Asking the socket pays if the message is costly to build. */
bool stream_has_room(struct stream *stream);

/* Sends a message of `source` and empties the packet; or returns BLOCKED and leaves the packet. */
enum sent stream_send(struct stream *stream, struct source *source, struct packet *packet);

/* Whether a chunk of that cost may be sent before START. */
bool stream_lends(const struct stream *stream, uint64_t cost);

/* Queues a flow for a turn on its stream, if it has a stream and is not queued. Cannot fail. */
void flow_request_turn(struct flow *flow);

/* Drops everything that a source has to send on a stream. Cannot fail. */
void stream_drop(struct stream *stream, const struct source *source);

/* Sends what waits, as far as there is room. Returns whether anything moved. */
bool stream_pump(struct stream *stream);

/* Whether anything waits to be sent. */
bool stream_pending(const struct stream *stream);

/* The size of a chunk on that stream in bytes, if START asks for `chunk`. */
uint64_t stream_chunk(const struct stream *stream, uint64_t chunk);

#endif
