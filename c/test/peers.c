/* peers.c - see peers.h. */
#include "peers.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zmq/zmqdefs.h"

enum { IDLE_PASSES = 60 };           /* a refused send makes a busy engine look idle for a while */

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
