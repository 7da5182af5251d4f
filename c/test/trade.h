/* trade.h - an exchange on all peers of the fake network: its rows and the expected results. */
#ifndef PCCL_TRADE_H
#define PCCL_TRADE_H

#include "peers.h"

enum { TRADE_PARTS_MAX = 4, TRADE_OP = 3, TRADE_TAG = 41, TRADE_SEQ = 20 };

/* Who has rows for whom: one for all, all for one, all for all, or anybody. */
enum trade_kind { SCATTER, GATHER, ALL_TO_ALL, ANY, TRADE_KINDS };

struct trade {
    enum trade_kind kind;
    int n;
    uint32_t root;
    bool in_place;                   /* what SCATTER and GATHER keep is where it was */
    uint32_t chunk_bytes;
    int n_parts;
    int dtype[TRADE_PARTS_MAX];
    uint64_t count[TRADE_PARTS_MAX]; /* elements of a row */
    uint64_t send_rows[TEST_PEERS_MAX][TEST_PEERS_MAX];
    uint64_t recv_rows[TEST_PEERS_MAX][TEST_PEERS_MAX];
    pccl_part parts[TEST_PEERS_MAX][TRADE_PARTS_MAX];
    unsigned char *memory[TEST_PEERS_MAX][TRADE_PARTS_MAX][2];   /* of send and recv */
};

/* One array of that type and count. */
struct trade trade_plain(enum trade_kind kind, uint64_t count, bool in_place);

/* Makes the rows, whose numbers depend on the seed where there is a choice. */
void trade_make(struct trade *trade, int n, uint64_t seed);
void trade_free(struct trade *trade);

void trade_register(struct peers *peers, int who, const struct trade *trade);

/* START in one ring over stream 1; with `rings` 2 in another one over stream 2 as well, in the
 * opposite direction. */
void trade_start(struct peers *peers, int who, const struct trade *trade, uint32_t rings);

/* Whether the peer holds all rows that are for it; whether those that it gave are as they were. */
bool trade_has_rows(const struct trade *trade, int who);
bool trade_is_unharmed(const struct trade *trade, int who);

/* Whether every peer is complete and has all. */
bool trade_is_right(const struct peers *peers, const struct trade *trade);

/* Commits, or aborts, all; whether everything is settled. */
bool trade_end(struct peers *peers, enum pccl_command_kind kind);

#endif
