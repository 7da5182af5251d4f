/* packet.c - see packet.h.
 *
 * A small payload is copied behind its header into one frame, because an allocation and a copy cost
 * less than a second frame. A large payload is a second frame that points into the memory of the
 * source. A message that is received and sent on keeps its frames. */
#include "engine/packet.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "zmq/zmqdefs.h"

/* ---- sources ---- */

/* Counts one more reference: 0 or PCCL_ENOMEM. */
static int add_reference(struct source *source)
{
    const pccl_zmq *zmq = source->zmq;
    if (source->references == NULL)
        source->references = zmq->atomic_counter_new();
    if (source->references == NULL)
        return PCCL_ENOMEM;
    zmq->atomic_counter_inc(source->references);
    return PCCL_OK;
}

static void drop_reference(struct source *source)
{
    source->zmq->atomic_counter_dec(source->references);
}

bool source_is_referred(const struct source *source)
{
    return source->references != NULL && source->zmq->atomic_counter_value(source->references) > 0;
}

bool source_is_idle(const struct source *source)
{
    return source->pending == 0 && !source_is_referred(source);
}

void source_free(struct source *source)
{
    assert(source->pending == 0);
    if (source->references != NULL)
        source->zmq->atomic_counter_destroy(&source->references);
}

/* ---- packets ---- */

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
}

void packet_free(const pccl_zmq *zmq, struct packet *packet)
{
    packet_clear(zmq, packet);
    free(packet);
}

/* Receives one frame: 1, 0 when there is none, or PCCL_EZMQ. */
static int receive_frame(struct events *events, void *socket, pccl_msg *frame)
{
    const pccl_zmq *zmq = events->zmq;
    int error;
    zmq->msg_init(frame);
    while (zmq->msg_recv(frame, socket, ZMQ_DONTWAIT) < 0) {
        error = zmq->errno_();
        if (error == EINTR)
            continue;
        zmq->msg_close(frame);
        if (error == EAGAIN)
            return 0;
        events->error = error;
        return PCCL_EZMQ;
    }
    return 1;
}

/* Receives and drops the rest of a message that has too many frames. */
static int skip_frames(struct events *events, void *socket)
{
    const pccl_zmq *zmq = events->zmq;
    pccl_msg frame;
    int got, more = 1;
    while (more) {
        got = receive_frame(events, socket, &frame);
        if (got <= 0)
            return got;
        more = zmq->msg_more(&frame);
        zmq->msg_close(&frame);
    }
    return 1;
}

int packet_receive(struct events *events, void *socket, struct packet *packet)
{
    const pccl_zmq *zmq = events->zmq;
    int got, more;
    size_t size;
    assert(packet->frames == 0);
    got = receive_frame(events, socket, &packet->frame[0]);
    if (got <= 0)
        return got;
    packet->frames = 1;
    size = zmq->msg_size(&packet->frame[0]);
    more = zmq->msg_more(&packet->frame[0]);
    if (more) {
        got = receive_frame(events, socket, &packet->frame[1]);
        if (got < 0)
            return got;
        packet->frames += got;
        more = got && zmq->msg_more(&packet->frame[1]);
    }
    if (more && (got = skip_frames(events, socket)) < 0)
        return got;
    if (size < WIRE_HEADER_BYTES || more || (packet->frames == 2 && size != WIRE_HEADER_BYTES))
        packet_clear(zmq, packet);
    else
        packet->bytes =
            packet->frames == 2 ? zmq->msg_size(&packet->frame[1]) : size - WIRE_HEADER_BYTES;
    return 1;
}

/* libzmq calls this from a thread of its own when the last byte has been written. After the
 * decrement the source may be gone at any moment. */
static void release(void *data, void *hint)
{
    (void)data;
    drop_reference(hint);
}

/* Makes the second frame, which refers to `bytes` bytes of the source's memory: 0 or
 * PCCL_ENOMEM. */
static int refer(struct source *source, struct packet *packet, const void *data, uint64_t bytes)
{
    void *unwritten = (void *)(uintptr_t)data;      /* libzmq only reads what it sends */
    if (add_reference(source) != PCCL_OK)
        return PCCL_ENOMEM;
    if (source->zmq->msg_init_data(&packet->frame[1], unwritten, (size_t)bytes, release, source)
        < 0) {
        drop_reference(source);
        return PCCL_ENOMEM;
    }
    packet->frames = 2;
    packet->refers = true;
    return PCCL_OK;
}

/* Makes the first frame: the header and room for `room` bytes of payload. 0 or PCCL_ENOMEM. */
static int make_frame(const pccl_zmq *zmq, struct packet *packet, const struct wire_header *header,
                      uint64_t room)
{
    assert(packet->frames == 0);
    if (zmq->msg_init_size(&packet->frame[0], WIRE_HEADER_BYTES + (size_t)room) < 0)
        return PCCL_ENOMEM;
    packet->frames = 1;
    wire_encode(header, packet_header(zmq, packet));
    return PCCL_OK;
}

int packet_reserve(struct source *source, struct packet *packet, const struct wire_header *header,
                   uint64_t bytes)
{
    packet->bytes = bytes;
    return make_frame(source->zmq, packet, header, bytes);
}

int packet_build(struct source *source, struct packet *packet, const struct wire_header *header,
                 const void *data, uint64_t bytes)
{
    const pccl_zmq *zmq = source->zmq;
    bool copy = bytes <= source->copy_max;
    packet->bytes = bytes;
    if (make_frame(zmq, packet, header, copy ? bytes : 0) != PCCL_OK)
        return PCCL_ENOMEM;
    if (copy && bytes > 0)
        memcpy(packet_payload(zmq, packet), data, (size_t)bytes);
    if (!copy && refer(source, packet, data, bytes) != PCCL_OK) {
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

void packet_await(struct source *source, struct packet *packet)
{
    packet->source = source;
    packet->held = packet->refers ? 0 : packet->bytes;
    source->pending++;
    source->backlog->packets++;
    source->backlog->bytes += packet->held;
}

void packet_unawait(struct packet *packet)
{
    struct source *source = packet->source;
    assert(source->pending > 0 && source->backlog->packets > 0);
    assert(source->backlog->bytes >= packet->held);
    source->pending--;
    source->backlog->packets--;
    source->backlog->bytes -= packet->held;
    packet->source = NULL;
}

/* ---- queues ---- */

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

void packets_drop(const pccl_zmq *zmq, struct packets *queue, const struct source *source)
{
    struct packets kept = {NULL, NULL};
    struct packet *packet;
    while ((packet = packets_take(queue)) != NULL) {
        if (source != NULL && packet->source != source) {
            packets_append(&kept, packet);
            continue;
        }
        packet_unawait(packet);
        packet_free(zmq, packet);
    }
    *queue = kept;
}
