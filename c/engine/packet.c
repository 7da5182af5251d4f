/* packet.c - messages of one or two frames: the header and its payload.
 *
 * Few bytes are copied behind their header into one frame: an allocation and a copy cost less
 * than a second frame. Many are referred to: a frame of the header, and one that points into the
 * op's buffer. What is received and sent on keeps the form it came in. */
#include "engine/engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct packet *packet_new(void)
{
    return calloc(1, sizeof(struct packet));
}

void packet_clear(const pccl_zmq *zmq, struct packet *packet)
{
    while (packet->frames > 0)
        zmq->msg_close(&packet->frame[--packet->frames]);
    packet->bytes = 0;
    packet->refers = false;
    packet->op = NULL;
}

void packet_free(const pccl_zmq *zmq, struct packet *packet)
{
    packet_clear(zmq, packet);
    free(packet);
}

/* Receives one frame: 1, 0 when there is none, or PCCL_EZMQ. */
static int receive_frame(pccl_engine *engine, pccl_msg *frame)
{
    const pccl_zmq *zmq = engine->zmq;
    int error;
    zmq->msg_init(frame);
    while (zmq->msg_recv(frame, engine->pull, ZMQ_DONTWAIT) < 0) {
        error = zmq->errno_();
        if (error == EINTR)
            continue;
        zmq->msg_close(frame);
        if (error == EAGAIN)
            return 0;
        engine->error = error;
        return PCCL_EZMQ;
    }
    return 1;
}

/* Receives and forgets the rest of a message that has too many frames. */
static int skip_frames(pccl_engine *engine)
{
    pccl_msg frame;
    int got, more = 1;
    while (more) {
        got = receive_frame(engine, &frame);
        if (got <= 0)
            return got;
        more = engine->zmq->msg_more(&frame);
        engine->zmq->msg_close(&frame);
    }
    return 1;
}

int packet_receive(pccl_engine *engine, struct packet *packet)
{
    const pccl_zmq *zmq = engine->zmq;
    int got, more;
    size_t size;
    assert(packet->frames == 0);
    got = receive_frame(engine, &packet->frame[0]);
    if (got <= 0)
        return got;
    packet->frames = 1;
    size = zmq->msg_size(&packet->frame[0]);
    more = zmq->msg_more(&packet->frame[0]);
    if (more) {
        got = receive_frame(engine, &packet->frame[1]);
        if (got < 0)
            return got;
        packet->frames += got;
        more = got && zmq->msg_more(&packet->frame[1]);
    }
    if (more && (got = skip_frames(engine)) < 0)
        return got;
    if (size < WIRE_HEADER_BYTES || more || (packet->frames == 2 && size != WIRE_HEADER_BYTES))
        packet_clear(zmq, packet);
    else
        packet->bytes =
            packet->frames == 2 ? zmq->msg_size(&packet->frame[1]) : size - WIRE_HEADER_BYTES;
    return 1;
}

/* Called by libzmq, in a thread of its own, when the last byte has been written: after the
 * decrement the op may be gone at any moment. */
static void release(void *data, void *hint)
{
    struct op *op = hint;
    (void)data;
    op->engine->zmq->atomic_counter_dec(op->counter);
}

/* The second frame of a packet: `bytes` bytes of op's memory. 0 or PCCL_ENOMEM. */
static int refer(struct op *op, struct packet *packet, const void *data, uint64_t bytes)
{
    const pccl_zmq *zmq = op->engine->zmq;
    void *unwritten = (void *)(uintptr_t)data;      /* libzmq only reads what it sends */
    if (op_refer(op) != PCCL_OK)
        return PCCL_ENOMEM;
    if (zmq->msg_init_data(&packet->frame[1], unwritten, (size_t)bytes, release, op) < 0) {
        op_unrefer(op);
        return PCCL_ENOMEM;
    }
    packet->frames = 2;
    packet->refers = true;
    return PCCL_OK;
}

/* A frame of the header and room for so many bytes of payload. 0 or PCCL_ENOMEM. */
static int make_frame(struct op *op, struct packet *packet, const struct wire_header *header,
                      uint64_t room)
{
    const pccl_zmq *zmq = op->engine->zmq;
    assert(packet->frames == 0);
    if (zmq->msg_init_size(&packet->frame[0], WIRE_HEADER_BYTES + (size_t)room) < 0)
        return PCCL_ENOMEM;
    packet->frames = 1;
    wire_encode(header, packet_header(zmq, packet));
    return PCCL_OK;
}

int packet_reserve(struct op *op, struct packet *packet, const struct wire_header *header,
                   uint64_t bytes)
{
    packet->bytes = bytes;
    return make_frame(op, packet, header, bytes);
}

int packet_build(struct op *op, struct packet *packet, const struct wire_header *header,
                 const void *data, uint64_t bytes)
{
    const pccl_zmq *zmq = op->engine->zmq;
    bool copy = bytes <= op->engine->options.copy_max;
    packet->bytes = bytes;
    if (make_frame(op, packet, header, copy ? bytes : 0) != PCCL_OK)
        return PCCL_ENOMEM;
    if (copy && bytes > 0)
        memcpy(packet_payload(zmq, packet), data, (size_t)bytes);
    if (!copy && refer(op, packet, data, bytes) != PCCL_OK) {
        packet_clear(zmq, packet);
        return PCCL_ENOMEM;
    }
    return PCCL_OK;
}

unsigned char *packet_header(const pccl_zmq *zmq, struct packet *packet)
{
    assert(packet->frames > 0);
    return zmq->msg_data(&packet->frame[0]);
}

unsigned char *packet_payload(const pccl_zmq *zmq, struct packet *packet)
{
    if (packet->frames == 2)
        return zmq->msg_data(&packet->frame[1]);
    return packet_header(zmq, packet) + WIRE_HEADER_BYTES;
}

void packet_await(struct op *op, struct packet *packet)
{
    packet->held = packet->refers ? 0 : packet->bytes;
    op->queued++;
    op->engine->forwards++;
    op->engine->forward_bytes += packet->held;
}

void packet_unawait(struct op *op, struct packet *packet)
{
    assert(op->queued > 0 && op->engine->forwards > 0);
    assert(op->engine->forward_bytes >= packet->held);
    op->queued--;
    op->engine->forwards--;
    op->engine->forward_bytes -= packet->held;
}

void packets_append(struct packets *queue, struct packet *packet)
{
    packet->next = NULL;
    if (queue->tail != NULL)
        queue->tail->next = packet;
    else
        queue->head = packet;
    queue->tail = packet;
}

struct packet *packets_take(struct packets *queue)
{
    struct packet *packet = queue->head;
    if (packet == NULL)
        return NULL;
    queue->head = packet->next;
    if (queue->head == NULL)
        queue->tail = NULL;
    packet->next = NULL;
    return packet;
}

void packets_split(struct packets *queue, struct packets *out, const struct op *op)
{
    struct packets kept = {NULL, NULL};
    struct packet *packet;
    while ((packet = packets_take(queue)) != NULL)
        packets_append(packet->op == op ? out : &kept, packet);
    *queue = kept;
}
