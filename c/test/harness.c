/* harness.c - see harness.h. */
#include "harness.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/bitmap.h"
#include "engine/ring.h"
#include "zmq/zmqdefs.h"

enum { IDLE_PASSES = 60 };           /* after refused sends, a busy engine looks idle for a while */

pccl_options peers_options(void)
{
    pccl_options options = {0};
    options.io_threads = 1;
    options.forward_max = 8;
    options.recv_hwm = 4;
    options.connect_timeout_ms = 1000;
    options.copy_max = 256;
    options.fetch_window = 3;
    return options;
}

void peers_open(struct peers *peers, int n, const pccl_options *options, uint64_t seed)
{
    fake_reset(seed);
    peers_open_by(peers, n, options, fake_table());
}

void peers_open_by(struct peers *peers, int n, const pccl_options *options, const pccl_zmq *zmq)
{
    int i, error;
    memset(peers, 0, sizeof *peers);
    peers->n = n;
    for (i = 0; i < n; i++) {
        struct peer *peer = &peers->peer[i];
        peer->engine = pccl_engine_new(zmq, options, &error);
        assert(peer->engine != NULL);
        error = pccl_engine_bind(peer->engine, "tcp://*:*", peer->endpoint, sizeof peer->endpoint);
        assert(error == PCCL_OK);
        peer->pair = zmq->socket(pccl_engine_context(peer->engine), ZMQ_PAIR);
        (void)zmq->connect(peer->pair, "inproc://pccl-engine");
    }
}

void peers_close(struct peers *peers)
{
    int i;
    for (i = 0; i < peers->n; i++) {
        (void)fake_table()->close(peers->peer[i].pair);
        pccl_engine_free(peers->peer[i].engine);
    }
    assert(fake_open() == 0);
    (void)fake_open();
}

void peers_command(struct peers *peers, int who, const pccl_command *command)
{
    pccl_msg message;
    if (fake_table()->msg_init_size(&message, sizeof *command) < 0)
        abort();
    memcpy(fake_table()->msg_data(&message), command, sizeof *command);
    (void)fake_table()->msg_send(&message, peers->peer[who].pair, ZMQ_DONTWAIT);
}

void peers_close_stream(struct peers *peers, int who, uint32_t stream)
{
    pccl_command command = {0};
    command.kind = PCCL_CLOSE_STREAM;
    command.stream = stream;
    peers_command(peers, who, &command);
}

void peers_lose_stream(struct peers *peers, int who, uint32_t stream)
{
    pccl_command command = {0};
    command.kind = PCCL_LOSE_STREAM;
    command.stream = stream;
    (void)snprintf(command.endpoint, sizeof command.endpoint, "unreachable");
    peers_command(peers, who, &command);
}

void peers_expect(struct peers *peers, int who, uint64_t nonce)
{
    pccl_command command = {0};
    command.kind = PCCL_EXPECT;
    command.peer = (uint64_t)who + 1;
    command.nonce = nonce;
    peers_command(peers, who, &command);
}

void peers_inject(struct peers *peers, int who, const struct wire_header *header, size_t payload)
{
    unsigned char *bytes = calloc(1, WIRE_HEADER_BYTES + payload);
    if (bytes == NULL)
        abort();
    wire_encode(header, bytes);
    fake_inject(peers->peer[who].endpoint, bytes, WIRE_HEADER_BYTES + payload, NULL, 0);
    free(bytes);
}

void peers_stream(struct peers *peers, int from, int to, uint32_t number, uint32_t lanes,
                  uint32_t hwm)
{
    pccl_command command = {0};
    command.kind = PCCL_OPEN_STREAM;
    command.stream = number;
    peers_command(peers, from, &command);
    command.kind = PCCL_CONNECT_STREAM;
    command.lanes = lanes;
    command.hwm = hwm;
    (void)snprintf(command.endpoint, sizeof command.endpoint, "%s", peers->peer[to].endpoint);
    peers_command(peers, from, &command);
}

void peers_connect_ring(struct peers *peers, uint32_t lanes, uint32_t hwm)
{
    int i;
    for (i = 0; i < peers->n; i++)
        peers_stream(peers, i, (i + 1) % peers->n, 1, lanes, hwm);
}

/* Creates `n` engines and their streams, with lanes and limits that depend on the seed. */
static void open_rings(struct peers *peers, int n, uint64_t seed, uint32_t rings, bool direct)
{
    pccl_options options = peers_options();
    int i, to;
    options.forward_max = 1 + (uint32_t)(seed % 8);
    peers_open(peers, n, &options, seed);
    if (n > 1)
        peers_connect_ring(peers, 1 + (uint32_t)(seed % 3), 1 + (uint32_t)(seed % 4));
    for (i = 0; i < n; i++) {
        if (rings > 1)
            peers_stream(peers, i, (i + n - 1) % n, 2, 1, 1);
        for (to = 0; direct && to < n; to++)
            if (to != i)
                peers_stream(peers, i, to, TEST_DIRECT + (uint32_t)to, 1, 1);
    }
}

void peers_end(struct peers *peers, int who, enum pccl_command_kind kind, uint64_t op)
{
    pccl_command command = {0};
    command.kind = kind;
    command.op = op;
    peers_command(peers, who, &command);
}

void peers_read(struct peer *peer)
{
    pccl_msg message;
    fake_table()->msg_init(&message);
    while (fake_table()->msg_recv(&message, peer->pair, ZMQ_DONTWAIT) >= 0) {
        assert(fake_table()->msg_size(&message) == sizeof(pccl_event));
        assert(peer->n_events < TEST_EVENTS_MAX);
        memcpy(&peer->events[peer->n_events++], fake_table()->msg_data(&message),
               sizeof(pccl_event));
        if (peer->events[peer->n_events - 1].kind == PCCL_STREAM_UP) {
            peer->n_events--;
            peer->n_up++;
        }
    }
    fake_table()->msg_close(&message);
}

bool peers_step(struct peers *peers)
{
    bool moved = fake_tick();
    int i, first = (int)fake_random((uint32_t)peers->n);
    for (i = 0; i < peers->n; i++) {
        struct peer *peer = &peers->peer[(first + i) % peers->n];
        int status = peer->error < 0 ? 0 : pccl_engine_step(peer->engine);
        if (status < 0)
            peer->error = status;
        moved |= status > 0;
        peers_read(peer);
    }
    return moved;
}

void peers_run(struct peers *peers)
{
    int idle = 0;
    while (idle < IDLE_PASSES)
        idle = peers_step(peers) ? 0 : idle + 1;
}

int peers_count(const struct peers *peers, int who, enum pccl_event_kind kind, uint64_t op)
{
    const struct peer *peer = &peers->peer[who];
    int i, n = 0;
    for (i = 0; i < peer->n_events; i++)
        n += peer->events[i].kind == (uint32_t)kind
            && (kind == PCCL_STREAM_LOST ? peer->events[i].stream : peer->events[i].op) == op;
    return n;
}

const pccl_event *peers_event(const struct peers *peers, int who, enum pccl_event_kind kind,
                              uint64_t op)
{
    const struct peer *peer = &peers->peer[who];
    int i;
    for (i = peer->n_events - 1; i >= 0; i--)
        if (peer->events[i].kind == (uint32_t)kind
            && (kind == PCCL_STREAM_LOST ? peer->events[i].stream : peer->events[i].op) == op)
            return &peer->events[i];
    return NULL;
}

const pccl_event *peers_last_event(const struct peers *peers, int who, uint64_t op)
{
    const pccl_event *event = peers_event(peers, who, PCCL_SETTLED, op);
    return event != NULL ? event : peers_event(peers, who, PCCL_COMPLETE, op);
}

/* As job_start_late(), for any kind of work. */
static bool start_late(struct peers *peers, uint64_t late,
                       void (*start)(struct peers *peers, int who, const void *work),
                       const void *work)
{
    bool silent = true;
    int i;
    for (i = 0; i < peers->n; i++)
        if (!(late >> i & 1))
            start(peers, i, work);
    peers_run(peers);
    for (i = 0; i < peers->n; i++)
        if (late >> i & 1) {
            silent &= peers->peer[i].n_events == 0;
            start(peers, i, work);
            peers_run(peers);
        }
    return silent;
}

/* ---- collectives ---- */

struct job job_plain(uint64_t count, bool in_place)
{
    struct job job = {0};
    job.op = 1;
    job.tag = 101;
    job.seq = 10;
    job.what = PCCL_ALL_REDUCE;
    job.dtype = PCCL_F32;
    job.redop = PCCL_SUM;
    job.count = count;
    job.in_place = in_place;
    job.chunk_bytes = 1024;
    return job;
}

struct job job_crowd(uint64_t count, bool in_place)
{
    static const uint64_t counts[TEST_PARTS_MAX] = {0, 1, 0, 63, 64, 65, 7, 5, 130, 0, 70, 0};
    struct job job = job_plain(count, in_place);
    int k;
    job.n_parts = TEST_PARTS_MAX;
    for (k = 0; k < TEST_PARTS_MAX; k++) {
        job.part[k].dtype = k == 7 || k == 8 ? PCCL_F64 : PCCL_F32;
        job.part[k].count = k == 0 ? count : counts[k];
    }
    return job;
}

/* Stores the small whole number `value` as an element. It is exact in every type, so reducing in
 * any order gives the same result. */
static void put_element(int dtype, unsigned char *at, unsigned value)
{
    static const uint16_t f16[] = {0x0000, 0x3c00, 0x4000, 0x4200, 0x4400};
    static const uint16_t bf16[] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080};
    float f32 = (float)value;
    double f64 = (double)value;
    uint64_t whole = value;
    unsigned i;
    switch (dtype) {
    case PCCL_F16: memcpy(at, &f16[value], 2); break;
    case PCCL_BF16: memcpy(at, &bf16[value], 2); break;
    case PCCL_F32: memcpy(at, &f32, 4); break;
    case PCCL_F64: memcpy(at, &f64, 8); break;
    default: {
        const uint16_t one = 1;
        bool little = *(const unsigned char *)&one == 1;
        size_t width = pccl_dtype_size(dtype);
        for (i = 0; i < width; i++)
            at[little ? i : width - 1 - i] = (unsigned char)(whole >> 8 * i);
    }
    }
}

static unsigned char *allocate(size_t bytes)
{
    unsigned char *memory = malloc(bytes + 1);
    if (memory == NULL)
        abort();
    memset(memory, 0xee, bytes + 1);
    return memory + 1;               /* odd: buffers may have any alignment */
}

/* The numbers of slices in send and in recv. */
static size_t send_slices(const struct job *job)
{
    return job->what == PCCL_REDUCE_SCATTER ? (size_t)job->n : 1;
}

static size_t recv_slices(const struct job *job)
{
    return job->what == PCCL_ALL_GATHER ? (size_t)job->n : 1;
}

static size_t slice_bytes(const struct job *job, int k)
{
    return (size_t)job->part[k].count * pccl_dtype_size(job->part[k].dtype);
}

/* Where the slice of a rank begins in a buffer of all slices. */
static size_t slice_at(const struct job *job, int k, int rank)
{
    size_t rows = job->unlike ? 0 : (size_t)rank;
    int i;
    for (i = 0; job->unlike && i < rank; i++)
        rows += (size_t)job->rows[i];
    return rows * slice_bytes(job, k);
}

static size_t send_bytes(const struct job *job, int k, int who)
{
    return slice_bytes(job, k) * (job->unlike ? (size_t)job->rows[who] : send_slices(job));
}

static size_t recv_bytes(const struct job *job, int k)
{
    return slice_at(job, k, (int)recv_slices(job));
}

/* Whether send and recv of a part are separate memory. */
static bool is_apart(const struct job *job, int k)
{
    return (!job->in_place || (job->alternating && k % 2 == 0)) && job->what != PCCL_BROADCAST;
}

static bool has_errors(const struct job *job, int k)
{
    return job->what == PCCL_ALL_REDUCE && job->format != PCCL_UNQUANTIZED
        && job->redop <= PCCL_AVG && job->part[k].dtype == PCCL_F32;
}

/* Allocates the buffers of one part of one peer. In place, the smaller one lies in the larger. */
static void make_part(struct job *job, int who, int k)
{
    pccl_part *part = &job->parts[who][k];
    size_t width = pccl_dtype_size(job->part[k].dtype), bytes = send_bytes(job, k, who), j;
    size_t mine = slice_at(job, k, who);
    unsigned char *send, *recv;
    if (is_apart(job, k)) {
        send = allocate(bytes);
        recv = allocate(recv_bytes(job, k));
    } else if (job->what == PCCL_ALL_GATHER) {
        recv = allocate(recv_bytes(job, k));
        send = recv + mine;
    } else {
        send = allocate(bytes);
        recv = job->what == PCCL_REDUCE_SCATTER ? send + mine : send;
    }
    job->given[who][k] = allocate(bytes);
    for (j = 0; j < bytes / width; j++)
        put_element(job->part[k].dtype, job->given[who][k] + j * width,
                    1 + (unsigned)(j * 7 + (unsigned)who * 3 + j / 5 + (unsigned)k) % 2);
    memcpy(send, job->given[who][k], bytes);
    if (job->window > 0)
        memset(send, 0x5a, bytes);
    part->send = send;
    part->recv = recv;
    part->count = job->part[k].count;
    part->dtype = (uint32_t)job->part[k].dtype;
    if (has_errors(job, k))
        part->error = calloc((size_t)part->count + (part->count == 0), sizeof *part->error);
}

/* The reduction of one part over all peers. */
static unsigned char *reduced(const struct job *job, int k)
{
    size_t bytes = send_bytes(job, k, 0);
    int dtype = job->part[k].dtype, i;
    unsigned char *sum = allocate(bytes);
    memcpy(sum, job->given[0][k], bytes);
    for (i = 1; i < job->n; i++)
        (void)pccl_reduce(dtype, job->redop, sum, sum, job->given[i][k],
                          bytes / pccl_dtype_size(dtype),
                          i == job->n - 1 && dtype >= PCCL_F16 ? (uint32_t)job->n : 1);
    return sum;
}

/* The quantized result of the segment that begins at element `begin` and starts at position s. */
static void reduce_quantized(const struct job *job, unsigned char *sum, int s, uint64_t begin,
                             uint64_t count)
{
    int dtype = job->part[0].dtype, step;
    size_t at = (size_t)begin * pccl_dtype_size(dtype);
    unsigned char *data = allocate((size_t)pccl_quantized_size(job->format, dtype, count));
    (void)pccl_quantize(job->format, dtype, data, job->given[s][0] + at, (size_t)count);
    for (step = 0; step < job->n - 1; step++) {
        bool last = step == job->n - 2;
        (void)pccl_quantized_reduce(job->format, dtype, job->redop, data,
                                    job->given[(s + step + 1) % job->n][0] + at, (size_t)count,
                                    last ? (uint32_t)job->n : 1, last ? sum + at : NULL);
    }
    free(data - 1);
}

/* The quantized reduction of a job of one part, whose segments are those of one ring. */
static void expect_quantized(const struct job *job, unsigned char *sum)
{
    uint32_t n = (uint32_t)job->n, s;
    if (job->what == PCCL_REDUCE) {
        reduce_quantized(job, sum, (int)((job->root + 1) % n), 0, job->part[0].count);
        return;
    }
    for (s = 0; s < n; s++) {
        uint64_t count = job->part[0].count, begin = (s + n - 1) % n * count;
        if (job->what == PCCL_ALL_REDUCE) {
            begin = ring_bound(count, n, s);
            count = ring_bound(count, n, s + 1) - begin;
        }
        reduce_quantized(job, sum, (int)s, begin, count);
    }
}

/* The quantized result of a one-shot, for one part. */
static void expect_combined(const struct job *job, int k, unsigned char *sum)
{
    int dtype = job->part[k].dtype;
    size_t n = (size_t)job->part[k].count;
    size_t bytes = (size_t)pccl_quantized_size(job->format, dtype, n);
    unsigned char *a = allocate(bytes), *b = allocate(bytes);
    (void)pccl_quantize(job->format, dtype, a, job->given[0][k], n);
    (void)pccl_quantize(job->format, dtype, b, job->given[1][k], n);
    (void)pccl_quantized_combine(job->format, dtype, job->redop, sum, a, b, n, 2);
    free(a - 1);
    free(b - 1);
}

/* The result of a segment of a part in two stages: `n` elements from element `at`. */
static void reduce_at_owner(const struct job *job, int k, uint64_t at, uint64_t n,
                            unsigned char *sum)
{
    int dtype = job->part[k].dtype, wide = dtype == PCCL_F64 ? PCCL_F64 : PCCL_F32, i;
    size_t begin = (size_t)at * pccl_dtype_size(dtype), count = (size_t)n;
    unsigned char *data = allocate((size_t)pccl_quantized_size(job->format, dtype, n));
    unsigned char *total = allocate(count * sizeof(double)),
                  *next = allocate(count * sizeof(double));
    for (i = 0; i < job->n; i++) {
        (void)pccl_quantize(job->format, dtype, data, job->given[i][k] + begin, count);
        (void)pccl_dequantize(job->format, wide, i == 0 ? total : next, data, count);
        if (i > 0)
            (void)pccl_reduce(wide, job->redop, total, total, next, count,
                              i == job->n - 1 ? (uint32_t)job->n : 1);
    }
    (void)pccl_quantize(job->format, wide, data, total, count);
    (void)pccl_dequantize(job->format, dtype, sum + begin, data, count);
    free(data - 1);
    free(total - 1);
    free(next - 1);
}

/* The result of a part in two stages: of the pieces into which the segments of all rings cut it. */
static void expect_owners(const struct job *job, int k, unsigned char *sum)
{
    uint64_t from = 0, to;
    uint64_t first = job->twostage == 1 ? job->span : job->span / 128 * 64;
    uint32_t s, ring, n = (uint32_t)job->n;
    int i;
    for (i = 0; i < k; i++)
        from += aligned_blocks(job->part[i].count) * PCCL_ALIGNMENT;
    to = from + job->part[k].count;
    for (ring = 0; ring < job->twostage; ring++)
        for (s = 0; s < n; s++) {
            uint64_t share = ring == 0 ? first : job->span - first;
            uint64_t begin = (ring == 0 ? 0 : first) + ring_bound(share, n, s);
            uint64_t end = (ring == 0 ? 0 : first) + ring_bound(share, n, s + 1);
            begin = begin > from ? begin : from;
            end = end < to ? end : to;
            if (begin < end)
                reduce_at_owner(job, k, begin - from, end - begin, sum);
        }
}

static void expect_part(struct job *job, int k)
{
    size_t slice = slice_bytes(job, k);
    unsigned char *sum = job->unlike ? allocate(0) : reduced(job, k);
    int i, j;
    if (job->format != PCCL_UNQUANTIZED && job->oneshot)
        expect_combined(job, k, sum);
    else if (job->twostage > 0)
        expect_owners(job, k, sum);
    else if (job->format != PCCL_UNQUANTIZED && job->n > 1)
        expect_quantized(job, sum);
    for (i = 0; i < job->n; i++) {
        unsigned char *expected = job->expected[i][k] = allocate(recv_bytes(job, k));
        if (job->what == PCCL_ALL_GATHER)
            for (j = 0; j < job->n; j++)
                memcpy(expected + slice_at(job, k, j), job->given[j][k], send_bytes(job, k, j));
        else if (job->what == PCCL_BROADCAST)
            memcpy(expected, job->given[job->root][k], slice);
        else if (job->what == PCCL_REDUCE && i != (int)job->root && is_apart(job, k))
            continue;                /* only the root's recv is written */
        else if (job->what == PCCL_REDUCE && i != (int)job->root)
            memcpy(expected, job->given[i][k], slice);
        else
            memcpy(expected, sum + (job->what == PCCL_REDUCE_SCATTER ? slice * (size_t)i : 0),
                   slice);
    }
    free(sum - 1);
}

static uint64_t most_rows(const struct job *job)
{
    uint64_t most = job->unlike ? 0 : 1;
    int i;
    for (i = 0; job->unlike && i < job->n; i++)
        most = job->rows[i] > most ? job->rows[i] : most;
    return most;
}

void job_make(struct job *job, int n)
{
    int i, k;
    job->n = n;
    job->span = 0;
    if (job->n_parts == 0) {
        job->n_parts = 1;
        job->part[0].dtype = job->dtype;
        job->part[0].count = job->count;
    }
    for (k = 0; k < job->n_parts; k++) {
        job->span += (job->part[k].count * most_rows(job) + 63) / 64 * 64;
        for (i = 0; i < n; i++)
            make_part(job, i, k);
        expect_part(job, k);
    }
}

void job_free(struct job *job)
{
    int i, k;
    for (i = 0; i < job->n; i++)
        for (k = 0; k < job->n_parts; k++) {
            unsigned char *send = (unsigned char *)job->parts[i][k].send;
            unsigned char *recv = job->parts[i][k].recv;
            free(job->given[i][k] - 1);
            free(job->expected[i][k] - 1);
            free(job->parts[i][k].error);
            if (is_apart(job, k) || job->what == PCCL_ALL_GATHER)
                free(recv - 1);
            if (is_apart(job, k) || job->what != PCCL_ALL_GATHER)
                free(send - 1);
        }
}

void job_register(struct peers *peers, int who, const struct job *job)
{
    pccl_command command = {0};
    command.kind = PCCL_REGISTER;
    command.op = job->op;
    command.op_kind = PCCL_COLLECTIVE;
    command.collective = job->what;
    command.run = TEST_RUN;
    command.tag = job->tag;
    command.min_seq = job->seq - 1;
    command.redop = (uint32_t)job->redop;
    command.window = job->window;
    command.format = (uint32_t)job->format;
    command.parts = job->parts[who];
    command.n_parts = (uint32_t)job->n_parts;
    command.members = (uint32_t)job->n;
    command.recv_rows = job->unlike ? job->rows : NULL;
    peers_command(peers, who, &command);
}

void job_fill(struct peers *peers, int who, const struct job *job, uint64_t from, uint64_t to)
{
    size_t width = pccl_dtype_size(job->part[0].dtype), begin = (size_t)from * width;
    size_t bytes = send_bytes(job, 0, who), end = (size_t)to * width;
    pccl_command command = {0};
    if (begin < bytes)
        memcpy((unsigned char *)job->parts[who][0].send + begin, job->given[who][0] + begin,
               (end < bytes ? end : bytes) - begin);
    command.kind = PCCL_READY;
    command.op = job->op;
    command.offset = from;
    command.length = to - from;
    peers_command(peers, who, &command);
}

void job_open(struct peers *peers, const struct job *job, uint64_t seed)
{
    int i;
    open_rings(peers, job->n, seed, job->rings, job->direct);
    for (i = 0; i < job->n; i++)
        job_register(peers, i, job);
}

void job_close(struct peers *peers, struct job *job)
{
    peers_close(peers);
    job_free(job);
}

void job_open_ring(struct peers *peers, const struct job *job, int n, uint64_t seed)
{
    pccl_options options = peers_options();
    int i;
    peers_open(peers, n, &options, seed);
    peers_connect_ring(peers, 2, 2);
    for (i = 0; i < n; i++)
        job_register(peers, i, job);
}

void job_start_all(struct peers *peers, const struct job *job)
{
    int i;
    for (i = 0; i < peers->n; i++)
        job_start(peers, i, job);
}

static void start_job(struct peers *peers, int who, const void *job)
{
    job_start(peers, who, job);
}

bool job_start_late(struct peers *peers, const struct job *job, uint64_t late)
{
    return start_late(peers, late, start_job, job);
}

/* START or EAGER. */
static void begin(struct peers *peers, int who, const struct job *job, enum pccl_command_kind kind)
{
    static const uint16_t backwards[TEST_PEERS_MAX][TEST_PEERS_MAX] = {
        {0}, {0}, {1, 0}, {2, 1, 0}, {3, 2, 1, 0}, {4, 3, 2, 1, 0}};
    static uint32_t direct[TEST_PEERS_MAX];
    uint32_t n = (uint32_t)job->n, rings = job->rings > 0 ? job->rings : 1, i;
    pccl_command command = {0};
    assert(rings == 1 || n < 6);
    for (i = 0; i < n; i++)
        direct[i] = TEST_DIRECT + i;
    command.kind = kind;
    command.op = job->op;
    command.seq = job->seq;
    command.nonce = TEST_NONCE;
    command.chunk_bytes = job->chunk_bytes;
    command.n_rings = rings;
    command.algorithm = job->twostage ? PCCL_TWO_STAGE : job->oneshot ? PCCL_ONE_SHOT : PCCL_RING;
    command.direct = job->twostage ? direct : NULL;
    command.rings[0].stream = 1;
    command.rings[0].members = command.rings[1].members = n;
    command.rings[0].position = (uint32_t)who;
    command.rings[0].root = job->root;
    command.rings[0].count = rings == 1 ? job->span : job->span / 128 * 64;
    command.rings[1].stream = 2;
    command.rings[1].position = n - 1 - (uint32_t)who;
    command.rings[1].root = n - 1 - job->root;
    command.rings[1].ranks = backwards[n % TEST_PEERS_MAX];
    command.rings[1].begin = command.rings[0].count;
    command.rings[1].count = job->span - command.rings[0].count;
    if (job->eager && kind == PCCL_START)
        command.rings[0].call = command.rings[1].call = job->op;
    peers_command(peers, who, &command);
}

void job_start_at(struct peers *peers, int who, const struct job *job, uint32_t stream,
                  uint32_t position, uint64_t call)
{
    pccl_command command = {0};
    command.kind = PCCL_START;
    command.op = job->op;
    command.seq = job->seq;
    command.nonce = TEST_NONCE;
    command.chunk_bytes = job->chunk_bytes;
    command.n_rings = 1;
    command.rings[0].stream = stream;
    command.rings[0].members = (uint32_t)job->n;
    command.rings[0].position = position;
    command.rings[0].count = job->span;
    command.rings[0].call = call;
    peers_command(peers, who, &command);
}

void job_start(struct peers *peers, int who, const struct job *job)
{
    begin(peers, who, job, PCCL_START);
}

void job_eager(struct peers *peers, int who, const struct job *job)
{
    begin(peers, who, job, PCCL_EAGER);
}

bool job_is_untouched(const struct job *job, int who)
{
    int k;
    size_t j;
    for (k = 0; k < job->n_parts; k++) {
        const unsigned char *send = job->parts[who][k].send, *recv = job->parts[who][k].recv;
        size_t sent = send_bytes(job, k, who);
        size_t received = is_apart(job, k) || job->what == PCCL_ALL_GATHER ? recv_bytes(job, k) : 0;
        if (memcmp(send, job->given[who][k], sent) != 0)
            return false;
        for (j = 0; j < received; j++)
            if (recv[j] != 0xee && (recv + j < send || recv + j >= send + sent))
                return false;
    }
    return true;
}

bool job_has_result(const struct job *job, int who)
{
    int k;
    for (k = 0; k < job->n_parts; k++)
        if (memcmp(job->parts[who][k].recv, job->expected[who][k], recv_bytes(job, k)) != 0)
            return false;
    return true;
}

/* Whether all contributions to an element are together the result and all errors. */
static bool is_conserved(const struct job *job, int k, uint64_t at)
{
    double left = 0;
    float each;
    int i;
    for (i = 0; i < job->n; i++) {
        memcpy(&each, job->given[i][k] + at * sizeof each, sizeof each);
        left += (double)each - (double)job->parts[i][k].error[at];
    }
    memcpy(&each, job->expected[0][k] + at * sizeof each, sizeof each);
    left -= (double)each * (job->redop == PCCL_AVG ? job->n : 1);
    return left < 1e-5 && left > -1e-5;
}

static bool has_right_errors(const struct job *job)
{
    uint64_t at;
    int k;
    for (k = 0; k < job->n_parts; k++)
        for (at = 0; has_errors(job, k) && at < job->part[k].count; at++)
            if (!is_conserved(job, k, at))
                return false;
    return true;
}

bool job_is_restored(const struct job *job, int who)
{
    int k;
    for (k = 0; k < job->n_parts; k++)
        if (memcmp(job->parts[who][k].send, job->given[who][k], send_bytes(job, k, who)) != 0)
            return false;
    return true;
}

bool job_is_right(const struct peers *peers, const struct job *job)
{
    int i;
    for (i = 0; i < peers->n; i++)
        if (peers_count(peers, i, PCCL_COMPLETE, job->op) != 1
            || peers_count(peers, i, PCCL_FAILED, job->op) != 0 || !job_has_result(job, i)
            || (!job->in_place && job->what != PCCL_BROADCAST
                && !job_is_restored(job, i)))
            return false;
    return has_right_errors(job);
}

bool job_commit(struct peers *peers, const struct job *job)
{
    bool good = job_is_right(peers, job);
    int i;
    for (i = 0; i < peers->n; i++) {
        const pccl_event *event = peers_event(peers, i, PCCL_COMPLETE, job->op);
        if (event != NULL && !event->settled)
            peers_end(peers, i, PCCL_COMMIT, job->op);
    }
    peers_run(peers);
    for (i = 0; i < peers->n; i++) {
        const pccl_event *event = peers_event(peers, i, PCCL_COMPLETE, job->op);
        good &= event != NULL && peers_count(peers, i, PCCL_SETTLED, job->op) == !event->settled;
    }
    return good && job_is_right(peers, job);
}

bool job_abort(struct peers *peers, const struct job *job)
{
    bool good = true;
    int i;
    for (i = 0; i < peers->n; i++)
        peers_end(peers, i, PCCL_ABORT, job->op);
    peers_run(peers);
    for (i = 0; i < peers->n; i++) {
        const pccl_event *complete = peers_event(peers, i, PCCL_COMPLETE, job->op);
        good &= peers_count(peers, i, PCCL_SETTLED, job->op) == 1
            && ((complete != NULL && complete->settled) || job_is_restored(job, i));
    }
    return good;
}

/* ---- exchanges ---- */

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

/* The number of rows that one peer has for another. */
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

/* Writes a peer's rows for the others to `at`, or compares them with it. */
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

static void make_rows_of(struct trade *trade, int who, int k)
{
    pccl_part *part = &trade->parts[who][k];
    size_t row = row_bytes(trade, k), sends = (size_t)total(trade->send_rows[who], trade->n) * row;
    size_t recvs = (size_t)total(trade->recv_rows[who], trade->n) * row;
    unsigned char *send = trade->memory[who][k][0] = allocate(sends) - 1;
    unsigned char *recv = trade->memory[who][k][1] = allocate(recvs) - 1;
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
            make_rows_of(trade, i, j);
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

void trade_open(struct peers *peers, const struct trade *trade, uint64_t seed)
{
    int i;
    open_rings(peers, trade->n, seed, trade->rings, trade->direct);
    for (i = 0; i < trade->n; i++)
        trade_register(peers, i, trade);
}

void trade_close(struct peers *peers, struct trade *trade)
{
    peers_close(peers);
    trade_free(trade);
}

void trade_start_all(struct peers *peers, const struct trade *trade)
{
    int i;
    for (i = 0; i < peers->n; i++)
        trade_start(peers, i, trade);
}

static void start_trade(struct peers *peers, int who, const void *trade)
{
    trade_start(peers, who, trade);
}

bool trade_start_late(struct peers *peers, const struct trade *trade, uint64_t late)
{
    return start_late(peers, late, start_trade, trade);
}

void trade_start(struct peers *peers, int who, const struct trade *trade)
{
    static uint16_t backwards[TEST_PEERS_MAX];       /* engines read it until SETTLED */
    static uint32_t direct[TEST_PEERS_MAX];
    uint32_t n = (uint32_t)trade->n, i;
    pccl_command command = {0};
    for (i = 0; i < n; i++) {
        backwards[i] = (uint16_t)(n - 1 - i);
        direct[i] = TEST_DIRECT + i;
    }
    command.kind = PCCL_START;
    command.op = TRADE_OP;
    command.direct = trade->direct ? direct : NULL;
    command.seq = TRADE_SEQ;
    command.nonce = TEST_NONCE;
    command.chunk_bytes = trade->chunk_bytes;
    command.n_rings = trade->rings > 0 ? trade->rings : 1;
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
