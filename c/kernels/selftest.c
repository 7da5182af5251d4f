/* selftest.c - runs every kernel over fixed inputs, which gives a machine's arithmetic as a string
 * of bytes.
 *
 * DESIGN. Peers compare (a hash of) these bytes before they share a run. Elements are drawn from a
 * fixed integer sequence: a few special values, some arbitrary bit patterns, and mostly numbers
 * near 1, whose sums and products must be rounded. Results are written with the least byte first,
 * so that all machines can be compared. The last four bytes are in the machine's own byte order,
 * because the data plane does not work between machines of different byte orders. */
#include "pccl_core.h"

#include <assert.h>
#include <string.h>

#include "kernels/encodings.h"

enum {
    ELEMENTS = 203,          /* several vectors of any width, and a rest */
    QUANTIZED = 256 + 75,    /* a block of the largest format, several of others, and a rest */
    PAYLOAD = 4096 + 75      /* several blocks of any encoding, a chunk, and a rest */
};

typedef struct {
    unsigned char *out;
    size_t size;
    size_t used;
} sink;

static const uint32_t BYTE_ORDER_MARK = 0x01020304;

/* Appends `n` words of `width` bytes, least byte first, as far as they fit. Counts all bytes. */
static void sink_write(sink *to, const void *data, size_t n, size_t width)
{
    const size_t size = n * width, room = to->used < to->size ? to->size - to->used : 0;
    const size_t fits = size < room ? size : room;
    const unsigned char *bytes = data;
    unsigned char first;
    size_t i;
    memcpy(&first, &BYTE_ORDER_MARK, 1);
    if (first == 1)
        for (i = 0; i < fits; i++)
            to->out[to->used + i] = bytes[i / width * width + width - 1 - i % width];
    else if (fits > 0)
        memcpy(to->out + to->used, bytes, fits);
    to->used += size;
}

/* The i-th of a fixed sequence of well mixed words (splitmix64). */
static uint64_t mixed(uint64_t i)
{
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The bits of one number of a float type: sign, `exponent` bits, `fraction` bits. */
static uint64_t float_sample(uint64_t word, unsigned exponent, unsigned fraction)
{
    const uint64_t one = 1;
    const uint64_t sign = one << (exponent + fraction);
    const uint64_t infinity = ((one << exponent) - 1) << fraction;
    const uint64_t bias = (one << (exponent - 1)) - 1;
    const uint64_t special[] = {0, 1, (one << fraction) - 1, one << fraction, bias << fraction,
                                infinity - 1, infinity, infinity + 1};
    uint64_t bits = word & (sign | (sign - 1));

    switch (word >> 60) {
    case 0: return (bits & sign) | special[(word >> 56) & 7];
    case 1:
    case 2: return bits;
    default: return (bits & ~infinity) | ((bias - 4 + ((word >> 56) & 7)) << fraction);
    }
}

static uint64_t sample(int dtype, uint64_t i)
{
    switch (dtype) {
    case PCCL_F16: return float_sample(mixed(i), 5, 10);
    case PCCL_BF16: return float_sample(mixed(i), 8, 7);
    case PCCL_F32: return float_sample(mixed(i), 8, 23);
    case PCCL_F64: return float_sample(mixed(i), 11, 52);
    default: return mixed(i);
    }
}

/* Only numbers near 1. In a quantized block, a number that is not finite or is much larger would
 * hide the others. */
static uint64_t near_sample(int dtype, uint64_t i)
{
    const uint64_t near = (uint64_t)15 << 60;
    switch (dtype) {
    case PCCL_F16: return float_sample(mixed(i) | near, 5, 10);
    case PCCL_BF16: return float_sample(mixed(i) | near, 8, 7);
    case PCCL_F32: return float_sample(mixed(i) | near, 8, 23);
    default: return float_sample(mixed(i) | near, 11, 52);
    }
}

/* Fills an array with `n` samples of a type, beginning at sample number `start`. Works on machines
 * of any byte order. */
static void fill(uint64_t (*draw)(int dtype, uint64_t i), int dtype, void *array, size_t n,
                 uint64_t start)
{
    unsigned char *bytes = array;
    size_t i;
    for (i = 0; i < n; i++) {
        uint64_t bits = draw(dtype, start + i);
        uint8_t u8 = (uint8_t)bits;
        uint16_t u16 = (uint16_t)bits;
        uint32_t u32 = (uint32_t)bits;
        switch (pccl_dtype_size(dtype)) {
        case 1: memcpy(bytes + i, &u8, 1); break;
        case 2: memcpy(bytes + 2 * i, &u16, 2); break;
        case 4: memcpy(bytes + 4 * i, &u32, 4); break;
        default: memcpy(bytes + 8 * i, &bits, 8); break;
        }
    }
}

static void test_reduce(sink *to)
{
    unsigned char a[8 * ELEMENTS];
    unsigned char b[8 * ELEMENTS];
    unsigned char out[8 * ELEMENTS];
    int dtype;
    int redop;

    for (dtype = PCCL_U8; dtype <= PCCL_F64; dtype++) {
        fill(sample, dtype, a, ELEMENTS, 0);
        fill(sample, dtype, b, ELEMENTS, ELEMENTS);
        for (redop = PCCL_SUM; redop <= PCCL_MIN; redop++) {
            int status = pccl_reduce(dtype, redop, out, a, b, ELEMENTS, 3);
            assert(status == PCCL_OK);
            (void)status;
            sink_write(to, out, ELEMENTS, pccl_dtype_size(dtype));
        }
    }
}

static void test_outer(sink *to)
{
    float theta[ELEMENTS];
    float v[ELEMENTS];
    float g[ELEMENTS];
    int nesterov;

    for (nesterov = 0; nesterov <= 1; nesterov++) {
        fill(sample, PCCL_F32, theta, ELEMENTS, 0);
        fill(sample, PCCL_F32, v, ELEMENTS, ELEMENTS);
        fill(sample, PCCL_F32, g, ELEMENTS, 2 * ELEMENTS);
        pccl_outer_sgd(theta, v, g, ELEMENTS, 0.7f, 0.9f, nesterov);
        sink_write(to, theta, ELEMENTS, sizeof *theta);
        sink_write(to, v, ELEMENTS, sizeof *v);
    }
    fill(sample, PCCL_F32, g, ELEMENTS, 0);
    pccl_subtract_f32(theta, v, g, ELEMENTS);
    sink_write(to, theta, ELEMENTS, sizeof *theta);
    pccl_divide_f32(g, ELEMENTS, 3);
    sink_write(to, g, ELEMENTS, sizeof *g);
}

/* Blocks are headers of one or two numbers and codes of one byte or two. */
static void sink_blocks(sink *to, int format, int dtype, const unsigned char *data)
{
    const size_t real = pccl_dtype_size(dtype) == 8 ? 8 : 4, block = pccl_quantized_block(format);
    const bool symmetric = format == PCCL_BLOCK_8 || format == PCCL_BLOCK_4;
    const bool wide = format == PCCL_MIN_MAX_16 || format == PCCL_ZERO_POINT_16;
    const size_t width = wide ? 2 : 1, header = symmetric ? 1 : 2;
    size_t i, n, codes;
    for (i = 0; i < QUANTIZED; i += n) {
        n = QUANTIZED - i < block ? QUANTIZED - i : block;
        codes = (size_t)pccl_quantized_size(format, dtype, n) - header * real;
        sink_write(to, data, header, real);
        sink_write(to, data + header * real, codes / width, width);
        data += header * real + codes;
    }
}

/* Quantizes and reads back; then reduces with every operation, as a ring and as a one-shot do, and
 * reads the results back. */
static void test_format(sink *to, int format, int dtype, const unsigned char *a,
                        const unsigned char *b)
{
    unsigned char data[10 * QUANTIZED], other[10 * QUANTIZED];
    unsigned char out[8 * QUANTIZED];
    const size_t width = pccl_dtype_size(dtype);
    const int redops[] = {PCCL_AVG, PCCL_SUM, PCCL_MAX, PCCL_MIN};
    size_t i;
    int status = pccl_quantize(format, dtype, data, a, QUANTIZED);
    assert(pccl_quantized_size(format, dtype, QUANTIZED) <= sizeof data);
    sink_blocks(to, format, dtype, data);
    status |= pccl_dequantize(format, dtype, out, data, QUANTIZED);
    sink_write(to, out, QUANTIZED, width);
    memcpy(out, b, QUANTIZED * width);
    status |= pccl_dequantize_add(format, dtype, out, data, QUANTIZED);
    sink_write(to, out, QUANTIZED, width);
    for (i = 0; i < sizeof redops / sizeof redops[0]; i++) {
        status |= pccl_quantize(format, dtype, data, a, QUANTIZED);
        status |= pccl_quantized_reduce(format, dtype, redops[i], data, b, QUANTIZED, 3, out);
        sink_blocks(to, format, dtype, data);
        sink_write(to, out, QUANTIZED, width);
        status |= pccl_quantize(format, dtype, data, a, QUANTIZED);
        status |= pccl_quantize(format, dtype, other, b, QUANTIZED);
        status |= pccl_quantized_combine(format, dtype, redops[i], out, data, other, QUANTIZED, 2);
        sink_write(to, out, QUANTIZED, width);
    }
    assert(status == PCCL_OK);
    (void)status;
}

/* Elements between 256 and 512: 0 is farther from them than they are from each other. */
static uint64_t far_sample(int dtype, uint64_t i)
{
    switch (dtype) {
    case PCCL_F16: return (15 + 8) << 10 | (mixed(i) & 0x3ff);
    case PCCL_BF16: return (127 + 8) << 7 | (mixed(i) & 0x7f);
    case PCCL_F32: return (127 + 8) << 23 | (mixed(i) & 0x7fffff);
    default: return (uint64_t)(1023 + 8) << 52 | (mixed(i) & 0xfffffffffffff);
    }
}

static void test_quantized(sink *to)
{
    unsigned char a[8 * QUANTIZED];
    unsigned char b[8 * QUANTIZED];
    int dtype;
    int format;

    for (dtype = PCCL_F16; dtype <= PCCL_F64; dtype++)
        for (format = PCCL_BLOCK_8; format <= PCCL_ZERO_POINT_16; format++) {
            fill(near_sample, dtype, a, QUANTIZED, 0);
            fill(near_sample, dtype, b, QUANTIZED, QUANTIZED);
            test_format(to, format, dtype, a, b);
            fill(sample, dtype, a, QUANTIZED, 0);
            test_format(to, format, dtype, a, b);
            fill(far_sample, dtype, a, QUANTIZED, 0);
            test_format(to, format, dtype, a, b);
        }
}

/* The headers of blocks are numbers. */
static void sink_encoded(sink *to, const struct encoding *how, const unsigned char *data)
{
    const size_t size = (size_t)how->size(PAYLOAD), block = (size_t)how->size(how->block);
    const size_t header = how->header * sizeof(float);
    size_t i, n;
    for (i = 0; i < size; i += n) {
        n = size - i < block ? size - i : block;
        sink_write(to, data + i, how->header, sizeof(float));
        sink_write(to, data + i + header, n - header, 1);
    }
}

static void test_encodings(sink *to)
{
    float x[PAYLOAD], out[PAYLOAD];
    unsigned char data[4 * PAYLOAD];
    uint64_t (*const draws[])(int dtype, uint64_t i) = {near_sample, sample, far_sample};
    size_t draw;
    int status = PCCL_OK, number, adds;

    for (draw = 0; draw < sizeof draws / sizeof draws[0]; draw++) {
        fill(draws[draw], PCCL_F32, x, PAYLOAD, 0);
        for (number = 0; number < PCCL_ENCODINGS; number++) {
            const struct encoding *how = ENCODINGS[number];
            how->encode(data, x, PAYLOAD);
            sink_encoded(to, how, data);
            for (adds = 0; adds <= 1; adds++) {
                status |= how->decode(out, data, PAYLOAD, adds != 0);
                sink_write(to, out, PAYLOAD, sizeof *out);
            }
        }
    }
    assert(status == PCCL_OK);
    (void)status;
}

size_t pccl_self_test(unsigned char *out, size_t size)
{
    unsigned char memory_order[sizeof BYTE_ORDER_MARK];
    sink to = {out, size, 0};
    memcpy(memory_order, &BYTE_ORDER_MARK, sizeof memory_order);
    test_reduce(&to);
    test_outer(&to);
    test_quantized(&to);
    test_encodings(&to);
    sink_write(&to, memory_order, sizeof memory_order, 1);
    return to.used;
}
