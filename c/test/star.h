/* star.h - a transfer on the fake network: peer 0 fetches, the others hold the same pieces. */
#ifndef PCCL_STAR_H
#define PCCL_STAR_H

#include "harness.h"
#include "engine/wire.h"

enum {
    PIECES = 5, PIECE_MAX = 20001, FETCH_OP = 1, SERVE_OP = 2, TAG = 31, SEQ = 8, CHUNK = 700
};

extern const uint64_t sizes[PIECES];
extern unsigned char held[PIECES][PIECE_MAX], got[PIECES][PIECE_MAX];
extern pccl_piece offered[PIECES], wanted[PIECES];
extern struct peers peers;

/* Peer 0 can reach holder i by its stream i, which can reach peer 0 by its stream 1. */
void open_star(int holders, uint64_t seed);

/* REGISTER, without leaves and with. */
void enroll(int who, uint64_t op, enum pccl_op_kind kind, const pccl_piece *pieces, uint32_t n);
void enroll_leaves(int who, uint64_t op, enum pccl_op_kind kind, const pccl_piece *pieces,
                   uint32_t n, uint32_t leaf_bytes);

/* START with `n` streams, numbered from 1; all have this slot. */
void start(int who, uint64_t op, uint32_t n, uint32_t slot);

/* Bytes of all pieces; whether they are here; whether the fetch has said so. */
uint64_t total(void);
bool has_arrived(void);
bool is_complete(void);

/* The request of slot 7 for the first bytes. */
struct wire_header good_request(void);

#endif
