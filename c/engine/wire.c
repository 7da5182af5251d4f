/* wire.c - encodes and decodes message headers byte by byte: any alignment, any byte order. */
#include "engine/wire.h"

enum { WIRE_MAGIC = 0x4c434350, WIRE_VERSION = 3 };

/* Byte offsets of the fields. */
enum {
    AT_MAGIC = 0, AT_KIND = 4, AT_RING = 5, AT_VERSION = 6, AT_RUN = 8, AT_SEQ = 16, AT_TAG = 24,
    AT_NONCE = 32, AT_SEGMENT = 40, AT_STEP = 42, AT_MEMBERS = 44, AT_EAGER = 46, AT_OFFSET = 48,
    AT_LENGTH = 56, AT_PIECE = 60
};

static void put_u16(unsigned char *at, uint16_t value)
{
    at[0] = (unsigned char)(value & 0xff);
    at[1] = (unsigned char)(value >> 8);
}

static void put_u32(unsigned char *at, uint32_t value)
{
    put_u16(at, (uint16_t)(value & 0xffff));
    put_u16(at + 2, (uint16_t)(value >> 16));
}

static void put_u64(unsigned char *at, uint64_t value)
{
    put_u32(at, (uint32_t)(value & 0xffffffffu));
    put_u32(at + 4, (uint32_t)(value >> 32));
}

static uint16_t get_u16(const unsigned char *at)
{
    return (uint16_t)(at[0] | (unsigned)at[1] << 8);
}

static uint32_t get_u32(const unsigned char *at)
{
    return get_u16(at) | (uint32_t)get_u16(at + 2) << 16;
}

static uint64_t get_u64(const unsigned char *at)
{
    return get_u32(at) | (uint64_t)get_u32(at + 4) << 32;
}

void wire_encode(const struct wire_header *header, unsigned char *bytes)
{
    put_u32(bytes + AT_MAGIC, WIRE_MAGIC);
    bytes[AT_KIND] = (unsigned char)header->kind;
    bytes[AT_RING] = header->ring;
    put_u16(bytes + AT_VERSION, WIRE_VERSION);
    put_u64(bytes + AT_RUN, header->run);
    put_u64(bytes + AT_SEQ, header->seq);
    put_u64(bytes + AT_TAG, header->tag);
    put_u64(bytes + AT_NONCE, header->nonce);
    put_u16(bytes + AT_SEGMENT, header->segment);
    put_u16(bytes + AT_STEP, header->step);
    put_u16(bytes + AT_MEMBERS, header->members);
    put_u16(bytes + AT_EAGER, header->eager);
    put_u64(bytes + AT_OFFSET, header->offset);
    put_u32(bytes + AT_LENGTH, header->length);
    put_u32(bytes + AT_PIECE, header->piece);
}

bool wire_decode(struct wire_header *header, const unsigned char *bytes)
{
    unsigned kind = bytes[AT_KIND];
    if (get_u32(bytes + AT_MAGIC) != WIRE_MAGIC || get_u16(bytes + AT_VERSION) != WIRE_VERSION)
        return false;
    if (kind < WIRE_CHUNK || kind > WIRE_ROW)
        return false;
    if (get_u16(bytes + AT_EAGER) > (kind == WIRE_CHUNK))
        return false;
    header->kind = (enum wire_kind)kind;
    header->ring = bytes[AT_RING];
    header->run = get_u64(bytes + AT_RUN);
    header->seq = get_u64(bytes + AT_SEQ);
    header->tag = get_u64(bytes + AT_TAG);
    header->nonce = get_u64(bytes + AT_NONCE);
    header->segment = get_u16(bytes + AT_SEGMENT);
    header->step = get_u16(bytes + AT_STEP);
    header->members = get_u16(bytes + AT_MEMBERS);
    header->eager = get_u16(bytes + AT_EAGER) != 0;
    header->piece = get_u32(bytes + AT_PIECE);
    header->offset = get_u64(bytes + AT_OFFSET);
    header->length = get_u32(bytes + AT_LENGTH);
    return true;
}

void wire_set_step(unsigned char *bytes, uint16_t step)
{
    put_u16(bytes + AT_STEP, step);
}
