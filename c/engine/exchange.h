/* exchange.h - an EXCHANGE op: rows of each member for each other one (pccl_core.h, EXCHANGES). */
#ifndef PCCL_EXCHANGE_H
#define PCCL_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/op.h"

/* An array of an exchange. */
struct rows {
    const unsigned char *send;
    unsigned char *recv;
    uint64_t row;            /* bytes of a row */
    uint64_t begin;          /* its first block in the set of blocks that have arrived */
};

/* The path of rows to a member: the shortest one around a ring, unless a stream leads to it. */
struct way {
    uint16_t steps;
    uint16_t ring;
    uint32_t flow;           /* the flow that sends them */
};

struct exchange {
    struct op op;
    uint32_t members, rank;
    struct rows *rows;
    uint32_t n_rows;
    uint64_t *send_at;       /* by rank: the first row for it; at the end the number of all rows */
    uint64_t *recv_at;       /* by rank: the first row from it; at the end the number of all rows */
    struct way *ways;        /* by rank */
    uint32_t n_rings;        /* the first flows */
    uint64_t chunk;          /* approximate bytes of a message */
    uint64_t done, wanted;   /* bytes sent and received so far, and in all */
    uint64_t *here;          /* blocks that have arrived */
    struct packets early;    /* messages that came before START */
};

/* A ring of an exchange, or a stream to one receiver, and where our next message on it begins. */
struct route {
    struct flow flow;
    pccl_ring place;         /* our place in the ring */
    uint32_t ring;           /* its index */
    uint32_t steps;          /* to the receiver of the next message; 0: all is sent */
    uint32_t index;          /* of the array */
    uint64_t offset;         /* in the rows for that receiver */
};

/* For struct op_kind. */
void exchange_enter(struct op *op, const pccl_command *command);
void exchange_start(struct op *op, const pccl_command *command);
void exchange_take(struct op *op, const struct wire_header *header, struct packet **packet);
enum turn exchange_send(struct flow *flow);
void exchange_progress(const struct op *op, uint64_t *done, uint64_t *wanted);
void exchange_drop(struct op *op, struct flow *flow);
void exchange_lose(struct op *op, const struct stream *stream);
void exchange_free(struct op *op);

#endif
