/* peers.c - see peers.h. */
#include "peers.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zmqdefs.h"

enum { IDLE_PASSES = 60 };           /* forced EAGAIN makes busy engines look idle for a while */

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

void peers_order(struct peers *peers, int who, const pccl_order *order)
{
    pccl_msg message;
    if (fake_table()->msg_init_size(&message, sizeof *order) < 0)
        abort();
    memcpy(fake_table()->msg_data(&message), order, sizeof *order);
    (void)fake_table()->msg_send(&message, peers->peer[who].pair, ZMQ_DONTWAIT);
}

void peers_stream(struct peers *peers, int from, int to, uint32_t number, uint32_t lanes,
                  uint32_t hwm)
{
    pccl_order order = {0};
    order.kind = PCCL_OPEN_STREAM;
    order.stream = number;
    order.lanes = lanes;
    order.hwm = hwm;
    (void)snprintf(order.endpoint, sizeof order.endpoint, "%s", peers->peer[to].endpoint);
    peers_order(peers, from, &order);
}

void peers_connect_ring(struct peers *peers, uint32_t lanes, uint32_t hwm)
{
    int i;
    for (i = 0; i < peers->n; i++)
        peers_stream(peers, i, (i + 1) % peers->n, 1, lanes, hwm);
}

void peers_end(struct peers *peers, int who, enum pccl_order_kind kind, uint64_t op)
{
    pccl_order order = {0};
    order.kind = kind;
    order.op = op;
    peers_order(peers, who, &order);
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

/* ---- jobs ---- */

/* The small whole number `value` as an element: exact in every type, so that any order of
 * reducing is right. */
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
    return memory + 1;               /* odd: buffers may have any alignment */
}

void job_make(struct job *job, int n)
{
    size_t width = pccl_dtype_size(job->dtype);
    uint64_t j;
    int i;
    job->bytes = (size_t)job->count * width;
    job->expected = allocate(job->bytes);
    for (i = 0; i < n; i++) {
        job->given[i] = allocate(job->bytes);
        job->send[i] = allocate(job->bytes);
        for (j = 0; j < job->count; j++)
            put_element(job->dtype, job->given[i] + j * width,
                        1 + (unsigned)(j * 7 + (unsigned)i * 3 + j / 5) % 2);
        memcpy(job->send[i], job->given[i], job->bytes);
        job->recv[i] = job->in_place ? job->send[i] : allocate(job->bytes);
        if (!job->in_place)
            memset(job->recv[i], 0xee, job->bytes);
        if (i == 0)
            memcpy(job->expected, job->given[0], job->bytes);
        else
            (void)pccl_reduce(job->dtype, job->redop, job->expected, job->expected, job->given[i],
                              (size_t)job->count, i == n - 1 ? (uint32_t)n : 1);
    }
}

void job_free(struct job *job)
{
    int i;
    free(job->expected - 1);
    for (i = 0; i < TEST_PEERS_MAX && job->given[i] != NULL; i++) {
        free(job->given[i] - 1);
        free(job->send[i] - 1);
        if (!job->in_place)
            free(job->recv[i] - 1);
    }
}

void job_register(struct peers *peers, int who, const struct job *job)
{
    pccl_order order = {0};
    order.kind = PCCL_REGISTER;
    order.op = job->op;
    order.op_kind = PCCL_ALL_REDUCE;
    order.run = TEST_RUN;
    order.tag = job->tag;
    order.min_seq = job->seq - 1;
    order.dtype = (uint32_t)job->dtype;
    order.redop = (uint32_t)job->redop;
    order.count = job->count;
    order.send = job->send[who];
    order.recv = job->recv[who];
    peers_order(peers, who, &order);
}

void job_start(struct peers *peers, int who, const struct job *job)
{
    pccl_order order = {0};
    order.kind = PCCL_START;
    order.op = job->op;
    order.seq = job->seq;
    order.epoch = TEST_EPOCH;
    order.chunk_bytes = job->chunk_bytes;
    order.n_rings = 1;
    order.rings[0].stream = 1;
    order.rings[0].members = (uint32_t)peers->n;
    order.rings[0].position = (uint32_t)who;
    order.rings[0].count = job->count;
    peers_order(peers, who, &order);
}

bool job_is_right(const struct peers *peers, const struct job *job)
{
    int i;
    for (i = 0; i < peers->n; i++)
        if (peers_count(peers, i, PCCL_COMPLETE, job->op) != 1
            || peers_count(peers, i, PCCL_FAILED, job->op) != 0
            || memcmp(job->recv[i], job->expected, job->bytes) != 0
            || (!job->in_place && memcmp(job->send[i], job->given[i], job->bytes) != 0))
            return false;
    return true;
}

bool job_is_restored(const struct job *job, int who)
{
    return memcmp(job->send[who], job->given[who], job->bytes) == 0;
}

bool job_commit(struct peers *peers, const struct job *job)
{
    bool settled = true;
    int i;
    for (i = 0; i < peers->n; i++) {
        const pccl_event *event = peers_event(peers, i, PCCL_COMPLETE, job->op);
        if (event != NULL && !event->settled)
            peers_end(peers, i, PCCL_COMMIT, job->op);
    }
    peers_run(peers);
    for (i = 0; i < peers->n; i++) {
        const pccl_event *event = peers_event(peers, i, PCCL_COMPLETE, job->op);
        settled &= event != NULL && peers_count(peers, i, PCCL_SETTLED, job->op) == !event->settled;
    }
    return settled;
}
