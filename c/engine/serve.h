/* serve.h - a SERVE op: sends bytes of numbered pieces of memory to their requesters (fetch.h). */
#ifndef PCCL_SERVE_H
#define PCCL_SERVE_H

#include "engine/op.h"

/* Numbered pieces of memory, which SERVE offers and FETCH requests. */
struct pieces {
    const pccl_piece *piece; /* in ascending order of their numbers */
    uint32_t n;
};

/* Stores the pieces of a command. If they are invalid, fails the op and returns false. */
bool pieces_enter(struct pieces *pieces, struct op *op, const pccl_command *command);

/* The index of the piece with that number, or n. */
uint32_t pieces_find(const struct pieces *pieces, uint32_t number);

/* A header for a message about a piece, between a holder and the requester with that slot. */
struct wire_header pieces_header(const struct pieces *pieces, const struct op *op,
                                 enum wire_kind kind, uint32_t slot, uint32_t index);

/* A request that waits to be answered. */
struct request {
    struct request *next;
    uint32_t slot;
    uint32_t piece;          /* index into pieces */
    uint32_t length;
    uint64_t offset;
    uint16_t echo;           /* the number that the answer repeats */
};

/* A FIFO of requests. */
struct requests {
    struct request *head, *tail;
    uint32_t n;
};

enum { SERVE_ROUNDS = 4 };       /* the most rounds with unclaimed requests */

/* The requests of a round whose slot no START has named yet. */
struct unclaimed {
    uint64_t seq, nonce;
    struct requests requests;
};

struct serve {
    struct op op;
    struct pieces pieces;
    bool limited;            /* it may send only as many bytes as `allowance` says */
    int64_t allowance;       /* bytes; negative after an answer that exceeded it */
    struct unclaimed round[SERVE_ROUNDS];    /* the oldest first */
    uint32_t n_rounds;
};

/* A peer that requests pieces. */
struct requester {
    struct flow flow;
    uint32_t slot;
    struct requests requests;
};

/* For struct op_kind. */
void serve_enter(struct op *op, const pccl_command *command);
void serve_start(struct op *op, const pccl_command *command);
void serve_command(struct op *op, const pccl_command *command);
void serve_take(struct op *op, const struct wire_header *header, struct packet **packet);
enum turn serve_send(struct flow *flow);
void serve_drop(struct op *op, struct flow *flow);
void serve_lose(struct op *op, const struct stream *stream);

#endif
