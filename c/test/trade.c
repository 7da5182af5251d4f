/* trade.c - see trade.h. */
#include "trade.h"

#include <stdlib.h>
#include <string.h>

struct trade trade_plain(enum trade_kind kind, uint64_t count, bool in_place)
{
    struct trade trade = {0};
    trade.kind = kind;
    trade.in_place = in_place && (kind == SCATTER || kind == GATHER);
    trade.chunk_bytes = 1024;
    trade.n_parts = 1;
    trade.dtype[0] = PCCL_F32;
    trade.count[0] = count;
    return trade;
}

static size_t row_bytes(const struct trade *trade, int k)
{
    return (size_t)trade->count[k] * pccl_dtype_size(trade->dtype[k]);
}

/* Rows that one peer has for another. */
static uint64_t rows_between(const struct trade *trade, int from, int to, uint64_t seed)
{
    switch (trade->kind) {
    case SCATTER: return from == (int)trade->root;
    case GATHER: return to == (int)trade->root;
    case ALL_TO_ALL: return 1;
    default: return (seed * 7 + (uint64_t)(from * 5 + to * 3)) % 4;
    }
}

/* A byte of the rows that one peer has for another. */
static unsigned char content(int from, int to, int k, size_t at)
{
    return (unsigned char)(at * 31 + at / 251 + (size_t)(from * 89 + to * 53 + k * 17));
}

static uint64_t total(const uint64_t *rows, int n)
{
    uint64_t sum = 0;
    int i;
    for (i = 0; i < n; i++)
        sum += rows[i];
    return sum;
}

static unsigned char *allocate(size_t bytes)
{
    unsigned char *memory = malloc(bytes + 1);
    if (memory == NULL)
        abort();
    memset(memory, 0xee, bytes + 1);
    return memory;
}

/* Writes what a peer has for the others to `at`, or compares it. */
static bool is_given(const struct trade *trade, int who, int k, unsigned char *at, bool write)
{
    bool same = true;
    size_t i;
    int to;
    for (to = 0; to < trade->n; to++)
        for (i = 0; i < (size_t)trade->send_rows[who][to] * row_bytes(trade, k); i++, at++) {
            if (write)
                *at = content(who, to, k, i);
            same &= *at == content(who, to, k, i);
        }
    return same;
}

static void make_part(struct trade *trade, int who, int k)
{
    pccl_part *part = &trade->parts[who][k];
    size_t row = row_bytes(trade, k), sends = (size_t)total(trade->send_rows[who], trade->n) * row;
    size_t recvs = (size_t)total(trade->recv_rows[who], trade->n) * row;
    unsigned char *send = trade->memory[who][k][0] = allocate(sends);
    unsigned char *recv = trade->memory[who][k][1] = allocate(recvs);
    part->send = send + 1;           /* odd: buffers may have any alignment */
    part->recv = recv + 1;
    if (trade->in_place && who == (int)trade->root && trade->kind == SCATTER)
        part->recv = send + 1 + (size_t)who * row;
    if (trade->in_place && who == (int)trade->root && trade->kind == GATHER)
        part->send = recv + 1 + (size_t)who * row;
    (void)is_given(trade, who, k, (unsigned char *)part->send, true);
    part->count = trade->count[k];
    part->dtype = (uint32_t)trade->dtype[k];
}

void trade_make(struct trade *trade, int n, uint64_t seed)
{
    int i, j;
    trade->n = n;
    trade->root = (uint32_t)(seed % (uint64_t)n);
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++)
            trade->send_rows[i][j] = trade->recv_rows[j][i] = rows_between(trade, i, j, seed);
    for (i = 0; i < n; i++)
        for (j = 0; j < trade->n_parts; j++)
            make_part(trade, i, j);
}

void trade_free(struct trade *trade)
{
    int i, k, side;
    for (i = 0; i < trade->n; i++)
        for (k = 0; k < trade->n_parts; k++)
            for (side = 0; side < 2; side++)
                free(trade->memory[i][k][side]);
}

void trade_register(struct peers *peers, int who, const struct trade *trade)
{
    pccl_command command = {0};
    command.kind = PCCL_REGISTER;
    command.op = TRADE_OP;
    command.op_kind = PCCL_EXCHANGE;
    command.run = TEST_RUN;
    command.tag = TRADE_TAG;
    command.min_seq = TRADE_SEQ - 1;
    command.parts = trade->parts[who];
    command.n_parts = (uint32_t)trade->n_parts;
    command.members = (uint32_t)trade->n;
    command.send_rows = trade->send_rows[who];
    command.recv_rows = trade->recv_rows[who];
    peers_command(peers, who, &command);
}

void trade_start(struct peers *peers, int who, const struct trade *trade, uint32_t rings)
{
    static uint16_t backwards[TEST_PEERS_MAX];       /* of the one world that there is */
    uint32_t n = (uint32_t)trade->n, i;
    pccl_command command = {0};
    for (i = 0; i < n; i++)
        backwards[i] = (uint16_t)(n - 1 - i);
    command.kind = PCCL_START;
    command.op = TRADE_OP;
    command.seq = TRADE_SEQ;
    command.nonce = TEST_NONCE;
    command.chunk_bytes = trade->chunk_bytes;
    command.n_rings = rings;
    command.rings[0].stream = 1;
    command.rings[0].members = command.rings[1].members = n;
    command.rings[0].position = (uint32_t)who;
    command.rings[1].stream = 2;
    command.rings[1].position = n - 1 - (uint32_t)who;
    command.rings[1].ranks = backwards;
    peers_command(peers, who, &command);
}

bool trade_has_rows(const struct trade *trade, int who)
{
    size_t i;
    int from, k;
    for (k = 0; k < trade->n_parts; k++) {
        const unsigned char *at = trade->parts[who][k].recv;
        for (from = 0; from < trade->n; from++)
            for (i = 0; i < (size_t)trade->recv_rows[who][from] * row_bytes(trade, k); i++)
                if (*at++ != content(from, who, k, i))
                    return false;
    }
    return true;
}

bool trade_is_unharmed(const struct trade *trade, int who)
{
    int k;
    for (k = 0; k < trade->n_parts; k++)
        if (!is_given(trade, who, k, (unsigned char *)trade->parts[who][k].send, false))
            return false;
    return true;
}

bool trade_is_right(const struct peers *peers, const struct trade *trade)
{
    int i;
    for (i = 0; i < peers->n; i++)
        if (peers_count(peers, i, PCCL_COMPLETE, TRADE_OP) != 1
            || peers_count(peers, i, PCCL_FAILED, TRADE_OP) != 0
            || !trade_has_rows(trade, i) || !trade_is_unharmed(trade, i))
            return false;
    return true;
}

bool trade_end(struct peers *peers, enum pccl_command_kind kind)
{
    bool settled = true;
    int i;
    for (i = 0; i < peers->n; i++)
        peers_end(peers, i, kind, TRADE_OP);
    peers_run(peers);
    for (i = 0; i < peers->n; i++)
        settled &= peers_count(peers, i, PCCL_SETTLED, TRADE_OP) == 1;
    return settled;
}
