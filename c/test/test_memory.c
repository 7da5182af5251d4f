/* test_memory.c - every allocation of a collective fails in turn. The linker puts these before
 * libc's. */
#include "check.h"
#include "job.h"

#include <stdlib.h>
#include <string.h>

static long fail_at = -1;            /* so many allocations from now; -1: never */
static int failed;
static bool in_engine;

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t size);
int __real_pccl_engine_step(pccl_engine *engine);
int __wrap_pccl_engine_step(pccl_engine *engine);

static bool is_out_of_memory(void)
{
    bool now = in_engine && !fake_allocates && fail_at >= 0 && fail_at-- == 0;
    failed += now;
    return now;
}

void *__wrap_malloc(size_t size)
{
    return is_out_of_memory() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return is_out_of_memory() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *old, size_t size)
{
    return is_out_of_memory() ? NULL : __real_realloc(old, size);
}

/* Only what an engine allocates is to fail, not what the test does. */
int __wrap_pccl_engine_step(pccl_engine *engine)
{
    int moved;
    in_engine = true;
    moved = __real_pccl_engine_step(engine);
    in_engine = false;
    return moved;
}

/* The nth allocation of the engines fails: the op fails or the engine stops, or it was not
 * needed; an abort or the end of the engine gives the buffers back. */
static bool run(int nth, enum pccl_collective what, bool in_place, int format)
{
    static struct peers peers;
    pccl_options options = peers_options();
    struct job job = job_plain(2000, in_place);
    int i, told = 0;
    job.what = what;
    job.format = format;
    job_make(&job, 3);
    peers_open(&peers, 3, &options, 2);
    peers_connect_ring(&peers, 2, 1);
    for (i = 0; i < 3; i++) {
        job_register(&peers, i, &job);
        job_start(&peers, i, &job);
    }
    failed = 0;
    fail_at = nth;
    for (i = 0; i < 400; i++)
        (void)peers_step(&peers);
    fail_at = -1;
    for (i = 0; i < 3; i++) {
        told += peers_count(&peers, i, PCCL_FAILED, 1) > 0 || peers.peer[i].error < 0
            || peers_count(&peers, i, PCCL_STREAM_LOST, 1) > 0;
        peers_end(&peers, i, PCCL_ABORT, 1);
    }
    peers_run(&peers);
    if (!failed)
        CHECK(told == 0);
    else
        CHECK(told > 0);
    peers_close(&peers);
    for (i = 0; i < 3; i++)
        CHECK(job_is_restored(&job, i));
    job_free(&job);
    return failed > 0;
}

int main(void)
{
    int what, in_place, nth;
    for (what = PCCL_ALL_REDUCE; what <= PCCL_BROADCAST; what++)
        for (in_place = 0; in_place < 2; in_place++) {
            nth = 0;
            while (run(nth, (enum pccl_collective)what, in_place, PCCL_UNQUANTIZED))
                nth++;
            CHECK(nth > 20);
        }
    nth = 0;
    while (run(nth, PCCL_ALL_REDUCE, true, PCCL_BLOCK_8))
        nth++;
    CHECK(nth > 20);
    return check_report("memory");
}
