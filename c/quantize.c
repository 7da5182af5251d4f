/* quantize.c - arrays of floats as blocks of small codes, and the step of a ring that adds to them.
 *
 * DESIGN. docs/quantization.md says what each format is and why. A block is a header, which says
 * how a code becomes a number, and its codes; every format is the one affine map of blocks.inc,
 * and differs in how the map is found and how many bits a code has.
 *
 * Everything goes strip by strip through a buffer of fp32 or fp64 numbers that stays in the first
 * level of the cache: elements are loaded into it, or decoded blocks; a contribution is added; it
 * is encoded and stored. So a step of a ring is one pass over memory, and types of elements and
 * formats need not be multiplied with each other.
 *
 * A block with an element that is not finite has a NaN for a step: all its elements are read as
 * NaN.
 * Steps are never below the least normal number, so that their inverses are finite and a processor
 * that flushes subnormals computes the same bits. */
#include "pccl.h"

#include <float.h>
#include <stdbool.h>

#include "half.h"

enum {
    STRIP = 512,             /* numbers; a multiple of every format's block */
    BLOCK_LEAST = 64
};

enum rule { SYMMETRIC, MIN_MAX, ZERO_POINT };

struct format {
    enum rule rule;
    int bits;                /* of a code */
    int middle;              /* of the codes: half their number */
    size_t block;            /* elements */
};

static const struct format formats[] = {     /* from PCCL_BLOCK_8 on */
    {SYMMETRIC, 8, 128, 256},
    {SYMMETRIC, 4, 8, BLOCK_LEAST},
    {MIN_MAX, 8, 128, 256},
    {MIN_MAX, 16, 32768, 256},
    {ZERO_POINT, 8, 128, 256},
    {ZERO_POINT, 16, 32768, 256},
};

static PCCL_INLINE size_t code_bytes(const struct format *format, size_t n)
{
    return (n * (size_t)format->bits + 7) / 8;
}

static PCCL_INLINE size_t block_bytes(const struct format *format, size_t real, size_t n)
{
    return (format->rule == SYMMETRIC ? 1 : 2) * real + code_bytes(format, n);
}

/* ---- blocks ---- */

#define T(name) name##_f32
#define REAL float
#define WORD uint32_t
#define INTEGER int32_t
#define INFINITE 0x7f800000u
#define LEAST FLT_MIN
#define ROUNDER 12582912.0f
#include "blocks.inc"
#undef T
#undef REAL
#undef WORD
#undef INTEGER
#undef INFINITE
#undef LEAST
#undef ROUNDER

#define T(name) name##_f64
#define REAL double
#define WORD uint64_t
#define INTEGER int64_t
#define INFINITE 0x7ff0000000000000u
#define LEAST DBL_MIN
#define ROUNDER 6755399441055744.0
#include "blocks.inc"

/* ---- elements ---- */

/* From elements to numbers; a contribution added to numbers; from numbers to elements. */
#define DEFINE_ELEMENTS(type, storage, real, decode, encode)                                       \
    PCCL_CLONES static void load_##type(void *numbers, const unsigned char *in, size_t n)          \
    {                                                                                              \
        real *x = numbers;                                                                         \
        size_t i;                                                                                  \
        for (i = 0; i < n; i++) {                                                                  \
            storage bits;                                                                          \
            memcpy(&bits, in + i * sizeof bits, sizeof bits);                                      \
            x[i] = decode(bits);                                                                   \
        }                                                                                          \
    }                                                                                              \
    PCCL_CLONES static void add_##type(void *numbers, const unsigned char *own, size_t n,          \
                                       uint32_t divisor)                                           \
    {                                                                                              \
        real *x = numbers;                                                                         \
        size_t i;                                                                                  \
        for (i = 0; i < n; i++) {                                                                  \
            storage bits;                                                                          \
            memcpy(&bits, own + i * sizeof bits, sizeof bits);                                     \
            x[i] += decode(bits);                                                                  \
        }                                                                                          \
        for (i = 0; divisor > 1 && i < n; i++)                                                     \
            x[i] /= (real)divisor;                                                                 \
    }                                                                                              \
    PCCL_CLONES static void store_##type(unsigned char *out, const void *numbers, size_t n)        \
    {                                                                                              \
        const real *x = numbers;                                                                   \
        size_t i;                                                                                  \
        for (i = 0; i < n; i++) {                                                                  \
            storage bits = encode(x[i]);                                                           \
            memcpy(out + i * sizeof bits, &bits, sizeof bits);                                     \
        }                                                                                          \
    }

DEFINE_ELEMENTS(f16, uint16_t, float, f16_to_f32, f32_to_f16)
DEFINE_ELEMENTS(bf16, uint16_t, float, bf16_to_f32, f32_to_bf16)
DEFINE_ELEMENTS(f32, uint32_t, float, f32_from_bits, f32_to_bits)
DEFINE_ELEMENTS(f64, uint64_t, double, f64_from_bits, f64_to_bits)

union numbers {
    PCCL_ALIGNED(64) float f32[STRIP];   /* no vector of it lies in two lines of the cache */
    double f64[STRIP];
};

struct type {
    size_t element, number;  /* bytes */
    void (*load)(void *numbers, const unsigned char *in, size_t n);
    void (*add)(void *numbers, const unsigned char *own, size_t n, uint32_t divisor);
    void (*store)(unsigned char *out, const void *numbers, size_t n);
    void (*write)(const struct format *format, unsigned char *out, const void *numbers, size_t n);
    void (*read)(const struct format *format, const unsigned char *in, void *numbers, size_t n);
};

static const struct type types[] = {     /* from PCCL_F16 on */
    {2, sizeof(float), load_f16, add_f16, store_f16, write_f32, read_f32},
    {2, sizeof(float), load_bf16, add_bf16, store_bf16, write_f32, read_f32},
    {4, sizeof(float), load_f32, add_f32, store_f32, write_f32, read_f32},
    {8, sizeof(double), load_f64, add_f64, store_f64, write_f64, read_f64},
};

static const struct format *find_format(int format)
{
    const int last = (int)(sizeof formats / sizeof formats[0]);
    return format >= 1 && format <= last ? &formats[format - 1] : NULL;
}

static const struct type *find_type(int dtype)
{
    return dtype >= PCCL_F16 && dtype <= PCCL_F64 ? &types[dtype - PCCL_F16] : NULL;
}

/* ---- arrays ---- */

size_t pccl_quantized_block(int format)
{
    const struct format *found = find_format(format);
    return found != NULL ? found->block : 0;
}

static uint64_t bytes_of(const struct format *format, const struct type *type, uint64_t n)
{
    size_t rest = (size_t)(n % format->block);
    return n / format->block * block_bytes(format, type->number, format->block)
        + (rest > 0 ? block_bytes(format, type->number, rest) : 0);
}

/* Whether elements are what is computed with, where they are: then they need not be loaded. */
static bool is_number(const struct type *type, const unsigned char *element)
{
    return type->element == type->number && (uintptr_t)element % type->number == 0;
}

uint64_t pccl_quantized_size(int format, int dtype, uint64_t n)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    return how != NULL && type != NULL ? bytes_of(how, type, n) : 0;
}

int pccl_quantize(int format, int dtype, void *out, const void *in, size_t n)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    unsigned char *to = out;
    const unsigned char *from = in;
    union numbers x;
    size_t m;
    if (how == NULL || type == NULL)
        return PCCL_EINVAL;
    for (; n > 0; n -= m) {
        m = n < STRIP ? n : STRIP;
        if (is_number(type, from)) {
            type->write(how, to, from, m);
        } else {
            type->load(&x, from, m);
            type->write(how, to, &x, m);
        }
        from += m * type->element;
        to += bytes_of(how, type, m);
    }
    return PCCL_OK;
}

int pccl_dequantize(int format, int dtype, void *out, const void *in, size_t n)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    unsigned char *to = out;
    const unsigned char *from = in;
    union numbers x;
    size_t m;
    if (how == NULL || type == NULL)
        return PCCL_EINVAL;
    for (; n > 0; n -= m) {
        m = n < STRIP ? n : STRIP;
        type->read(how, from, &x, m);
        type->store(to, &x, m);
        from += bytes_of(how, type, m);
        to += m * type->element;
    }
    return PCCL_OK;
}

int pccl_quantized_add(int format, int dtype, void *sum, const void *own, size_t n,
                       uint32_t divisor, void *out)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    unsigned char *data = sum, *to = out;
    const unsigned char *ours = own;
    union numbers x;
    size_t m;
    if (how == NULL || type == NULL || divisor == 0)
        return PCCL_EINVAL;
    for (; n > 0; n -= m) {
        m = n < STRIP ? n : STRIP;
        type->read(how, data, &x, m);
        type->add(&x, ours, m, divisor);
        type->write(how, data, &x, m);
        if (to != NULL) {
            type->read(how, data, &x, m);
            type->store(to, &x, m);
            to += m * type->element;
        }
        data += bytes_of(how, type, m);
        ours += m * type->element;
    }
    return PCCL_OK;
}
