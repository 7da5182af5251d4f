/* stream.h - a stream to a neighbour, and the flows that take turns at sending on it. */
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

/* The outcome of a flow's turn: it has more to send; it has no more for now; the stream has no
 * room; its source has failed and has given up the turn already. */
enum turn { TURN_MORE, TURN_OVER, TURN_BLOCKED, TURN_FAILED };

/* What an op sends on one stream. */
struct flow {
    struct source *source;
    struct stream *stream;   /* NULL: lost, or not needed */
    enum turn (*send)(struct flow *flow);       /* uses a turn */
    bool urgent;             /* its turns come before those of flows that are not */
    bool in_turn;
    struct flow *next;       /* in the stream's turns */
    uint32_t index;          /* among the source's flows */
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
    uint32_t standing;       /* handshakes that have succeeded */
    uint32_t port;           /* to which they connect; 0: none of TCP */
    uint32_t coming;         /* of those that were opened while it runs, those that do not stand */
    uint32_t denied;         /* of these, those that are about to be disconnected */
    bool automatic;          /* how many lanes is left to us */
    bool measured;           /* by the round trip, which is known */
    struct lanes running;    /* over a long link: those that stand */
    bool distant;            /* its round trip is not that of a local network */
    bool up;                 /* a lane has stood */
    uint64_t eager;          /* bytes (eager_cost) sent before START, of ops that have had none */
    void *push, *monitor;    /* NULL until CONNECT_STREAM */
    bool blocked;            /* the last send found no lane with room */
    bool lost;               /* to be closed at the end of the pass */
    bool silent;             /* closed by command: no STREAM_LOST */
    int status;              /* why it is lost */
    uint64_t peer;           /* whom it is to reach */
    char text[PCCL_TEXT_MAX];
    char endpoint[PCCL_ENDPOINT_MAX];
    struct packets forwards; /* received, to be sent on: before anything else */
    struct turns urgent, others;
};

/* All streams of an engine. */
struct streams {
    struct events *events;
    const pccl_options *options;
    void *context;
    struct stream *first;
};

/* OPEN_STREAM, CONNECT_STREAM, CLOSE_STREAM and LOSE_STREAM. */
void streams_command_open(struct streams *streams, const pccl_command *command);
void streams_command_connect(struct streams *streams, const pccl_command *command);
void streams_command_lose(struct streams *streams, const pccl_command *command);
void streams_command_close(struct streams *streams, const pccl_command *command);

/* MEET: the receiver's side of a stream to which nobody can connect. False: it cannot. */
bool stream_meet(const pccl_zmq *zmq, void *pull, const pccl_command *command);

/* The open stream of that number, or NULL. */
struct stream *streams_find(struct streams *streams, uint32_t number);

/* Handles the monitor events of all streams. Whether there were any. */
bool streams_listen(struct streams *streams);

/* Takes a stream that is lost off the list, or NULL: closes its sockets, drops what waits there to
 * be sent on, and emits STREAM_LOST. The caller takes the flows off it and then frees it. */
struct stream *streams_take_lost(struct streams *streams);
void stream_free(struct stream *stream);

/* Marks a stream lost, for the first reason that is given. Cannot fail. */
void stream_lose(struct stream *stream, int status, const char *format, ...) PRINTF_LIKE(3, 4);

/* Whether a message could be sent now. It asks the socket, for those whose message would be costly
 * to build in vain. */
bool stream_has_room(struct stream *stream);

/* Sends a message of `source` now, which empties the packet, or says BLOCKED and leaves it. */
enum sent stream_send(struct stream *stream, struct source *source, struct packet *packet);

/* How many more bytes may be sent before START. */
uint64_t stream_credit(const struct stream *stream);

/* Puts a flow in the turns of its stream, if it has one and is not there. Cannot fail. */
void flow_request_turn(struct flow *flow);

/* Drops all that a source waits to send on a stream. Cannot fail. */
void stream_drop(struct stream *stream, const struct source *source);

/* Sends what there is to send and room for. Whether anything moved. */
bool stream_pump(struct stream *stream);

/* Whether anything waits to be sent: whether it is worth waiting for room. */
bool stream_pending(const struct stream *stream);

/* The bytes of a chunk on that stream, where `chunk` are asked for. */
uint64_t stream_chunk(const struct stream *stream, uint64_t chunk);

#endif
