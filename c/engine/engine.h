/* engine.h - what the files of the engine share. Not part of the API.
 *
 * DESIGN
 *
 * engine.c     the loop, orders, events, the PULL socket
 * zap.c        who may connect to it
 * stream.c     streams: sockets, monitors, what is sent when
 * op.c         the life of an op: registered, started, complete, ended, settled
 * collective.c a collective's memory: what lies where, what ABORT restores; its start
 * chunk.c      its chunks: sent, judged, reduced or stored, sent on
 * transfer.c   SERVE: what it answers
 * fetch.c      FETCH: what it asks whom
 * packet.c     messages of one or two frames
 * tcp.c        what is asked of the operating system about a connection
 *
 * Everything runs in the thread that is in pccl_engine_run(), but for release() in packet.c, which
 * libzmq calls from its own threads and which touches nothing but an atomic counter.
 *
 * Two things may not happen in the middle of a pass, as callers up the stack hold pointers. So a
 * stream is only marked lost where that is noticed, and buried at the end of the pass; and an op
 * that fails keeps its memory until its ABORT. An op is freed in op_complete(), op_order_end(),
 * ops_settle() and ops_free() only.
 */
#ifndef PCCL_ENGINE_H
#define PCCL_ENGINE_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pccl.h"
#include "engine/ring.h"
#include "engine/wire.h"
#include "zmq/zmqdefs.h"

#if defined __GNUC__
#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))
#else
#define PRINTF_LIKE(text, first)
#endif

enum {
    INDEX_BUCKETS = 1024,    /* thousands of ops may be outstanding: chains of a few */
    REQUESTS_MAX = 1024,     /* that a SERVE op keeps of one requester, whose window is smaller, */
    UNCLAIMED_MAX = 65536    /* and of all whose slots no START has named yet */
};

struct op;

/* ---- who may connect (zap.c) ---- */

enum {
    ZAP_TEXT_MAX = 24,       /* bytes of a name or password, zeros behind it */
    ZAP_WAITING_MAX = 64     /* connections about which we do not know yet */
};

/* A connection, and whom it says to want, and by what it may. */
struct zap_request {
    size_t route_size, number_size;
    unsigned char route[16], number[16];    /* of the question, for its answer */
    char name[49];           /* PLAIN */
    char secret[49];         /* PLAIN: the password; CURVE: the public key */
};

struct zap {
    void *socket;            /* NULL: whoever wants may connect */
    char name[ZAP_TEXT_MAX];                /* ours; empty: not known yet */
    char passwords[2][ZAP_TEXT_MAX];        /* of this epoch and of the one before */
    char (*keys)[PCCL_KEY_CHARS];           /* of those who may connect */
    size_t n_keys, keys_room;
    struct zap_request waiting[ZAP_WAITING_MAX];
    size_t n_waiting;
};

/* Asks to be asked, and stops: 0 or PCCL_EZMQ. */
int zap_open(pccl_engine *engine);
void zap_close(pccl_engine *engine);

/* Answers what was asked. Whether anything was. */
bool zap_answer(pccl_engine *engine);

/* EXPECT and ADMIT. */
void zap_order_expect(pccl_engine *engine, const pccl_order *order);
void zap_order_admit(pccl_engine *engine, const pccl_order *order);

/* The texts by which a stream says whom it wants, ZAP_TEXT_MAX bytes. */
void zap_name(uint64_t peer, char *text);
void zap_password(uint64_t nonce, char *text);

/* ---- messages (packet.c) ---- */

/* A message that has come in or waits to be sent: header and payload in one frame or in two. */
struct packet {
    struct packet *next;
    struct op *op;           /* whose it is while it waits */
    uint64_t bytes;          /* of payload */
    bool refers;             /* to op's memory: the payload is none of its own */
    uint64_t held;           /* bytes of its own while it waits to be sent on */
    uint8_t ring;            /* of a chunk that waits */
    int frames;              /* so many of `frame` are open */
    pccl_msg frame[2];
};

struct packets {
    struct packet *head, *tail;
};

/* A new empty packet, or NULL without memory. */
struct packet *packet_new(void);

/* Closes the frames of a packet, which is then empty. Cannot fail. */
void packet_clear(const pccl_zmq *zmq, struct packet *packet);

/* Clears and frees a packet. Cannot fail. */
void packet_free(const pccl_zmq *zmq, struct packet *packet);

/* Receives a message into an empty packet: 1; 0 when there is none; PCCL_EZMQ on failure. A message
 * that cannot be a header with its payload leaves the packet empty and gives 1. */
int packet_receive(pccl_engine *engine, struct packet *packet);

/* Makes an empty packet the message of `header` and the `bytes` bytes at `data`, which are copied
 * if there are few, else referred to until op's counter says that they are released. 0 or
 * PCCL_ENOMEM. */
int packet_build(struct op *op, struct packet *packet, const struct wire_header *header,
                 const void *data, uint64_t bytes);

/* The same for `bytes` bytes of payload that the caller is about to write. */
int packet_reserve(struct op *op, struct packet *packet, const struct wire_header *header,
                   uint64_t bytes);

/* The payload of a packet that is not empty, and its encoded header. */
unsigned char *packet_payload(const pccl_zmq *zmq, struct packet *packet);
unsigned char *packet_header(const pccl_zmq *zmq, struct packet *packet);

/* Counts a packet of `op` among those that wait to be sent on; takes it back. */
void packet_await(struct op *op, struct packet *packet);
void packet_unawait(struct op *op, struct packet *packet);

/* A FIFO of packets: append one; take the first, or NULL; move those of `op` to another FIFO. */
void packets_append(struct packets *queue, struct packet *packet);
struct packet *packets_take(struct packets *queue);
void packets_split(struct packets *queue, struct packets *out, const struct op *op);

/* ---- streams (stream.c) ---- */

/* An op's place on a stream: a ring of COLLECTIVE, a requester of SERVE, a holder of FETCH. */
struct link {
    struct op *op;
    struct stream *stream;   /* NULL: lost, or a ring of one */
    struct link *next;       /* in the stream's turns */
    bool in_turn;
    uint32_t index;          /* among the op's links */
    uint32_t members;        /* of the ring */
    uint32_t position;       /* in the ring; SERVE, FETCH: the slot */
    uint32_t root;           /* BROADCAST: its position */
    const uint16_t *ranks;   /* COLLECTIVE: by position; NULL: the positions */
    uint64_t begin, count;   /* COLLECTIVE: the ring's share of a block, offsets */
    uint64_t cursor, end;    /* COLLECTIVE: what is left of our own chunks, offsets */
    struct request *requests, *last_request;    /* SERVE: waiting for an answer, */
    uint32_t n_requests;     /* so many */
    uint32_t outstanding;    /* FETCH: requests under way, */
    uint32_t delivered;      /* and answered lately */
    struct leaf *leaf;       /* FETCH: that nobody else may be asked for, not wholly requested */
    bool silent;             /* FETCH: it did not answer in time; asked if no other does */
};

/* Links that have something to send, in turn. */
struct turns {
    struct link *head, *tail;
};

struct stream {
    struct stream *next;
    pccl_engine *engine;
    uint32_t number;
    uint32_t lanes, lanes_failed;
    bool automatic;          /* more lanes are to come when the round trip is known */
    bool distant;            /* a round trip is DISTANT_US or more */
    bool up;                 /* a lane has stood */
    void *push, *monitor;    /* NULL until CONNECT_STREAM */
    bool blocked;            /* the last send found no lane with room */
    bool lost;               /* to be buried */
    bool silent;             /* closed by order: no STREAM_LOST */
    int status;              /* why lost */
    uint64_t peer;           /* whom we want to reach */
    char text[PCCL_TEXT_MAX];
    char endpoint[PCCL_ENDPOINT_MAX];
    struct packets forwards; /* received, to be sent on: before anything else */
    struct turns transfers;  /* requests and data: before first chunks */
    struct turns collectives; /* chunks of our own */
};

enum sent { SENT, BLOCKED };

/* What came of a link's turn: it has more; it has no more for now; no room; its op has failed. */
enum turn { TURN_MORE, TURN_OVER, TURN_BLOCKED, TURN_FAILED };

/* OPEN_STREAM, CONNECT_STREAM, CLOSE_STREAM and LOSE_STREAM. */
void stream_order_open(pccl_engine *engine, const pccl_order *order);
void stream_order_connect(pccl_engine *engine, const pccl_order *order);
void stream_order_lose(pccl_engine *engine, const pccl_order *order);
void stream_order_close(pccl_engine *engine, const pccl_order *order);

/* The stream of that number that is open, or NULL. */
struct stream *stream_find(pccl_engine *engine, uint32_t number);

/* Marks a stream lost, for the first reason that is given. Cannot fail. */
void stream_lose(struct stream *stream, int status, const char *format, ...) PRINTF_LIKE(3, 4);

/* Whether a message could be sent now. Asks the socket: for who would make one in vain. */
bool stream_has_room(struct stream *stream);

/* Sends a message of `op` now, which empties the packet, or says BLOCKED and leaves it. */
enum sent stream_send(struct stream *stream, struct op *op, struct packet *packet);

/* Puts a link in the turns of its stream, if it has one and is not there. Cannot fail. */
void link_request_turn(struct link *link);

/* Forgets all that an op wants to send on a stream. Cannot fail. */
void stream_drop_op(struct stream *stream, struct op *op);

/* Sends what there is to send and room for. Returns whether anything moved. */
bool stream_pump(struct stream *stream);

/* Whether anything waits to be sent: whether it is worth waiting for room. */
bool stream_pending(const struct stream *stream);

/* Handles monitor events of all streams; closes streams that are lost. Whether there were any. */
bool streams_listen(pccl_engine *engine);
bool streams_bury(pccl_engine *engine);

/* The bytes of a chunk on that stream, where `chunk` are asked for. */
uint64_t stream_chunk(const struct stream *stream, uint64_t chunk);

/* ---- connections (tcp.c) ---- */

/* A connection's round trip as of its handshake; 0: not known, as of a socket that is not TCP. */
uint32_t tcp_round_trip_us(int fd);

/* Has a connection over a long link keep little unsent, and pace what it sends. Cannot fail. */
void tcp_prepare_distant(int fd);

/* ---- ops (op.c, collective.c, chunk.c, transfer.c) ---- */

/* What the first early chunk of a ring said of our place in it. */
struct claim {
    bool made;
    uint32_t members, position;
};

/* An array of a collective. */
struct part {
    const unsigned char *send;
    unsigned char *recv;
    int dtype;
    size_t width;            /* bytes of an element in memory */
    uint64_t count;          /* elements of a block */
    uint64_t begin;          /* its first offset in a block */
    bool overwrites;         /* recv holds what ABORT must restore, */
    size_t shadow_at;        /* here in the shadow */
};

struct collective {
    enum pccl_collective what;
    int redop, format;
    bool reduces;            /* or else gathers: chunks are final from the start */
    uint32_t members;        /* blocks of the larger buffers; 0: all have one */
    uint32_t send_blocks, recv_blocks;
    struct part *parts;
    uint32_t n_parts;
    uint64_t span;           /* offsets of a block */
    uint64_t total;          /* elements of a block */
    uint64_t chunk;          /* bytes of a message, about */
    uint64_t done, wanted;   /* elements given and written, and how many there are */
    uint64_t *given_set;     /* granules of send that have been given: our contribution */
    uint64_t *written_set;   /* granules of recv that hold the result */
    unsigned char *shadow;   /* what recv held in those granules, where that counts */
    size_t shadow_bytes;     /* that it needs */
    size_t shadow_size;      /* that it has */
    struct packets early;    /* to be sent on once START names the stream */
    bool claimed;            /* early chunks have fixed seq and nonce */
    struct claim claims[PCCL_RINGS_MAX];
};

/* A request that waits to be answered. */
struct request {
    struct request *next;
    uint64_t seq, nonce;
    uint32_t slot;
    uint32_t piece;          /* index into pieces */
    uint32_t length;
    uint64_t offset;
    uint16_t echo;           /* what the answer repeats */
};

enum leaf_state { LEAF_MISSING, LEAF_ARRIVED, LEAF_PROVEN };

/* A part of a piece that is proven as a whole. */
struct leaf {
    struct leaf *next;       /* among those to be requested again */
    enum leaf_state state;
    uint32_t piece;          /* index into pieces */
    uint32_t source;         /* index of the link that it came over; or of no one or several */
    uint64_t offset, bytes;  /* of the piece */
    uint64_t requested;      /* bytes, from its beginning on */
    uint64_t missing;        /* bytes that have not arrived */
    struct link *owner;      /* the only one that may be asked, as it came wrong from several */
};

/* A request under way, or to be made again because its holder is gone. */
struct want {
    struct leaf *leaf;       /* NULL: free */
    struct link *link;       /* NULL: nobody is asked for it at present */
    uint64_t offset;         /* of the piece */
    uint32_t length;
};

struct transfer {
    const pccl_piece *pieces;
    uint32_t n_pieces;
    uint32_t n_unclaimed;    /* SERVE: requests of slots that no START has named yet */
    bool limited;            /* SERVE: it may not send more than is allowed, */
    int64_t allowance;       /* so many bytes; below 0 when an answer was larger */
    struct request *unclaimed, *last_unclaimed; /* SERVE: of slots that no START has named yet */
    uint32_t chunk;          /* FETCH: bytes of a request */
    uint32_t leaf_bytes;     /* FETCH: of leaves that the caller proves; 0: a piece is one leaf */
    uint64_t unproven;       /* FETCH: bytes */
    struct leaf *leaves;     /* FETCH: all, in the order of the pieces */
    size_t n_leaves;
    size_t cursor;           /* FETCH: the first leaf that may not be wholly requested */
    struct leaf *again, *last_again;    /* FETCH: leaves that came wrong */
    struct want *wants;      /* FETCH */
    uint32_t n_wants, n_returned;       /* of these, without a link */
    uint32_t delivered;      /* FETCH: over all links lately */
    uint32_t reminders;      /* FETCH: since anything has come */
};

enum ending { LIVING, COMMITTED, ABORTED };

struct op {
    pccl_engine *engine;
    struct op *next, *prev;  /* among the engine's ops, or among those that are ending */
    struct op *next_by_id, *next_by_tag;
    uint64_t id, run, tag;
    uint64_t min_seq, seq;
    uint64_t nonce;          /* of the call, which no stranger can know */
    enum pccl_op_kind kind;
    enum ending ending;
    bool by_tag;             /* in the index: messages find it */
    bool started, complete, failed;
    void *counter;           /* of messages that refer to op's memory. NULL: never any */
    uint32_t queued;         /* packets that wait */
    uint32_t in_turn;        /* links that wait */
    uint64_t tx_bytes, rx_bytes;
    struct link **links;
    uint32_t n_links;
    bool is_spread;          /* over rings that lead to different neighbours */
    struct collective collective;
    struct transfer transfer;
};

/* REGISTER, START, VERDICT, ALLOW, REMIND, COMMIT and ABORT. */
void op_order_register(pccl_engine *engine, const pccl_order *order);
void op_order_start(pccl_engine *engine, const pccl_order *order);
void op_order_verdict(pccl_engine *engine, const pccl_order *order);
void op_order_allow(pccl_engine *engine, const pccl_order *order);
void op_order_remind(pccl_engine *engine, const pccl_order *order);
void op_order_end(pccl_engine *engine, const pccl_order *order);

/* The op that takes messages of this kind, run and tag, or NULL. */
struct op *op_find_by_tag(pccl_engine *engine, enum pccl_op_kind kind, uint64_t run, uint64_t tag);

/* Emits FAILED, once; the op does nothing more until its ABORT. */
void op_fail(struct op *op, int status, const char *format, ...) PRINTF_LIKE(3, 4);

/* Emits FAILED, but the op goes on: SERVE has lost one of its requesters. */
void op_report(struct op *op, int status, const char *format, ...) PRINTF_LIKE(3, 4);

/* A new link of the op to a stream (may be NULL), or NULL without memory. */
struct link *op_add_link(struct op *op, struct stream *stream, const pccl_ring *ring);

/* Emits COMPLETE, and frees the op if it is settled too. */
void op_complete(struct op *op);

/* A stream is gone: drops op's links to it, and fails the op where that matters. */
void op_lose_stream(struct op *op, struct stream *stream);

/* Settles ops that have ended and to which nothing refers any more. Whether there were any. */
bool ops_settle(pccl_engine *engine);

/* Whether an op waits for nothing but libzmq to release its bytes. */
bool ops_await_release(const pccl_engine *engine);

/* Restores and frees all ops, when the context is gone. */
void ops_free(pccl_engine *engine);

/* Counts one more reference to op's memory, 0 or PCCL_ENOMEM; takes it back. */
int op_refer(struct op *op);
void op_unrefer(struct op *op);

/* The three kinds of ops. _register and _start check and take over what an order says, or fail the
 * op; _take handles the message in the engine's inbox; _send uses a link's turn. */
void collective_register(struct op *op, const pccl_order *order);
void collective_start(struct op *op, const pccl_order *order);
void collective_take(struct op *op, const struct wire_header *chunk);
enum turn collective_send(struct link *ring);
void collective_drop_early(struct op *op);  /* what waits for START to be sent on */
void collective_drop_shadow(struct op *op); /* the result stays */
void collective_restore(struct op *op);     /* the result goes, what was there before is back */
void collective_free(struct op *op);

/* The part that an offset below blocks * span is of; how many elements it has from there on. */
const struct part *part_at(const struct collective *collective, uint64_t offset);
uint64_t part_left(const struct collective *collective, const struct part *part, uint64_t offset);

/* Where the element at an offset is in send and in recv: also for the offset of a block that such a
 * buffer with one block only has in common with others. */
const unsigned char *part_send(const struct collective *collective, const struct part *part,
                               uint64_t offset);
unsigned char *part_recv(const struct collective *collective, const struct part *part,
                         uint64_t offset);

/* The granules from <= i < to of the elements from an offset on, in written_set. */
void written_granules(const struct collective *collective, uint64_t offset, uint64_t length,
                      uint64_t *from, uint64_t *to);

/* Keeps the bytes of recv at an offset, if ABORT must restore them: 0 or PCCL_ENOMEM. */
int collective_save(struct op *op, const struct part *part, uint64_t offset, size_t bytes);

/* The offsets from <= i < to of a segment of a ring. */
void ring_part(const struct link *ring, uint32_t segment, uint64_t *from, uint64_t *to);

/* The first and the last hop of a chunk, among `members` > 1. */
uint32_t collective_first_hop(const struct collective *collective, uint32_t members);
uint32_t collective_last_hop(const struct collective *collective, uint32_t members);

void transfer_register(struct op *op, const pccl_order *order);
void transfer_free(struct op *op);
void serve_start(struct op *op, const pccl_order *order);
void serve_take(struct op *op, const struct wire_header *header);
void serve_allow(struct op *op, uint64_t bytes);
enum turn serve_send(struct link *link);
void serve_drop_requests(struct op *op, struct link *link);     /* of a link; NULL: unclaimed */
struct wire_header transfer_header(const struct link *link, enum wire_kind kind, uint32_t piece);
void fetch_register(struct op *op, const pccl_order *order);
void fetch_start(struct op *op, const pccl_order *order);
void fetch_judge(struct op *op, const pccl_order *order);       /* VERDICT */
void fetch_remind(struct op *op, uint64_t limit);
void fetch_lose_link(struct op *op, struct link *link, const char *why);
void fetch_take(struct op *op, const struct wire_header *header);
enum turn fetch_send(struct link *link);

/* ---- the engine (engine.c) ---- */

struct pccl_engine {
    const pccl_zmq *zmq;
    pccl_options options;
    void *context, *pull, *pair;
    struct zap zap;
    bool stopped;
    int status;              /* why the engine cannot go on, or 0 */
    int error;               /* errno of the last call that failed */
    uint64_t dropped;
    uint32_t passes;
    uint32_t forwards;       /* packets that wait to be sent on, anywhere, */
    uint64_t forward_bytes;  /* and what they hold */
    uint32_t spread_ops;     /* while there are any, neither is limited */
    struct packet *inbox;    /* the message at hand */
    struct stream *streams;
    struct op *ops, *ending;
    struct op *by_id[INDEX_BUCKETS], *by_tag[INDEX_BUCKETS];
    void *shadow;            /* kept for the next in-place op: page faults cost more than copies */
    size_t shadow_size;      /* bytes */
    pccl_pollitem *items;
    size_t items_room;
};

/* How long TCP may go on without hearing anything of the other side: long enough for one that takes
 * nothing, since TCP does not always tell the two apart. */
int engine_unheard_ms(const pccl_options *options);

/* Sends an event to the caller. Cannot fail, but for memory: then the engine stops. */
void engine_emit(pccl_engine *engine, const pccl_event *event);

#endif
