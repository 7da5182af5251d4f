/* test_commands.c - invalid commands and streams: each is reported, and nothing leaks. */
#include "check.h"
#include "harness.h"

#include <stdlib.h>
#include <string.h>

static struct peers peers;

static struct job make_job(uint64_t count, int n)
{
    struct job job = job_plain(count, true);
    job.op = 5;
    job.tag = 9;
    job_make(&job, n);
    return job;
}

/* ---- commands ---- */

static void expect_failed(const pccl_command *command, int status, const char *what)
{
    pccl_options options = peers_options();
    peers_open(&peers, 1, &options, 1);
    peers_command(&peers, 0, command);
    peers_run(&peers);
    if (!CHECK(peers_count(&peers, 0, PCCL_FAILED, command->op) == 1
               && peers_event(&peers, 0, PCCL_FAILED, command->op)->status == status))
        fprintf(stderr, "  %s\n", what);
    peers_end(&peers, 0, PCCL_ABORT, command->op);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, command->op) == 1);
    peers_close(&peers);
}

#define EXPECT_EINVAL(change) \
    do { \
        float memory[128] = {0}; \
        pccl_command command = {0}; \
        pccl_part part = {0}; \
        command.kind = PCCL_REGISTER; \
        command.op = 1; \
        command.op_kind = PCCL_COLLECTIVE; \
        command.collective = PCCL_ALL_REDUCE; \
        command.members = 2; \
        command.parts = &part; \
        command.n_parts = 1; \
        part.dtype = PCCL_F32; \
        part.count = 64; \
        part.send = part.recv = memory; \
        change; \
        expect_failed(&command, PCCL_EINVAL, #change); \
    } while (0)

static void test_wrong_commands(void)
{
    static const uint64_t rows[] = {1, 1}, many[] = {UINT64_MAX, 1};
    static const uint64_t long_rows[] = {UINT64_C(1) << 58, 1};
    EXPECT_EINVAL(command.op_kind = 9);
    EXPECT_EINVAL(command.collective = UINT32_MAX);
    EXPECT_EINVAL(command.redop = 5);
    EXPECT_EINVAL(command.n_parts = PCCL_PARTS_MAX + 1);
    EXPECT_EINVAL(part.dtype = PCCL_I128 + 1);
    EXPECT_EINVAL(command.format = PCCL_ZERO_POINT_16 + 1);
    EXPECT_EINVAL(command.format = UINT32_MAX);
    EXPECT_EINVAL(command.format = PCCL_BLOCK_8; command.redop = PCCL_PROD);
    EXPECT_EINVAL(command.format = PCCL_BLOCK_8; command.collective = PCCL_BROADCAST);
    EXPECT_EINVAL(command.format = PCCL_BLOCK_8; part.dtype = PCCL_I32);
    EXPECT_EINVAL(part.count = UINT64_MAX / 2);
    EXPECT_EINVAL(part.recv = NULL);
    EXPECT_EINVAL(part.recv = memory + 63);
    EXPECT_EINVAL(part.send = memory + 63);
    EXPECT_EINVAL(command.collective = PCCL_ALL_GATHER; command.members = 0);
    EXPECT_EINVAL(command.collective = PCCL_ALL_GATHER; command.members = PCCL_PEERS_MAX + 1);
    EXPECT_EINVAL(command.collective = PCCL_ALL_GATHER; part.send = memory + 32);
    EXPECT_EINVAL(command.recv_rows = rows);
    EXPECT_EINVAL(command.collective = PCCL_REDUCE_SCATTER; command.recv_rows = rows);
    EXPECT_EINVAL(command.collective = PCCL_ALL_GATHER; command.recv_rows = many);
    EXPECT_EINVAL(command.collective = PCCL_ALL_GATHER; command.recv_rows = long_rows);
    EXPECT_EINVAL(command.collective = PCCL_ALL_GATHER; command.recv_rows = rows; part.recv = NULL);
    EXPECT_EINVAL(command.collective = PCCL_REDUCE_SCATTER; command.members = 0);
    EXPECT_EINVAL(command.collective = PCCL_REDUCE_SCATTER; part.recv = memory + 127);
}

static void test_wrong_starts(void)
{
    static const char *const names[] = {"members", "position", "begin", "share",
                                        "stream", "seq", "rings", "none", "root", "slices",
                                        "another slice", "no rank", "two ranks",
                                        "another slice of unlike ones"};
    static const uint16_t ranks[] = {1, 2}, swapped[] = {1, 0};
    int variant;
    for (variant = 0; variant < 14; variant++) {
        struct job job = job_plain(1024, true);
        pccl_command command = {0};
        if (variant >= 8)
            job.what = variant == 8 ? PCCL_BROADCAST : PCCL_ALL_GATHER;
        job.unlike = variant == 13;
        job.rows[0] = job.rows[1] = 1;
        job_make(&job, 2);
        job_open_ring(&peers, &job, 2, 1);
        command.kind = PCCL_START;
        command.op = job.op;
        command.seq = variant == 5 ? job.seq - 1 : job.seq;
        command.n_rings = variant == 6 ? 9 : variant == 7 ? 0 : 1;
        command.rings[0].stream = variant == 4 ? 2 : 1;
        command.rings[0].members = variant == 0 ? 4097 : variant == 9 ? 3 : 2;
        command.rings[0].position = variant == 1 ? 2 : variant == 10 || variant == 13 ? 1 : 0;
        command.rings[0].root = variant == 8 ? 2 : 0;
        command.rings[0].ranks = variant == 11 ? ranks : NULL;
        command.rings[0].begin = variant == 2 ? 64 : 0;
        command.rings[0].count = variant == 3 ? 1023 : 1024;
        if (variant == 12) {
            command.n_rings = 2;
            command.rings[1] = command.rings[0];
            command.rings[0].count = command.rings[1].begin = command.rings[1].count = 512;
            command.rings[1].ranks = swapped;
        }
        peers_command(&peers, 0, &command);
        peers_run(&peers);
        if (!CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1))
            fprintf(stderr, "  %s\n", names[variant]);
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
}

/* The commands in a message are carried out in turn. An incomplete one at the end is dropped. */
static void test_commands_together(void)
{
    struct job job = make_job(1000, 2);
    unsigned char data[3 * sizeof(pccl_command) - 1];
    pccl_command commands[3] = {{0}};
    pccl_msg message;
    job_open_ring(&peers, &job, 2, 1);
    commands[0].kind = PCCL_ABORT;
    commands[0].op = 998;
    commands[1].kind = commands[2].kind = PCCL_ABORT;
    commands[1].op = commands[2].op = 999;
    memcpy(data, commands, sizeof data);
    if (fake_table()->msg_init_size(&message, sizeof data) < 0)
        abort();
    memcpy(fake_table()->msg_data(&message), data, sizeof data);
    (void)fake_table()->msg_send(&message, peers.peer[0].pair, 1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, 998) == 1);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, 999) == 1);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 1);
    job_close(&peers, &job);
}

/* COMMIT and ABORT that come too early, too late or twice. */
static void test_wrong_ends(void)
{
    struct job job = make_job(1000, 2);
    pccl_command short_command = {0};
    pccl_msg message;
    job_open_ring(&peers, &job, 2, 1);
    peers_run(&peers);
    job_register(&peers, 1, &job);               /* the number again */
    peers_end(&peers, 0, PCCL_COMMIT, job.op);   /* before COMPLETE */
    peers_end(&peers, 0, PCCL_ABORT, 999);       /* unknown: settled, as far as we know */
    short_command.kind = 99;
    peers_command(&peers, 0, &short_command);
    if (fake_table()->msg_init_size(&message, 3) == 0)
        (void)fake_table()->msg_send(&message, peers.peer[0].pair, 1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1);
    CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 1);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, 999) == 1);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 2);
    peers_end(&peers, 0, PCCL_ABORT, job.op);
    peers_run(&peers);
    peers_end(&peers, 0, PCCL_ABORT, job.op);
    peers_end(&peers, 0, PCCL_STOP, 0);
    CHECK(pccl_engine_step(peers.peer[0].engine) == 2);
    peers_close(&peers);
    CHECK(job_is_restored(&job, 0));
    job_free(&job);
}

/* A tag is free for the next op as soon as the first op has its COMMIT. */
static void test_tag_again(void)
{
    struct job job = make_job(3000, 2), next = make_job(700, 2);
    struct job twin = make_job(700, 2);
    int i;
    next.op = 6;
    next.seq = 11;
    twin.op = 7;
    job_open_ring(&peers, &job, 2, 2);
    job_register(&peers, 0, &twin);
    job_start_all(&peers, &job);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, twin.op) == 1);
    for (i = 0; i < 2; i++) {
        peers_end(&peers, i, PCCL_COMMIT, job.op);
        job_register(&peers, i, &next);
        job_start(&peers, i, &next);
    }
    peers_run(&peers);
    CHECK(job_is_right(&peers, &job) && job_is_right(&peers, &next));
    CHECK(job_commit(&peers, &next));
    peers_end(&peers, 0, PCCL_ABORT, twin.op);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, twin.op) == 1);
    job_close(&peers, &job);
    job_free(&next);
    job_free(&twin);
}

/* ---- streams ---- */

/* OPEN_STREAM and CONNECT_STREAM, with the members of a command. */
static void open_stream(const pccl_command *command, uint32_t number)
{
    pccl_command both = *command;
    both.kind = PCCL_OPEN_STREAM;
    both.stream = number;
    peers_command(&peers, 0, &both);
    both.kind = PCCL_CONNECT_STREAM;
    peers_command(&peers, 0, &both);
}

static int lost(uint32_t stream, int status)
{
    return peers_count(&peers, 0, PCCL_STREAM_LOST, stream) == 1
        && peers_event(&peers, 0, PCCL_STREAM_LOST, stream)->status == status;
}

static void test_no_stream(void)
{
    pccl_options options = peers_options();
    pccl_command command = {0};
    int nth;
    peers_open(&peers, 1, &options, 1);
    command.lanes = 3;
    command.hwm = 1;
    strcpy(command.endpoint, "tcp://nobody:1");
    open_stream(&command, 4);
    peers_run(&peers);
    CHECK(lost(4, PCCL_EREACH));
    command.hwm = 0;
    open_stream(&command, 5);
    peers_run(&peers);
    CHECK(lost(5, PCCL_EINVAL));
    command.hwm = 1;
    strcpy(command.endpoint, peers.peer[0].endpoint);
    for (nth = 0; nth == 0 || lost(command.stream, PCCL_EZMQ); nth++) {
        command.stream = 100 + (uint32_t)nth;
        open_stream(&command, command.stream);
        fake_fail_call(nth);
        peers_run(&peers);
        fake_fail_call(-1);
    }
    CHECK(nth == 15);
    CHECK(peers.peer[0].n_up == 1);
    command.kind = PCCL_CLOSE_STREAM;
    peers_command(&peers, 0, &command);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, command.stream) == 0);
    peers_close(&peers);
}

/* Ops start on a stream whose endpoint is not known yet. If it never is, they fail. */
static void test_late_endpoint(void)
{
    static const char why[] = "the name x did not resolve within 5 s";
    int late;
    for (late = 0; late < 2; late++) {
        struct job job = make_job(3000, 2);
        pccl_options options = peers_options();
        pccl_command command = {0};
        int i;
        peers_open(&peers, 2, &options, 1);
        peers_stream(&peers, 1, 0, 1, 2, 4);
        for (i = 0; i < 2; i++)
            job_register(&peers, i, &job);
        command.kind = PCCL_OPEN_STREAM;
        command.stream = 1;
        peers_command(&peers, 0, &command);
        job_start_all(&peers, &job);
        peers_run(&peers);
        CHECK(peers.peer[0].n_up == 0);
        CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 0);
        command.kind = late ? PCCL_CONNECT_STREAM : PCCL_LOSE_STREAM;
        command.lanes = command.hwm = 2;
        strcpy(command.endpoint, late ? peers.peer[1].endpoint : why);
        peers_command(&peers, 0, &command);
        peers_run(&peers);
        if (late) {
            CHECK(job_is_right(&peers, &job));
            CHECK(peers.peer[0].n_up == 1);
            peers_command(&peers, 0, &command);      /* twice */
            peers_run(&peers);
            CHECK(lost(1, PCCL_EINVAL));
        } else {
            CHECK(lost(1, PCCL_EREACH));
            CHECK(strcmp(peers_event(&peers, 0, PCCL_STREAM_LOST, 1)->text, why) == 0);
            CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1);
            peers_command(&peers, 0, &command);      /* it is gone */
            memset(command.endpoint, 'x', sizeof command.endpoint);
            peers_stream(&peers, 0, 1, 2, 2, 2);
            command.stream = 2;                    /* a text without an end */
            peers_command(&peers, 0, &command);
            peers_run(&peers);
            CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 2) == 0);
        }
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
}

/* The engine chooses the number of lanes when the first one is connected. If another lane cannot be
 * opened, the stream is lost. */
static void test_automatic_lanes(void)
{
    pccl_options options = peers_options();
    pccl_command command = {0};
    peers_open(&peers, 1, &options, 1);
    command.hwm = 1;
    strcpy(command.endpoint, peers.peer[0].endpoint);
    open_stream(&command, 4);
    peers_run(&peers);
    CHECK(fake_lanes() == 8);
    open_stream(&command, 5);
    while (fake_lanes() == 8)
        (void)pccl_engine_step(peers.peer[0].engine);
    fake_fail_call(0);
    peers_run(&peers);
    fake_fail_call(-1);
    CHECK(fake_lanes() == 8);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 4) == 0);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 5) == 1);
    peers_close(&peers);
}

static void test_no_engine(void)
{
    pccl_options options = peers_options();
    pccl_engine *engine;
    char bound[64];
    int nth, error = 0, tries = 0;
    fake_reset(1);
    for (nth = 0; ; nth++) {
        fake_fail_call(nth);
        engine = pccl_engine_new(fake_table(), &options, &error);
        if (engine != NULL)
            break;
        CHECK(error == PCCL_EZMQ && fake_open() == 0);
        tries++;
    }
    CHECK(tries > 5);
    fake_fail_call(1);
    CHECK(pccl_engine_bind(engine, "tcp://*:*", bound, sizeof bound) == PCCL_EZMQ);
    CHECK(pccl_engine_errno(engine) != 0);
    pccl_engine_free(engine);
    pccl_engine_free(NULL);
    options.forward_max = 0;
    CHECK(pccl_engine_new(fake_table(), &options, &error) == NULL && error == PCCL_EINVAL);
    CHECK(fake_open() == 0);
}

/* EXPECT and ADMIT are accepted from the beginning, with any number of keys, and leak nothing. */
static void test_who_may_connect(void)
{
    static const char key[] = "a key of forty characters, as they are..";
    pccl_options options = peers_options();
    pccl_command command = {0};
    int i;
    memcpy(options.dialler, "a password", 11);
    peers_open(&peers, 1, &options, 1);
    command.peer = 1;
    command.nonce = 7;
    command.kind = PCCL_EXPECT;
    peers_command(&peers, 0, &command);
    memcpy(command.curve_server, key, PCCL_KEY_CHARS);
    for (i = 0; i < 100; i++) {
        command.kind = i % 40 == 0 ? PCCL_EXPECT : PCCL_ADMIT;
        peers_command(&peers, 0, &command);
    }
    peers_run(&peers);
    CHECK(peers.peer[0].n_events == 0 && peers.peer[0].error == 0);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 0);
    peers_close(&peers);
}

int main(void)
{
    test_wrong_commands();
    test_wrong_starts();
    test_commands_together();
    test_wrong_ends();
    test_tag_again();
    test_no_stream();
    test_late_endpoint();
    test_automatic_lanes();
    test_no_engine();
    test_who_may_connect();
    return check_report("commands");
}
