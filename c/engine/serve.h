/* serve.h - a SERVE op: gives bytes of numbered pieces of memory to those who request them
 * (fetch.h). */
#ifndef PCCL_SERVE_H
#define PCCL_SERVE_H

#include "engine/op.h"

/* Numbered pieces of memory: what SERVE offers and FETCH asks for. */
struct pieces {
    const pccl_piece *piece; /* in ascending order of their numbers */
    uint32_t n;
};

/* Takes over the pieces of a command; fails the op if they cannot be. Whether they can. */
bool pieces_enter(struct pieces *pieces, struct op *op, const pccl_command *command);

/* The index of a piece by its number, or n. */
uint32_t pieces_find(const struct pieces *pieces, uint32_t number);

/* The beginning of the header of an op's message about a piece, between a holder and the requester
 * with that slot. */
struct wire_header pieces_header(const struct pieces *pieces, const struct op *op,
                                 enum wire_kind kind, uint32_t slot, uint32_t index);

/* A request that waits to be answered. */
struct request {
    struct request *next;
    uint32_t slot;
    uint32_t piece;          /* index into pieces */
    uint32_t length;
    uint64_t offset;
    uint16_t echo;           /* what the answer repeats */
};

/* A FIFO of requests. */
struct requests {
    struct request *head, *tail;
    uint32_t n;
};

enum { SERVE_ROUNDS = 4 };       /* that a START may still name a slot of */

/* Requests of a round whose slot no START has named yet. */
struct unclaimed {
    uint64_t seq, nonce;
    struct requests requests;
};

struct serve {
    struct op op;
    struct pieces pieces;
    bool limited;            /* it may not send more than is allowed, */
    int64_t allowance;       /* so many bytes; below 0 when an answer was larger */
    struct unclaimed round[SERVE_ROUNDS];    /* the oldest first */
    uint32_t n_rounds;
};

/* Whoever requests. */
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
