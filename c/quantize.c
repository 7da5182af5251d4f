/* quantize.c - arrays of floats as blocks of small codes, and the step of a ring that adds to them.
 *
 * DESIGN. docs/quantization.md says what each format is and why. A block is a header, which says
 * how a code becomes a number, and its codes; every format is the one affine map of blocks.inc,
 * and differs in how the map is found and how many bits a code has. One type of elements is one
 * inclusion of blocks.inc; a format is data, looked at once a block.
 *
 * A block with an element that is not finite has a NaN for a step: all its elements are read as NaN.
 * Steps are never below the least normal number, so that their inverses are finite and a processor
 * that flushes subnormals computes the same bits. */
#include "pccl.h"

#include <float.h>
#include <stdbool.h>

#include "half.h"

enum { BLOCK_MAX = 256 };

enum rule { SYMMETRIC, MIN_MAX, ZERO_POINT };

struct format {
    enum rule rule;
    int bits;                /* of a code */
    int middle;              /* of the codes: half their number */
    size_t block;            /* elements */
};

static const struct format formats[] = {
    {SYMMETRIC, 8, 128, BLOCK_MAX},    {SYMMETRIC, 4, 8, 64},
    {MIN_MAX, 8, 128, BLOCK_MAX},      {MIN_MAX, 16, 32768, BLOCK_MAX},
    {ZERO_POINT, 8, 128, BLOCK_MAX},   {ZERO_POINT, 16, 32768, BLOCK_MAX},
};

static PCCL_INLINE size_t code_bytes(const struct format *format, size_t n)
{
    return (n * (size_t)format->bits + 7) / 8;
}

static PCCL_INLINE size_t block_bytes(const struct format *format, size_t real, size_t n)
{
    return (format->rule == SYMMETRIC ? 1 : 2) * real + code_bytes(format, n);
}

/* ---- the kernels of each type ---- */

#define REAL float
#define WORD uint32_t
#define INTEGER int32_t
#define INFINITE 0x7f800000u
#define LEAST FLT_MIN
#define ROUNDER 12582912.0f

#define T(name) name##_f16
#define STORAGE uint16_t
#define DECODE f16_to_f32
#define ENCODE f32_to_f16
#include "blocks.inc"
#undef T
#undef DECODE
#undef ENCODE

#define T(name) name##_bf16
#define DECODE bf16_to_f32
#define ENCODE f32_to_bf16
#include "blocks.inc"
#undef T
#undef STORAGE
#undef DECODE
#undef ENCODE

#define T(name) name##_f32
#define STORAGE uint32_t
#define DECODE f32_from_bits
#define ENCODE f32_to_bits
#include "blocks.inc"
#undef T
#undef STORAGE
#undef DECODE
#undef ENCODE
#undef REAL
#undef WORD
#undef INTEGER
#undef INFINITE
#undef LEAST
#undef ROUNDER

#define REAL double
#define WORD uint64_t
#define INTEGER int64_t
#define INFINITE 0x7ff0000000000000u
#define LEAST DBL_MIN
#define ROUNDER 6755399441055744.0
#define T(name) name##_f64
#define STORAGE uint64_t
#define DECODE f64_from_bits
#define ENCODE f64_to_bits
#include "blocks.inc"

/* ---- the types, from PCCL_F16 on ---- */

struct kernels {
    size_t real;             /* bytes of a number in a header */
    void (*quantize)(const struct format *format, unsigned char *out, const unsigned char *in,
                     size_t n);
    void (*dequantize)(const struct format *format, unsigned char *out, const unsigned char *in,
                       size_t n);
    void (*add)(const struct format *format, unsigned char *sum, const unsigned char *own, size_t n,
                uint32_t divisor, unsigned char *out);
};

static const struct kernels kernels[] = {
    {sizeof(float), quantize_f16, dequantize_f16, add_f16},
    {sizeof(float), quantize_bf16, dequantize_bf16, add_bf16},
    {sizeof(float), quantize_f32, dequantize_f32, add_f32},
    {sizeof(double), quantize_f64, dequantize_f64, add_f64},
};

static const struct format *find_format(int format)
{
    const int last = (int)(sizeof formats / sizeof formats[0]);
    return format >= 1 && format <= last ? &formats[format - 1] : NULL;
}

static const struct kernels *find_kernels(int dtype)
{
    return dtype >= PCCL_F16 && dtype <= PCCL_F64 ? &kernels[dtype - PCCL_F16] : NULL;
}

size_t pccl_quantized_block(int format)
{
    const struct format *found = find_format(format);
    return found != NULL ? found->block : 0;
}

uint64_t pccl_quantized_size(int format, int dtype, uint64_t n)
{
    const struct format *found = find_format(format);
    const struct kernels *type = find_kernels(dtype);
    uint64_t whole;
    size_t rest;
    if (found == NULL || type == NULL)
        return 0;
    whole = n / found->block * block_bytes(found, type->real, found->block);
    rest = (size_t)(n % found->block);
    return whole + (rest > 0 ? block_bytes(found, type->real, rest) : 0);
}

int pccl_quantize(int format, int dtype, void *out, const void *in, size_t n)
{
    const struct format *found = find_format(format);
    const struct kernels *type = find_kernels(dtype);
    if (found == NULL || type == NULL)
        return PCCL_EINVAL;
    type->quantize(found, out, in, n);
    return PCCL_OK;
}

int pccl_dequantize(int format, int dtype, void *out, const void *in, size_t n)
{
    const struct format *found = find_format(format);
    const struct kernels *type = find_kernels(dtype);
    if (found == NULL || type == NULL)
        return PCCL_EINVAL;
    type->dequantize(found, out, in, n);
    return PCCL_OK;
}

int pccl_quantized_add(int format, int dtype, void *sum, const void *own, size_t n,
                       uint32_t divisor, void *out)
{
    const struct format *found = find_format(format);
    const struct kernels *type = find_kernels(dtype);
    if (found == NULL || type == NULL || divisor == 0)
        return PCCL_EINVAL;
    type->add(found, sum, own, n, divisor, out);
    return PCCL_OK;
}
