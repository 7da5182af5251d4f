/* drain.c - drops the rest of a message of many frames, without running Python for each. */
#include "pccl.h"
#include "zmq/zmqdefs.h"

int64_t pccl_drain(const pccl_zmq *zmq, void *socket)
{
    int64_t frames = 0;
    int more = 1;
    while (more) {
        pccl_msg msg;
        zmq->msg_init(&msg);
        if (zmq->msg_recv(&msg, socket, ZMQ_DONTWAIT) < 0) {
            zmq->msg_close(&msg);
            break;
        }
        frames++;
        more = zmq->msg_more(&msg);
        zmq->msg_close(&msg);
    }
    return frames;
}
