/* test_parts.c - the arrays of a collective: addresses, buffers in place or not, and undo. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "engine/parts.h"
#include "engine/bitmap.h"

enum { N_PARTS = 3, MEMBERS = 3, COUNT_MAX = 200 };

static const uint64_t counts[N_PARTS] = {130, 0, 7};

static const struct shape plain = {.reduces = true};
static const struct shape scatters = {.reduces = true, .scatters = true};
static const struct shape gathers = {.gathers = true};
static const struct shape rooted = {.rooted = true};

/* Stores the arrays `given` in `parts`, for a collective of MEMBERS members. `room` has memory for
 * N_PARTS parts. */
static const char *enter_in(int format, struct parts *parts, struct part *room,
                            const pccl_part *given, const struct shape *shape)
{
    pccl_command command = {0};
    command.format = (uint32_t)format;
    command.parts = given;
    command.n_parts = N_PARTS;
    memset(room, 0, N_PARTS * sizeof *room);
    memset(parts, 0, sizeof *parts);
    parts->part = room;
    parts->n = N_PARTS;
    parts->send_slices = shape->scatters ? MEMBERS : 1;
    parts->recv_slices = shape->gathers ? MEMBERS : 1;
    return parts_enter(parts, shape, &command);
}

static const char *enter(struct parts *parts, struct part *room, const pccl_part *given,
                         const struct shape *shape)
{
    return enter_in(PCCL_UNQUANTIZED, parts, room, given, shape);
}

static unsigned char sends[N_PARTS][COUNT_MAX * MEMBERS], recvs[N_PARTS][COUNT_MAX * MEMBERS];

static void make(pccl_part *given)
{
    int i;
    for (i = 0; i < N_PARTS; i++) {
        given[i].send = sends[i];
        given[i].recv = recvs[i];
        given[i].error = NULL;
        given[i].count = counts[i];
        given[i].dtype = PCCL_U8;
    }
}

/* The two parts that are not empty take 192 and 64 offsets of a slice. */
static void test_addresses(void)
{
    struct part room[N_PARTS];
    pccl_part given[N_PARTS];
    struct parts parts;
    uint64_t slice, from, to;
    make(given);
    CHECK(enter(&parts, room, given, &gathers) == NULL);
    CHECK(parts.span == 256 && parts.total == 137 && parts.undo_bytes == 0);
    for (slice = 0; slice < MEMBERS; slice++) {
        uint64_t at = slice * parts.span;
        const struct part *last = part_at(&parts, at + 192);
        CHECK(part_at(&parts, at) == &room[0] && part_at(&parts, at + 128) == &room[0]);
        CHECK(last == &room[2]);
        CHECK(parts_reach(&parts, at + 64) == 66 && parts_reach(&parts, at + 192) == 7);
        CHECK(part_send(&parts, &room[0], at + 64) == sends[0] + 64);
        CHECK(part_recv(&parts, &room[0], at + 64) == recvs[0] + slice * 130 + 64);
        CHECK(part_recv(&parts, last, at + 192) == recvs[2] + slice * 7);
        parts_written(&parts, at + 192, 7, &from, &to);
        CHECK(from == slice * 4 + 3 && to == from + 1);
    }
    CHECK(enter(&parts, room, given, &plain) == NULL);
    parts_written(&parts, 2 * parts.span + 64, 66, &from, &to);
    CHECK(from == 1 && to == 3);
}

/* If buffers have one slice, a chunk may span small parts of the same type. */
static void test_stretches(void)
{
    static unsigned char large[2][SMALL_BYTES + 1];
    struct part room[N_PARTS];
    pccl_part given[N_PARTS];
    unsigned char packed[COUNT_MAX];
    struct parts parts;
    struct stretch stretch;
    uint64_t at = 64;
    int i;
    make(given);
    for (i = 0; i < COUNT_MAX; i++)
        sends[0][i] = sends[2][i] = (unsigned char)i;
    CHECK(enter(&parts, room, given, &plain) == NULL);
    CHECK(parts_reach(&parts, 64) == 135 && parts_reach(&parts, 192) == 7);
    CHECK(parts_next(&parts, &at, 199, &stretch) && stretch.part == &room[0]);
    CHECK(stretch.offset == 64 && stretch.length == 66 && stretch.send == sends[0] + 64);
    CHECK(at == 192 && parts_next(&parts, &at, 199, &stretch) && stretch.part == &room[2]);
    CHECK(stretch.length == 7 && stretch.recv == recvs[2] && stretch.bytes == 7);
    CHECK(!parts_next(&parts, &at, 199, &stretch));
    CHECK(parts_elements(&parts, 64, 135) == 73 && parts_elements(&parts, 64, 64) == 64);
    parts_gather(&parts, 64, 135, packed);
    CHECK(packed[0] == 64 && packed[65] == 129 && packed[66] == 0 && packed[72] == 6);
    memset(recvs, 0xee, sizeof recvs);
    parts_scatter(&parts, 64, 135, packed);
    CHECK(recvs[0][63] == 0xee && recvs[0][64] == 64 && recvs[0][129] == 129);
    CHECK(recvs[0][130] == 0xee && recvs[2][0] == 0 && recvs[2][6] == 6 && recvs[2][7] == 0xee);
    given[2].count = 0;              /* nothing follows: the chunk ends where its part does */
    CHECK(enter(&parts, room, given, &plain) == NULL && parts_reach(&parts, 64) == 66);
    given[2].send = large[0];
    given[2].recv = large[1];
    given[2].count = SMALL_BYTES + 1;
    CHECK(enter(&parts, room, given, &plain) == NULL && parts_reach(&parts, 64) == 66);
    given[2].count--;
    CHECK(enter(&parts, room, given, &plain) == NULL);
    CHECK(parts_reach(&parts, 64) == 128 + SMALL_BYTES);
    make(given);
    given[0].send = large[0];
    given[0].recv = large[1];
    given[0].count = SMALL_BYTES + 1;
    CHECK(enter(&parts, room, given, &plain) == NULL && parts_reach(&parts, 0) == SMALL_BYTES + 1);
    make(given);
    for (i = 0; i < N_PARTS; i++) {
        given[i].count = counts[i] / 4;
        given[i].dtype = PCCL_F32;
    }
    CHECK(enter(&parts, room, given, &plain) == NULL && parts_reach(&parts, 0) == 65);
    CHECK(enter_in(PCCL_BLOCK_8, &parts, room, given, &plain) == NULL);
    CHECK(parts_reach(&parts, 0) == 32);
    make(given);
    given[2].dtype = PCCL_I8;
    CHECK(enter(&parts, room, given, &plain) == NULL && parts_reach(&parts, 64) == 66);
    make(given);
    CHECK(enter(&parts, room, given, &gathers) == NULL && parts_reach(&parts, 64) == 66);
    CHECK(enter(&parts, room, given, &scatters) == NULL && parts_reach(&parts, 64) == 66);
}

static void test_places(void)
{
    float error;
    struct part room[N_PARTS];
    pccl_part given[N_PARTS];
    struct parts parts;
    uint32_t rank;
    for (rank = 0; rank < MEMBERS; rank++) {
        make(given);
        given[0].recv = sends[0] + rank * counts[0];
        CHECK(enter(&parts, room, given, &scatters) == NULL);
        CHECK(room[0].overwrites && !room[2].overwrites && parts.undo_bytes == counts[0]);
        CHECK(parts_lie_at(&parts, rank) && !parts_lie_at(&parts, (rank + 1) % MEMBERS));
        given[0].recv = sends[0] + rank * counts[0] + 1;
        CHECK(enter(&parts, room, given, &scatters) != NULL);
    }
    make(given);
    CHECK(enter(&parts, room, given, &scatters) == NULL);
    CHECK(parts_lie_at(&parts, 0) && parts_lie_at(&parts, 2));
    given[2].recv = NULL;            /* a rooted collective uses recv alone */
    CHECK(enter(&parts, room, given, &rooted) != NULL);
    make(given);
    given[2].send = NULL;
    CHECK(enter(&parts, room, given, &rooted) == NULL && room[2].send == recvs[2]);
    given[2].error = &error;         /* of an array that is not quantized */
    CHECK(enter(&parts, room, given, &plain) != NULL);
    given[2].error = NULL;
    given[2].dtype = 99;
    CHECK(enter(&parts, room, given, &plain) != NULL);
}

/* The blocks in the set are restored, and no others. */
static void test_undo(void)
{
    struct undo undo = {NULL, 0}, spare = {NULL, 0};
    struct part room[N_PARTS];
    pccl_part given[N_PARTS];
    struct parts parts;
    struct stretch stretch;
    uint64_t written = 0, at;
    make(given);
    given[0].send = recvs[0];
    memset(recvs[0], 'a', counts[0]);
    CHECK(enter(&parts, room, given, &plain) == NULL);
    CHECK(undo_open(&undo, parts.undo_bytes, &spare));
    at = 64;
    CHECK(parts_next(&parts, &at, 128, &stretch) && stretch.bytes == 64);
    parts_save(&parts, &stretch, &undo);
    bitmap_set(&written, 1, 2);
    memset(recvs[0], 'b', counts[0]);
    parts_restore(&parts, &undo, &written);
    CHECK(recvs[0][63] == 'b' && recvs[0][64] == 'a' && recvs[0][127] == 'a');
    CHECK(recvs[0][128] == 'b' && recvs[0][129] == 'b');
    undo_close(&undo, &spare);
    CHECK(undo.memory == NULL && spare.bytes == counts[0]);
    free(spare.memory);
}

/* The larger buffer is kept as the spare one, for the next op that needs no larger one. */
static void test_spare(void)
{
    struct undo small = {NULL, 0}, large = {NULL, 0}, spare = {NULL, 0};
    unsigned char *kept;
    CHECK(undo_open(&small, 10, &spare) && undo_open(&large, 20, &spare));
    kept = large.memory;
    undo_close(&small, &spare);
    CHECK(spare.bytes == 10);
    undo_close(&large, &spare);
    CHECK(spare.bytes == 20 && spare.memory == kept);
    CHECK(undo_open(&large, 21, &spare) && large.memory != kept && spare.memory == kept);
    CHECK(undo_open(&small, 5, &spare) && small.memory == kept && spare.memory == NULL);
    undo_close(&small, &spare);
    undo_close(&small, &spare);      /* it is closed already */
    CHECK(spare.memory == kept);
    undo_close(&large, &spare);
    CHECK(spare.bytes == 21);
    free(spare.memory);
}

int main(void)
{
    test_addresses();
    test_stretches();
    test_places();
    test_undo();
    test_spare();
    return check_report("parts");
}
