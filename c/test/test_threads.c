/* test_threads.c - engines in threads of their own, with many ops, while streams are lost and ops
 * aborted at any moment. Meant for `make tsan`; the other builds run it too.
 *
 * All engines share one fake network behind one lock. Any thread may release sent memory, as with
 * libzmq's threads. The main thread is the caller of all engines: it commits an op on all peers if
 * all hold the result, else it aborts the op on all. Then every byte is checked. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "harness.h"

enum { N = 3, OPS = 8, ROUNDS = 60, PATIENCE_S = 240 };

enum harm { NO_HARM, CUT_A_LANE, ABORT_AN_OP, CLOSE_A_STREAM, HARMS };

/* ---- the fake network behind a lock ---- */

static pthread_mutex_t lock;     /* recursive: closing a message releases its bytes */

#define LOCKED(type, name, parameters, arguments) \
    static type locked_##name parameters \
    { \
        type result; \
        pthread_mutex_lock(&lock); \
        result = fake_table()->name arguments; \
        pthread_mutex_unlock(&lock); \
        return result; \
    }

LOCKED(void *, ctx_new, (void), ())
LOCKED(int, ctx_set, (void *c, int o, int v), (c, o, v))
LOCKED(int, ctx_term, (void *c), (c))
LOCKED(void *, socket, (void *c, int t), (c, t))
LOCKED(int, close, (void *s), (s))
LOCKED(int, setsockopt, (void *s, int o, const void *v, size_t n), (s, o, v, n))
LOCKED(int, getsockopt, (void *s, int o, void *v, size_t *n), (s, o, v, n))
LOCKED(int, bind, (void *s, const char *e), (s, e))
LOCKED(int, connect, (void *s, const char *e), (s, e))
LOCKED(int, socket_monitor, (void *s, const char *e, int v), (s, e, v))
LOCKED(int, poll, (pccl_pollitem *i, int n, long t), (i, n, t))
LOCKED(int, msg_init, (pccl_msg *m), (m))
LOCKED(int, msg_init_size, (pccl_msg *m, size_t n), (m, n))
LOCKED(int, msg_init_data, (pccl_msg *m, void *d, size_t n, void (*r)(void *, void *), void *h),
       (m, d, n, r, h))
LOCKED(int, msg_send, (pccl_msg *m, void *s, int f), (m, s, f))
LOCKED(int, msg_recv, (pccl_msg *m, void *s, int f), (m, s, f))
LOCKED(int, msg_close, (pccl_msg *m), (m))
LOCKED(void *, msg_data, (pccl_msg *m), (m))
LOCKED(size_t, msg_size, (const pccl_msg *m), (m))
LOCKED(int, msg_more, (const pccl_msg *m), (m))
LOCKED(int, errno_, (void), ())
LOCKED(void *, atomic_counter_new, (void), ())
LOCKED(int, atomic_counter_inc, (void *c), (c))
LOCKED(int, atomic_counter_dec, (void *c), (c))
LOCKED(int, atomic_counter_value, (void *c), (c))

static pccl_zmq locked_table(void)
{
    pccl_zmq table = *fake_table();  /* the functions that stay use no shared data */
    table.ctx_new = locked_ctx_new;
    table.ctx_set = locked_ctx_set;
    table.ctx_term = locked_ctx_term;
    table.socket = locked_socket;
    table.close = locked_close;
    table.setsockopt = locked_setsockopt;
    table.getsockopt = locked_getsockopt;
    table.bind = locked_bind;
    table.connect = locked_connect;
    table.socket_monitor = locked_socket_monitor;
    table.poll = locked_poll;
    table.msg_init = locked_msg_init;
    table.msg_init_size = locked_msg_init_size;
    table.msg_init_data = locked_msg_init_data;
    table.msg_send = locked_msg_send;
    table.msg_recv = locked_msg_recv;
    table.msg_close = locked_msg_close;
    table.msg_data = locked_msg_data;
    table.msg_size = locked_msg_size;
    table.msg_more = locked_msg_more;
    table.errno_ = locked_errno_;
    table.atomic_counter_new = locked_atomic_counter_new;
    table.atomic_counter_inc = locked_atomic_counter_inc;
    table.atomic_counter_dec = locked_atomic_counter_dec;
    table.atomic_counter_value = locked_atomic_counter_value;
    return table;
}

static void make_lock(void)
{
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &kind);
    pthread_mutexattr_destroy(&kind);
}

/* ---- the threads ---- */

static struct peers peers;
static bool over;                /* protected by the lock */

static bool is_over(void)
{
    bool result;
    pthread_mutex_lock(&lock);
    result = over;
    pthread_mutex_unlock(&lock);
    return result;
}

static void *run_engine(void *argument)
{
    struct peer *peer = argument;
    int status = 0;
    while (status >= 0 && !is_over()) {
        status = pccl_engine_step(peer->engine);
        if (status == 0)
            sched_yield();
    }
    peer->error = status;
    return NULL;
}

/* ---- the caller of all engines: these functions are called with the lock held ---- */

static struct job jobs[OPS];
static const struct job *aborted;    /* do_harm() has aborted this op */
static bool closed;                  /* do_harm() has closed a stream */

static int count(int who, enum pccl_event_kind kind, const struct job *job)
{
    return peers_count(&peers, who, kind, job->op);
}

static void make_jobs(void)
{
    int i;
    for (i = 0; i < OPS; i++) {
        struct job job = {0};
        job.op = job.tag = (uint64_t)i + 1;
        job.seq = (uint64_t)i + 10;
        job.what = (enum pccl_collective)(1 + fake_random(PCCL_COLLECTIVES_N));
        job.root = (uint32_t)fake_random(N);
        job.dtype = PCCL_F32;
        job.redop = PCCL_SUM;
        if (job.what == PCCL_ALL_REDUCE && fake_random(2) == 0)
            job.format = PCCL_BLOCK_8;
        job.count = 1 + fake_random(20000);
        job.in_place = fake_random(2) == 0;
        job.chunk_bytes = 256 + fake_random(4096);
        jobs[i] = job;
        job_make(&jobs[i], N);
    }
}

/* Registers and starts all ops on all peers. Each peer starts them in another order. */
static void launch(void)
{
    int who, i;
    for (who = 0; who < N; who++) {
        int first = (int)fake_random(OPS);
        for (i = 0; i < OPS; i++)
            job_register(&peers, who, &jobs[i]);
        for (i = 0; i < OPS; i++)
            job_start(&peers, who, &jobs[(who % 2 == 0 ? first + i : first + OPS - i) % OPS]);
    }
}

static void do_harm(enum harm harm)
{
    int who = (int)fake_random(N);
    pccl_command command = {0};
    command.kind = PCCL_CLOSE_STREAM;
    command.stream = 1;
    if (harm == CUT_A_LANE)
        (void)fake_cut(peers.peer[who].endpoint);
    if (harm == ABORT_AN_OP) {
        aborted = &jobs[fake_random(OPS)];
        peers_end(&peers, who, PCCL_ABORT, aborted->op);
    }
    if (harm == CLOSE_A_STREAM) {
        closed = true;
        peers_command(&peers, who, &command);
    }
}

/* Whether an op may not complete on all peers: it failed, or was aborted, or a stream was lost,
 * perhaps with data of an op that is complete and forgotten on its sender. */
static bool is_hopeless(const struct job *job)
{
    bool hopeless = job == aborted || closed;
    int who;
    for (who = 0; who < N; who++)
        hopeless |= count(who, PCCL_FAILED, job) > 0
            || peers_count(&peers, who, PCCL_STREAM_LOST, 1) > 0;
    return hopeless;
}

static bool is_complete(const struct job *job)
{
    int who, complete = 0;
    for (who = 0; who < N; who++)
        complete += count(who, PCCL_COMPLETE, job);
    return complete == N;
}

static bool all_have_an_outcome(void)
{
    int i;
    for (i = 0; i < OPS; i++)
        if (!is_complete(&jobs[i]) && !is_hopeless(&jobs[i]))
            return false;
    return true;
}

/* Ends all ops. Commits those that were not aborted and whose result all peers hold, even if a
 * stream was lost after that. Notes which are committed. */
static void end_all(bool *committed)
{
    int who, i;
    for (i = 0; i < OPS; i++) {
        committed[i] = is_complete(&jobs[i]) && &jobs[i] != aborted;
        for (who = 0; who < N; who++)
            peers_end(&peers, who, committed[i] ? PCCL_COMMIT : PCCL_ABORT, jobs[i].op);
    }
}

/* Whether every COMMIT and ABORT is answered, even those for forgotten ops. */
static bool all_are_settled(void)
{
    int who, i;
    for (i = 0; i < OPS; i++)
        for (who = 0; who < N; who++)
            if (count(who, PCCL_SETTLED, &jobs[i]) == 0)
                return false;
    return true;
}

static int n_committed, n_aborted;

static void check(const bool *committed)
{
    int who, i;
    for (i = 0; i < OPS; i++) {
        n_committed += committed[i];
        n_aborted += !committed[i];
        for (who = 0; who < N; who++)
            CHECK(committed[i] ? job_has_result(&jobs[i], who) : job_is_restored(&jobs[i], who));
    }
}

/* ---- rounds ---- */

static int completions(void)
{
    int who, i, n = 0;
    for (i = 0; i < OPS; i++)
        for (who = 0; who < N; who++)
            n += count(who, PCCL_COMPLETE, &jobs[i]);
    return n;
}

/* Lets the engines work until `is_so` is true. Does harm once `harm_at` ops have completed. */
static void wait_until(bool (*is_so)(void), enum harm harm, int harm_at)
{
    bool so = false;
    int i;
    while (!so) {
        pthread_mutex_lock(&lock);
        (void)fake_tick();
        for (i = 0; i < N; i++)
            peers_read(&peers.peer[i]);
        if (harm != NO_HARM && completions() >= harm_at) {
            do_harm(harm);
            harm = NO_HARM;
        }
        so = is_so();
        pthread_mutex_unlock(&lock);
        sched_yield();
    }
}

static void run_round(uint64_t seed, enum harm harm, const pccl_zmq *table)
{
    pthread_t threads[N];
    pccl_options options = peers_options();
    bool committed[OPS];
    int i, harm_at;
    fake_reset(seed);
    over = false;
    aborted = NULL;
    closed = false;
    peers_open_by(&peers, N, &options, table);
    peers_connect_ring(&peers, 3, 2);
    fake_refuse(10);
    make_jobs();
    launch();
    harm_at = (int)(fake_random(2) * fake_random(OPS * N));
    if (harm_at == 0) {              /* now, as a busy machine might complete all ops before */
        do_harm(harm);
        harm = NO_HARM;
    }
    for (i = 0; i < N; i++)
        CHECK(pthread_create(&threads[i], NULL, run_engine, &peers.peer[i]) == 0);
    wait_until(all_have_an_outcome, harm, harm_at);
    pthread_mutex_lock(&lock);
    end_all(committed);
    pthread_mutex_unlock(&lock);
    wait_until(all_are_settled, NO_HARM, 0);
    pthread_mutex_lock(&lock);
    over = true;
    pthread_mutex_unlock(&lock);
    for (i = 0; i < N; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(peers.peer[i].error >= 0);
    }
    check(committed);
    peers_close(&peers);
    for (i = 0; i < OPS; i++)
        job_free(&jobs[i]);
}

int main(void)
{
    pccl_zmq table;
    uint64_t seed;
    make_lock();
    table = locked_table();
    (void)alarm(PATIENCE_S);         /* a hang is a failure */
    for (seed = 1; seed <= ROUNDS; seed++)
        run_round(seed, (enum harm)(seed % HARMS), &table);
    CHECK(n_committed > ROUNDS && n_aborted > ROUNDS);
    return check_report("threads");
}
