/* star.h - a transfer on the fake network: peer 0 fetches pieces that all others hold. */
#ifndef PCCL_STAR_H
#define PCCL_STAR_H

#include "harness.h"
#include "engine/wire.h"

enum {
    PIECES = 5, PIECE_MAX = 20001, FETCH_OP = 1, SERVE_OP = 2, TAG = 31, SEQ = 8, CHUNK = 700,
    REMINDERS_MAX = 32               /* the limit of remind() */
};

extern const uint64_t sizes[PIECES];
extern unsigned char held[PIECES][PIECE_MAX], got[PIECES][PIECE_MAX];
extern pccl_piece offered[PIECES], wanted[PIECES];
extern struct peers peers;

/* Opens stream i from peer 0 to holder i, and stream 1 from each holder to peer 0. */
void open_star(int holders, uint64_t seed);

/* REGISTER, without leaves and with. */
void enroll(int who, uint64_t op, enum pccl_op_kind kind, const pccl_piece *pieces, uint32_t n);
void enroll_leaves(int who, uint64_t op, enum pccl_op_kind kind, const pccl_piece *pieces,
                   uint32_t n, uint32_t leaf_bytes);

/* START with `n` streams, numbered from 1, all with this slot. */
void start(int who, uint64_t op, uint32_t n, uint32_t slot);

/* START with one stream. Each round has the next sequence number and nonce after those of start(),
 * which is round 0. */
void start_round(int who, uint64_t op, uint64_t round, uint32_t stream, uint32_t slot);

/* Opens a star, and registers and starts the fetch and all holders. A holder may send `limit` bytes
 * before its first allow(); 0: it is not limited. */
void start_star(int holders, uint64_t seed, uint32_t leaf_bytes, uint64_t limit);

/* ALLOW for a holder. */
void allow(int who, uint64_t limit);

/* Sends REMIND for the fetch, `times` times, and runs the engines after each. */
void remind(int times);

/* Number of bytes in all pieces. */
uint64_t total(void);

/* Whether all pieces have arrived, and whether the fetch is COMPLETE. */
bool has_arrived(void);
bool is_complete(void);

/* A request of slot 7 for 1,000 bytes of piece 13. */
struct wire_header good_request(void);

#endif
