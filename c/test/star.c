/* star.c - see star.h. */
#include "star.h"

#include <string.h>

const uint64_t sizes[PIECES] = {10, 5000, 0, 256, 20001};
unsigned char held[PIECES][PIECE_MAX], got[PIECES][PIECE_MAX];
pccl_piece offered[PIECES], wanted[PIECES];
struct peers peers;

static void fill(void)
{
    uint32_t i;
    uint64_t j;
    for (i = 0; i < PIECES; i++) {
        for (j = 0; j < sizes[i]; j++)
            held[i][j] = (unsigned char)(j * 31 + j / 251 + i);
        memset(got[i], 0, sizeof got[i]);
        offered[i].data = held[i];
        wanted[i].data = got[i];
        offered[i].bytes = wanted[i].bytes = sizes[i];
        offered[i].piece = wanted[i].piece = 10 * i + 3;
    }
}

bool has_arrived(void)
{
    int i;
    for (i = 0; i < PIECES; i++)
        if (memcmp(held[i], got[i], sizeof held[i]) != 0)
            return false;
    return true;
}

void open_star(int holders, uint64_t seed)
{
    pccl_options options = peers_options();
    int i;
    fill();
    peers_open(&peers, holders + 1, &options, seed);
    for (i = 1; i <= holders; i++) {
        peers_stream(&peers, 0, i, (uint32_t)i, 1, 2);
        peers_stream(&peers, i, 0, 1, 2, 1 + (uint32_t)(seed % 2));
    }
}

static void enroll_op(int who, uint64_t op, enum pccl_op_kind kind, const pccl_piece *pieces,
                      uint32_t n, uint32_t leaf_bytes, uint64_t limit)
{
    pccl_command command = {0};
    command.kind = PCCL_REGISTER;
    command.op = op;
    command.op_kind = (uint32_t)kind;
    command.run = TEST_RUN;
    command.tag = TAG;
    command.min_seq = SEQ - 1;
    command.pieces = pieces;
    command.n_pieces = n;
    command.leaf_bytes = leaf_bytes;
    command.limit = limit;
    peers_command(&peers, who, &command);
}

void enroll_leaves(int who, uint64_t op, enum pccl_op_kind kind, const pccl_piece *pieces,
                   uint32_t n, uint32_t leaf_bytes)
{
    enroll_op(who, op, kind, pieces, n, leaf_bytes, 0);
}

void enroll(int who, uint64_t op, enum pccl_op_kind kind, const pccl_piece *pieces,
            uint32_t n)
{
    enroll_op(who, op, kind, pieces, n, 0, 0);
}

/* START with `n` streams, numbered from `stream`, all with this slot. */
static void start_streams(int who, uint64_t op, uint64_t round, uint32_t stream, uint32_t n,
                          uint32_t slot)
{
    pccl_command command = {0};
    uint32_t i;
    command.kind = PCCL_START;
    command.op = op;
    command.seq = SEQ + round;
    command.nonce = TEST_NONCE + round;
    command.chunk_bytes = CHUNK;
    command.n_ends = n;
    for (i = 0; i < n; i++) {
        command.ends[i].stream = stream + i;
        command.ends[i].slot = slot;
    }
    peers_command(&peers, who, &command);
}

void start(int who, uint64_t op, uint32_t n, uint32_t slot)
{
    start_streams(who, op, 0, 1, n, slot);
}

void start_round(int who, uint64_t op, uint64_t round, uint32_t stream, uint32_t slot)
{
    start_streams(who, op, round, stream, 1, slot);
}

void start_star(int holders, uint64_t seed, uint32_t leaf_bytes, uint64_t limit)
{
    int who;
    open_star(holders, seed);
    enroll_leaves(0, FETCH_OP, PCCL_FETCH, wanted, PIECES, leaf_bytes);
    for (who = 1; who <= holders; who++) {
        enroll_op(who, SERVE_OP, PCCL_SERVE, offered, PIECES, 0, limit);
        start(who, SERVE_OP, 1, 7);
    }
    start(0, FETCH_OP, (uint32_t)holders, 7);
}

void allow(int who, uint64_t limit)
{
    pccl_command command = {0};
    command.kind = PCCL_ALLOW;
    command.op = SERVE_OP;
    command.limit = limit;
    peers_command(&peers, who, &command);
}

void remind(int times)
{
    pccl_command command = {0};
    command.kind = PCCL_REMIND;
    command.op = FETCH_OP;
    command.limit = REMINDERS_MAX;
    while (times-- > 0) {
        peers_command(&peers, 0, &command);
        peers_run(&peers);
    }
}

uint64_t total(void)
{
    uint64_t sum = 0;
    int i;
    for (i = 0; i < PIECES; i++)
        sum += sizes[i];
    return sum;
}

bool is_complete(void)
{
    return peers_count(&peers, 0, PCCL_COMPLETE, FETCH_OP) == 1;
}

struct wire_header good_request(void)
{
    struct wire_header header = {0};
    header.kind = WIRE_REQUEST;
    header.segment = 7;
    header.nonce = TEST_NONCE;
    header.run = TEST_RUN;
    header.seq = SEQ;
    header.tag = TAG;
    header.piece = 13;
    header.offset = 4000;
    header.length = 1000;
    return header;
}
