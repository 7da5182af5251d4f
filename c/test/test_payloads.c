/* test_payloads.c - the encodings of whole arrays at many sizes and alignments, in blocks of
 * exactly the right size (for the sanitizers), and of arbitrary bytes. tests/unit/test_payloads.py
 * compares the values with numpy. */
#include "check.h"
#include "pccl_core.h"

#include <stdlib.h>
#include <string.h>

static unsigned char *room(size_t bytes, size_t offset, unsigned char **base)
{
    *base = malloc(offset + bytes + (offset + bytes == 0));
    if (*base == NULL)
        abort();
    memset(*base, 0x33, offset + bytes);
    return *base + offset;
}

/* The result does not depend on the alignment of the arrays. */
static void test_shape(int encoding, size_t n, size_t offset)
{
    const size_t bytes = n * sizeof(float), size = (size_t)pccl_encoded_size(encoding, n);
    unsigned char *bases[6], *in = room(bytes, offset, &bases[0]);
    unsigned char *moved = room(bytes, (offset + 1) % 8, &bases[1]);
    unsigned char *data = room(size, (offset * 5) % 8, &bases[2]);
    unsigned char *again = room(size, (offset + 3) % 8, &bases[3]);
    unsigned char *out = room(bytes, (offset * 3) % 8, &bases[4]);
    unsigned char *other = room(bytes, (offset + 2) % 8, &bases[5]);
    size_t i;
    for (i = 0; i < n; i++) {
        float value = (float)(i * 7919 % 1000) / 500 - 1;
        memcpy(in + i * sizeof value, &value, sizeof value);
    }
    memcpy(moved, in, bytes);
    pccl_encode(encoding, data, (const float *)(const void *)in, n);
    pccl_encode(encoding, again, (const float *)(const void *)moved, n);
    CHECK(memcmp(data, again, size) == 0 && memcmp(in, moved, bytes) == 0);
    CHECK(pccl_decode(encoding, (float *)(void *)out, data, n) == PCCL_OK);
    CHECK(pccl_decode(encoding, (float *)(void *)other, again, n) == PCCL_OK);
    CHECK(memcmp(out, other, bytes) == 0);
    memset(other, 0, bytes);
    CHECK(pccl_decode_add(encoding, (float *)(void *)other, data, n) == PCCL_OK);
    CHECK(n == 0 || memcmp(out, other, bytes) == 0);
    for (i = 0; i < 6; i++)
        free(bases[i]);
}

/* Any bytes are read, or refused, without leaving the arrays. */
static void test_arbitrary_bytes(int encoding, size_t n, uint32_t seed)
{
    const size_t size = (size_t)pccl_encoded_size(encoding, n);
    unsigned char *bases[2], *data = room(size, 0, &bases[0]);
    unsigned char *out = room(n * sizeof(float), 0, &bases[1]);
    size_t i;
    int status;
    for (i = 0; i < size; i++)
        data[i] = (unsigned char)((seed = seed * 1664525u + 1013904223u) >> 24);
    status = pccl_decode(encoding, (float *)(void *)out, data, n);
    CHECK(status == PCCL_OK || (encoding == PCCL_SPARSE && status == PCCL_EPROTO));
    CHECK(pccl_decode_add(encoding, (float *)(void *)out, data, n) == status);
    free(bases[0]);
    free(bases[1]);
}

/* 128 elements keep two: 16 bytes of levels, 3 of places, 1 of codes. */
static void test_places(void)
{
    static const struct { unsigned first, second; int status; } cases[] = {
        {0, 1, PCCL_OK}, {0, 127, PCCL_OK}, {126, 127, PCCL_OK}, {0, 128, PCCL_EPROTO},
        {4095, 4095, PCCL_EPROTO}, {5, 5, PCCL_EPROTO}, {6, 5, PCCL_EPROTO}, {0, 0, PCCL_EPROTO},
    };
    unsigned char data[20] = {0};
    float out[128];
    size_t i;
    CHECK(pccl_encoded_size(PCCL_SPARSE, 128) == sizeof data);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        data[16] = (unsigned char)(cases[i].first & 255u);
        data[17] = (unsigned char)(cases[i].first >> 8 | (cases[i].second & 15u) << 4);
        data[18] = (unsigned char)(cases[i].second >> 4);
        CHECK(pccl_decode(PCCL_SPARSE, out, data, 128) == cases[i].status);
    }
}

int main(void)
{
    static const size_t sizes[] = {511, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 8191, 65536,
                                   65537, 70001};
    int encoding;
    size_t n;
    for (encoding = 0; encoding < PCCL_ENCODINGS; encoding++) {
        for (n = 0; n <= 200; n++)
            test_shape(encoding, n, n % 8);
        for (n = 0; n < sizeof sizes / sizeof sizes[0]; n++) {
            test_shape(encoding, sizes[n], n % 8);
            test_arbitrary_bytes(encoding, sizes[n], (uint32_t)n);
        }
    }
    test_places();
    return check_report("payloads");
}
