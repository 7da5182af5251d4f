/* job.h - a collective on all peers of the fake network: its buffers and expected results. */
#ifndef PCCL_JOB_H
#define PCCL_JOB_H

#include "peers.h"

enum { TEST_PARTS_MAX = 12 };

struct job {
    uint64_t op, tag, seq;
    enum pccl_collective what;
    int redop, format;
    uint32_t root;
    bool in_place, oneshot;
    bool alternating;                        /* in place only every second array is */
    bool eager;                              /* START says that the others may have sent before */
    uint32_t chunk_bytes;
    uint64_t window;                         /* not 0: send is filled by job_fill() */
    int n_parts;                             /* 0: one of this type and count */
    struct { int dtype; uint64_t count; } part[TEST_PARTS_MAX];
    int dtype;
    uint64_t count;
    bool unlike;                             /* of an all-gather: the slices differ, by `rows` */
    uint64_t rows[TEST_PEERS_MAX];           /* by rank; a part's count is that of a row then */
    int n;
    uint64_t span;                           /* offsets of a slice */
    pccl_part parts[TEST_PEERS_MAX][TEST_PARTS_MAX];
    unsigned char *given[TEST_PEERS_MAX][TEST_PARTS_MAX];   /* what send held in the beginning */
    unsigned char *expected[TEST_PEERS_MAX][TEST_PARTS_MAX];
};

/* An all-reduce of `count` floats under op 1. */
struct job job_plain(uint64_t count, bool in_place);

/* The same of TEST_PARTS_MAX arrays, most of which are smaller than a chunk: `count` floats, more
 * floats, doubles and floats again, with empty ones in between. */
struct job job_crowd(uint64_t count, bool in_place);

/* Makes buffers with small whole numbers, at odd addresses, and the expected results. */
void job_make(struct job *job, int n);
void job_free(struct job *job);

void job_register(struct peers *peers, int who, const struct job *job);

/* Makes `n` engines in one ring of two lanes, all of which know of the job. */
void job_open_ring(struct peers *peers, const struct job *job, int n, uint64_t seed);

/* Puts a peer's contribution into its memory between two offsets of its only part, and says so. */
void job_fill(struct peers *peers, int who, const struct job *job, uint64_t from, uint64_t to);

/* START in one ring over stream 1; with `rings` 2 in another one over stream 2 as well, in the
 * opposite direction. */
void job_start(struct peers *peers, int who, const struct job *job);
void job_start_all(struct peers *peers, const struct job *job);
void job_start_rings(struct peers *peers, int who, const struct job *job, uint32_t rings);

/* EAGER, in the same rings. */
void job_eager(struct peers *peers, int who, const struct job *job, uint32_t rings);

/* Whether every peer holds the result, and send is as it was where it must be. */
bool job_is_right(const struct peers *peers, const struct job *job);

/* Whether the memory that an aborted op must leave unchanged is as it was. */
bool job_is_restored(const struct job *job, int who);

/* Whether no byte of the peer's memory has changed since job_make(). */
bool job_is_untouched(const struct job *job, int who);

/* Whether the peer's recv holds the result. */
bool job_has_result(const struct job *job, int who);

/* Commits the op where that is asked for, and says whether all is settled. */
bool job_commit(struct peers *peers, const struct job *job);

/* Aborts the op on all peers, and says whether all is settled and as it was. */
bool job_abort(struct peers *peers, const struct job *job);

#endif
