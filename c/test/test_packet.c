/* test_packet.c - packets and their sources, without ops or engines: copied payloads, references
 * and their counts, and waiting packets. */
#include "check.h"
#include "fake.h"

#include <string.h>

#include "engine/packet.h"

enum { COPY_MAX = 100 };

static struct source make_source(struct backlog *backlog)
{
    struct source source = {0};
    source.zmq = fake_table();
    source.backlog = backlog;
    source.copy_max = COPY_MAX;
    return source;
}

static struct wire_header make_header(void)
{
    struct wire_header header = {0};
    header.kind = WIRE_DATA;
    header.run = 77;
    header.length = 5;
    return header;
}

static bool is_header(struct packet *packet)
{
    struct wire_header wanted = make_header(), header;
    return wire_decode(&header, packet_header(fake_table(), packet)) && header.run == wanted.run
        && header.length == wanted.length;
}

static void test_few_bytes_are_copied(void)
{
    struct backlog backlog = {0, 0};
    struct source source = make_source(&backlog);
    struct wire_header header = make_header();
    struct packet packet = {0};
    unsigned char data[COPY_MAX];
    memset(data, 'x', sizeof data);
    CHECK(packet_build(&source, &packet, &header, data, sizeof data) == PCCL_OK);
    CHECK(packet.frames == 1 && packet.bytes == sizeof data && is_header(&packet));
    CHECK(memcmp(packet_payload(source.zmq, &packet), data, sizeof data) == 0);
    CHECK(packet_payload(source.zmq, &packet) != data && source_is_idle(&source));
    packet_clear(source.zmq, &packet);
    source_free(&source);
}

/* The count falls when ZeroMQ releases the message; here, when the message is closed. */
static void test_many_bytes_are_referred_to(void)
{
    struct backlog backlog = {0, 0};
    struct source source = make_source(&backlog);
    struct wire_header header = make_header();
    struct packet one = {0}, other = {0};
    unsigned char data[COPY_MAX + 1] = {0};
    CHECK(packet_build(&source, &one, &header, data, sizeof data) == PCCL_OK);
    CHECK(packet_build(&source, &other, &header, data, sizeof data) == PCCL_OK);
    CHECK(one.frames == 2 && packet_payload(source.zmq, &one) == data && is_header(&one));
    packet_clear(source.zmq, &one);
    while (fake_tick())
        continue;
    CHECK(source_is_referred(&source) && !source_is_idle(&source));
    packet_clear(source.zmq, &other);
    while (fake_tick())
        continue;
    CHECK(!source_is_referred(&source) && source_is_idle(&source));
    source_free(&source);
}

/* A waiting packet counts for its source and in the backlog. One that refers to memory of its
 * source counts no bytes. */
static void test_what_waits_is_counted(void)
{
    struct backlog backlog = {0, 0};
    struct source sources[2] = {make_source(&backlog), make_source(&backlog)};
    struct wire_header header = make_header();
    struct packets queue = {NULL, NULL};
    unsigned char data[COPY_MAX + 1] = {0};
    uint64_t bytes[] = {10, COPY_MAX + 1, 20};
    struct packet *packet;
    int i;
    for (i = 0; i < 3; i++) {
        packet = packet_new();
        CHECK(packet_build(&sources[i % 2], packet, &header, data, bytes[i]) == PCCL_OK);
        packets_append(&queue, packet);
        packet_await(&sources[i % 2], packet);
    }
    CHECK(backlog.packets == 3 && backlog.bytes == 30);
    CHECK(sources[0].pending == 2 && sources[1].pending == 1);
    packets_drop(fake_table(), &queue, &sources[0]);
    CHECK(backlog.packets == 1 && backlog.bytes == 0 && sources[0].pending == 0);
    packet = packets_take(&queue);
    CHECK(packet != NULL && packet->source == &sources[1] && packets_take(&queue) == NULL);
    packet_unawait(packet);
    packet_free(fake_table(), packet);
    while (fake_tick())
        continue;
    CHECK(backlog.packets == 0 && source_is_idle(&sources[0]) && source_is_idle(&sources[1]));
    source_free(&sources[0]);
    source_free(&sources[1]);
}

int main(void)
{
    fake_reset(1);
    test_few_bytes_are_copied();
    test_many_bytes_are_referred_to();
    test_what_waits_is_counted();
    return check_report("packet");
}
