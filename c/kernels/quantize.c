/* quantize.c - arrays of floats as blocks of small codes, and the step of a ring that reduces them.
 *
 * DESIGN. docs/internals/quantization.md describes each format and its reasons. A block is a
 * header, which gives the map from codes to numbers, and its codes. All formats use the affine map
 * of blocks.inc; they differ in how they choose the map, and in the number of bits of a code.
 *
 * Data is processed in strips, through a buffer of fp32 or fp64 numbers that stays in the first
 * level of the cache: blocks are decoded into it while a contribution is added, and then it is
 * encoded. So a step of a ring is one pass over memory. fp32 and fp64 elements are used in place;
 * separate functions load and store the other types, so that there need not be one function for
 * each pair of type and format. MAX and MIN are separate passes over the decoded numbers in the
 * cache; only the sum, the most common operation, is fused with decoding.
 *
 * A block with an element that is not finite has a NaN for a step; a block whose header is not
 * finite is read as all NaN. Steps are never below the least normal number, so that their inverses
 * are finite and processors that flush subnormals compute the same bits. */
#include "pccl_core.h"

#include <float.h>
#include <stdbool.h>

#include "kernels/half.h"

enum {
    STRIP = 2048,            /* numbers; a multiple of every format's block */
    BLOCK_LEAST = 64,
    BLOCKS_MAX = STRIP / BLOCK_LEAST,
    LANES = 16               /* codes at a time */
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

static PCCL_INLINE uint64_t bytes_of(const struct format *format, size_t real, uint64_t n)
{
    size_t rest = (size_t)(n % format->block);
    return n / format->block * block_bytes(format, real, format->block)
        + (rest > 0 ? block_bytes(format, real, rest) : 0);
}

/* ---- blocks ---- */

/* Runs BLOCKS(format, block), for whole blocks: the compiler knows the format and the length of the
 * loops. */
#define EACH_FORMAT(number)                                                                        \
    do {                                                                                           \
        switch (number) {                                                                          \
        case 0: BLOCKS(&formats[0], formats[0].block); break;                                      \
        case 1: BLOCKS(&formats[1], formats[1].block); break;                                      \
        case 2: BLOCKS(&formats[2], formats[2].block); break;                                      \
        case 3: BLOCKS(&formats[3], formats[3].block); break;                                      \
        case 4: BLOCKS(&formats[4], formats[4].block); break;                                      \
        case 5: BLOCKS(&formats[5], formats[5].block); break;                                      \
        }                                                                                          \
    } while (0)

/* A shorter block is the last of an array, so it need not be fast. */
#define DECLARE_REST(type)                                                                         \
    static void write_rest_##type(int format, unsigned char *out, const void *numbers, size_t n,   \
                                  const void *next);                                               \
    static void read_rest_##type(int format, const unsigned char *in, const void *own,             \
                                 void *numbers, size_t n);
DECLARE_REST(f32)
DECLARE_REST(f64)

#define REAL float
#define WORD uint32_t
#define INTEGER int32_t
#define INFINITE 0x7f800000u
#define LEAST FLT_MIN
#define ROUNDER 12582912.0f
#define REST(name) name##_rest_f32

#define T(name) name##_f32_body
#define LEVEL 0
#define TARGET
#include "kernels/blocks.inc"
#undef T
#undef LEVEL
#undef TARGET

#if defined PCCL_X86_LEVELS
#define T(name) name##_f32_v3
#define LEVEL 3
#define TARGET PCCL_V3
#include "kernels/blocks.inc"
#undef T
#undef LEVEL
#undef TARGET

#define T(name) name##_f32_v4
#define LEVEL 4
#define TARGET PCCL_V4
#include "kernels/blocks.inc"
#undef T
#undef LEVEL
#undef TARGET
#endif

#undef REAL
#undef WORD
#undef INTEGER
#undef INFINITE
#undef LEAST
#undef ROUNDER
#undef REST

/* fp64 is seldom quantized, and wheels should stay small: only for the target of the build. */
#define REAL double
#define WORD uint64_t
#define INTEGER int64_t
#define INFINITE 0x7ff0000000000000u
#define LEAST DBL_MIN
#define ROUNDER 6755399441055744.0
#define REST(name) name##_rest_f64
#define T(name) name##_f64
#define LEVEL 0
#define TARGET
#include "kernels/blocks.inc"

#define DEFINE_REST(type, suffix)                                                                  \
    static void write_rest_##type(int format, unsigned char *out, const void *numbers, size_t n,   \
                                  const void *next)                                                \
    {                                                                                              \
        write_blocks_##suffix(&formats[format], n, out, numbers, n, next);                         \
    }                                                                                              \
    static void read_rest_##type(int format, const unsigned char *in, const void *own,             \
                                 void *numbers, size_t n)                                          \
    {                                                                                              \
        read_blocks_##suffix(&formats[format], n, in, own, numbers, n);                            \
    }

DEFINE_REST(f32, f32_body)
DEFINE_REST(f64, f64)

CHOOSE(write_f32,
       (int format, unsigned char *out, const void *numbers, size_t n, const void *next),
       (format, out, numbers, n, next))
CHOOSE(read_f32,
       (int format, const unsigned char *in, const void *own, void *numbers, size_t n),
       (format, in, own, numbers, n))
CHOOSE(extreme_f32, (bool largest, const void *own, void *numbers, size_t n),
       (largest, own, numbers, n))
CHOOSE(divide_f32, (void *numbers, size_t n, uint32_t divisor), (numbers, n, divisor))

/* ---- elements ---- */

/* fp32 and fp64 to numbers and back; half.h has this for the other types. Every NaN becomes the one
 * of exact.h. */
#define DEFINE_ELEMENTS(type, storage, real, BUILD)                                                \
    static void load_##type(void *numbers, const unsigned char *in, size_t n)                      \
    {                                                                                              \
        memcpy(numbers, in, n * sizeof(real));                                                     \
    }                                                                                              \
    static PCCL_INLINE void store_##type##_body(unsigned char *out, const void *numbers, size_t n) \
    {                                                                                              \
        const real *x = numbers;                                                                   \
        size_t i;                                                                                  \
        for (i = 0; i < n; i++) {                                                                  \
            storage bits = type##_to_bits(x[i]);                                                   \
            memcpy(out + i * sizeof bits, &bits, sizeof bits);                                     \
        }                                                                                          \
    }                                                                                              \
    BUILD(store_##type, (unsigned char *out, const void *numbers, size_t n), (out, numbers, n))

DEFINE_ELEMENTS(f32, uint32_t, float, DISPATCH)
DEFINE_ELEMENTS(f64, uint64_t, double, BUILD_ONCE)

union numbers {
    PCCL_ALIGNED(64) float f32[STRIP];   /* so that no vector spans two lines of the cache */
    double f64[STRIP];
};

struct type {
    size_t element, number;  /* bytes */
    void (*load)(void *numbers, const unsigned char *in, size_t n);
    void (*store)(unsigned char *out, const void *numbers, size_t n);
    void (*divide)(void *numbers, size_t n, uint32_t divisor);
    void (*extreme)(bool largest, const void *own, void *numbers, size_t n);
    void (*write)(int format, unsigned char *out, const void *numbers, size_t n,
                  const void *next);
    void (*read)(int format, const unsigned char *in, const void *own, void *numbers, size_t n);
};

#define NUMBERS(real) divide_##real, extreme_##real, write_##real, read_##real

static const struct type types[] = {     /* from PCCL_F16 on */
    {2, sizeof(float), load_f16, store_f16, NUMBERS(f32)},
    {2, sizeof(float), load_bf16, store_bf16, NUMBERS(f32)},
    {4, sizeof(float), load_f32, store_f32, NUMBERS(f32)},
    {8, sizeof(double), load_f64, store_f64, NUMBERS(f64)},
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

uint64_t pccl_quantized_size(int format, int dtype, uint64_t n)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    return how != NULL && type != NULL ? bytes_of(how, type->number, n) : 0;
}

/* The length of the next strip of n elements: some whole blocks, or the last, shorter block. */
static size_t strip(const struct format *format, size_t n)
{
    if (n < format->block)
        return n;
    return n < STRIP ? n - n % format->block : STRIP;
}

/* Whether elements can be used as numbers in place, without a copy. */
static bool is_number(const struct type *type, const unsigned char *element)
{
    return type->element == type->number && (uintptr_t)element % type->number == 0;
}

/* Elements as numbers, in place or copied to x. */
static const void *numbers_of(const struct type *type, const unsigned char *elements,
                              union numbers *x, size_t n)
{
    if (is_number(type, elements))
        return elements;
    type->load(x, elements, n);
    return x;
}

/* Reads quantized elements. */
static void read_elements(const struct type *type, int format, const unsigned char *in,
                          unsigned char *out, size_t n)
{
    union numbers x;
    if (is_number(type, out)) {
        type->read(format, in, NULL, out, n);
        return;
    }
    type->read(format, in, NULL, &x, n);
    type->store(out, &x, n);
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
        m = strip(how, n);
        type->write(format - 1, to, numbers_of(type, from, &x, m), m, from + m * type->element);
        from += m * type->element;
        to += bytes_of(how, type->number, m);
    }
    return PCCL_OK;
}

int pccl_dequantize(int format, int dtype, void *out, const void *in, size_t n)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    unsigned char *to = out;
    const unsigned char *from = in;
    size_t m;
    if (how == NULL || type == NULL)
        return PCCL_EINVAL;
    for (; n > 0; n -= m) {
        m = strip(how, n);
        read_elements(type, format - 1, from, to, m);
        from += bytes_of(how, type->number, m);
        to += m * type->element;
    }
    return PCCL_OK;
}

int pccl_dequantize_add(int format, int dtype, void *out, const void *in, size_t n)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    unsigned char *to = out;
    const unsigned char *from = in;
    union numbers x, y;
    size_t m;
    if (how == NULL || type == NULL)
        return PCCL_EINVAL;
    for (; n > 0; n -= m) {
        m = strip(how, n);
        type->read(format - 1, from, numbers_of(type, to, &y, m), &x, m);
        type->store(to, &x, m);
        from += bytes_of(how, type->number, m);
        to += m * type->element;
    }
    return PCCL_OK;
}

/* Whether quantized elements can be reduced by that operation, with that divisor. */
static bool may_reduce(int redop, uint32_t divisor)
{
    return redop >= PCCL_SUM && redop <= PCCL_MIN && redop != PCCL_PROD
        && (redop != PCCL_AVG || divisor > 0);
}

/* x = the quantized elements reduced with `own`. */
static void reduce_into(const struct type *type, int format, int redop, const unsigned char *in,
                        const void *own, union numbers *x, size_t n, uint32_t divisor)
{
    if (redop == PCCL_MAX || redop == PCCL_MIN) {
        type->read(format, in, NULL, x, n);
        type->extreme(redop == PCCL_MAX, own, x, n);
        return;
    }
    type->read(format, in, own, x, n);
    if (redop == PCCL_AVG && divisor > 1)
        type->divide(x, n, divisor);
}

int pccl_quantized_combine(int format, int dtype, int redop, void *out, const void *a,
                           const void *b, size_t n, uint32_t divisor)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    const unsigned char *left = a, *right = b;
    unsigned char *to = out;
    union numbers x, y;
    size_t m;
    if (how == NULL || type == NULL || !may_reduce(redop, divisor))
        return PCCL_EINVAL;
    for (; n > 0; n -= m) {
        m = strip(how, n);
        type->read(format - 1, right, NULL, &y, m);
        reduce_into(type, format - 1, redop, left, &y, &x, m, divisor);
        type->store(to, &x, m);
        left += bytes_of(how, type->number, m);
        right += bytes_of(how, type->number, m);
        to += m * type->element;
    }
    return PCCL_OK;
}

int pccl_quantized_reduce(int format, int dtype, int redop, void *partial, const void *own,
                          size_t n, uint32_t divisor, void *out)
{
    const struct format *how = find_format(format);
    const struct type *type = find_type(dtype);
    unsigned char *data = partial, *to = out;
    const unsigned char *ours = own;
    union numbers x, y;
    size_t m;
    if (how == NULL || type == NULL || !may_reduce(redop, divisor))
        return PCCL_EINVAL;
    for (; n > 0; n -= m) {
        m = strip(how, n);
        reduce_into(type, format - 1, redop, data, numbers_of(type, ours, &y, m), &x, m, divisor);
        type->write(format - 1, data, &x, m, ours + m * type->element);
        if (to != NULL) {
            read_elements(type, format - 1, data, to, m);
            to += m * type->element;
        }
        data += bytes_of(how, type->number, m);
        ours += m * type->element;
    }
    return PCCL_OK;
}
