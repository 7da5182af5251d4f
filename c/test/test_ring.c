/* test_ring.c - the geometry of rings, sets of blocks, and the message header's bytes. */
#include "check.h"

#include <string.h>

#include "pccl_core.h"
#include "engine/bitmap.h"
#include "engine/ring.h"
#include "engine/wire.h"

static void test_bounds(void)
{
    static const uint64_t counts[] = {0, 1, 63, 64, 65, 127, 128, 1000, 203530, UINT64_C(1) << 40};
    size_t i;
    uint32_t n, s;
    for (i = 0; i < sizeof counts / sizeof *counts; i++)
        for (n = 1; n <= 70; n++) {
            CHECK(ring_bound(counts[i], n, 0) == 0);
            CHECK(ring_bound(counts[i], n, n) == counts[i]);
            for (s = 0; s < n; s++) {
                uint64_t low = ring_bound(counts[i], n, s), high = ring_bound(counts[i], n, s + 1);
                CHECK(low <= high && (low % PCCL_ALIGNMENT == 0 || low == counts[i]));
                CHECK(high - low <= counts[i] / n + 2 * PCCL_ALIGNMENT);
            }
        }
    /* where the naive product would overflow */
    CHECK(ring_bound(UINT64_MAX - 63, 4096, 2048) == (UINT64_C(1) << 63) - 64);
}

static void test_positions(void)
{
    uint32_t n, s, p, step;
    for (n = 1; n <= 9; n++)
        for (step = 0; step <= 2 * n; step++)
            for (p = 0; p < n; p++) {
                s = ring_segment(n, p, step);
                CHECK(s < n && (s + step + 1) % n == p);
                CHECK(ring_receiver(n, s, step) == p);
            }
}

static void test_owners(void)
{
    uint32_t members, segment;
    for (members = 1; members < 6; members++)
        for (segment = 0; segment < members; segment++) {
            uint32_t owner = ring_owner(members, segment);
            CHECK(ring_next(members, owner) == segment);
            /* The last step that reduces ends at the owner. */
            if (members > 1)
                CHECK(ring_receiver(members, segment, members - 2) == owner);
        }
}

static void test_bitmap(void)
{
    uint64_t set[4], from, to, a, b;
    for (from = 0; from < 200; from += 7)
        for (to = from + 1; to <= 256; to += 13) {
            memset(set, 0, sizeof set);
            CHECK(!bitmap_any(set, from, to));
            bitmap_set(set, from, to);
            CHECK(bitmap_all(set, from, to) && bitmap_any(set, from, to));
            CHECK(from == 0 || !bitmap_any(set, 0, from));
            CHECK(to == 256 || !bitmap_any(set, to, 256));
            CHECK(to == 256 || !bitmap_all(set, from, to + 1));
            a = 0;
            CHECK(bitmap_run(set, &a, &b, 256) && a == from && b == to);
            a = b;
            CHECK(!bitmap_run(set, &a, &b, 256));
        }
    CHECK(aligned_blocks(0) == 0 && aligned_blocks(1) == 1 && aligned_blocks(64) == 1
          && aligned_blocks(65) == 2);
    CHECK(bitmap_words(0) == 0 && bitmap_words(64) == 1 && bitmap_words(65) == 2);
}

/* The bytes of a header are part of the protocol. */
static void test_wire(void)
{
    static const unsigned char golden[WIRE_HEADER_BYTES] = {
        0x50, 0x43, 0x43, 0x4c, 0x01, 0x02, 0x03, 0x00,
        0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01,
        0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
        0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,
        0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31,
        0x42, 0x41, 0x52, 0x51, 0x62, 0x61, 0x00, 0x00,
        0x88, 0x87, 0x86, 0x85, 0x84, 0x83, 0x82, 0x81,
        0x94, 0x93, 0x92, 0x91, 0x74, 0x73, 0x72, 0x71};
    struct wire_header header = {0}, back = {0};
    unsigned char bytes[WIRE_HEADER_BYTES];
    int i;
    header.kind = WIRE_CHUNK;
    header.ring = 2;
    header.run = UINT64_C(0x0102030405060708);
    header.seq = UINT64_C(0x1112131415161718);
    header.tag = UINT64_C(0x2122232425262728);
    header.nonce = UINT64_C(0x3132333435363738);
    header.segment = 0x4142;
    header.step = 0x5152;
    header.members = 0x6162;
    header.piece = 0x71727374;
    header.offset = UINT64_C(0x8182838485868788);
    header.length = 0x91929394;
    wire_encode(&header, bytes);
    CHECK(memcmp(bytes, golden, sizeof golden) == 0);
    CHECK(wire_decode(&back, bytes));
    CHECK(back.kind == header.kind && back.ring == header.ring && back.piece == header.piece);
    CHECK(back.run == header.run && back.seq == header.seq && back.tag == header.tag);
    CHECK(back.nonce == header.nonce && back.segment == header.segment && back.step == header.step);
    CHECK(back.members == header.members && back.offset == header.offset);
    CHECK(back.length == header.length);
    wire_set_step(bytes, 0x0304);
    CHECK(wire_decode(&back, bytes) && back.step == 0x0304 && back.segment == header.segment);
    /* magic, kind, version and what must be zero */
    for (i = 0; i < WIRE_HEADER_BYTES; i++)
        if (i < 5 || i == 6 || i == 7 || i == 46 || i == 47) {
            memcpy(bytes, golden, sizeof golden);
            bytes[i] ^= 0x80;
            CHECK(!wire_decode(&back, bytes));
        }
}

int main(void)
{
    test_bounds();
    test_positions();
    test_owners();
    test_bitmap();
    test_wire();
    return check_report("ring");
}
