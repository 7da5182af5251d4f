/* test_drain.c - what is left of a message is dropped, and the next one is still there. */
#include "check.h"
#include "fake.h"
#include "zmq/zmqdefs.h"

static int next_size(const pccl_zmq *zmq, void *socket)
{
    pccl_msg msg;
    int size;
    zmq->msg_init(&msg);
    size = zmq->msg_recv(&msg, socket, ZMQ_DONTWAIT);
    zmq->msg_close(&msg);
    return size;
}

int main(void)
{
    const char *endpoint = "tcp://drain:1";
    const pccl_zmq *zmq = fake_table();
    void *ctx, *pull;
    fake_reset(1);
    ctx = zmq->ctx_new();
    pull = zmq->socket(ctx, ZMQ_PULL);
    CHECK(zmq->bind(pull, endpoint) == 0);
    fake_inject(endpoint, "four", 4, "rest", 4);
    fake_inject(endpoint, "three", 5, NULL, 0);
    CHECK(next_size(zmq, pull) == 4);
    CHECK(pccl_drain(zmq, pull) == 1);
    CHECK(next_size(zmq, pull) == 5);
    CHECK(pccl_drain(zmq, pull) == 0);
    zmq->close(pull);
    zmq->ctx_term(ctx);
    while (fake_tick())
        ;
    return check_report("drain");
}
