/* test_quantize.c - the quantizing kernels at every format, type and alignment and many sizes, in
 * blocks of exactly the right size (for the sanitizers). tests/unit/test_quantize.py compares the
 * values with numpy. */
#include "check.h"
#include "pccl_core.h"

#include <stdlib.h>
#include <string.h>

/* A block of exactly `bytes` bytes that starts `offset` bytes after an aligned address, with a copy
 * of the bytes at `copy` if that is not NULL. */
typedef struct {
    unsigned char *base;
    unsigned char *data;
} block;

static block block_new(size_t bytes, size_t offset, const void *copy)
{
    block made;
    made.base = malloc(offset + bytes + (offset + bytes == 0));
    if (made.base == NULL)
        abort();
    made.data = made.base + offset;
    if (copy != NULL && bytes > 0)
        memcpy(made.data, copy, bytes);
    else
        memset(made.data, 0x33, bytes);
    return made;
}

/* The result does not depend on the alignment of the arrays, and own is not changed unless it is
 * out. */
static void test_shape(int format, int dtype, int redop, size_t n, size_t offset)
{
    const size_t bytes = n * pccl_dtype_size(dtype);
    const size_t size = (size_t)pccl_quantized_size(format, dtype, n);
    block own = block_new(bytes, offset, NULL), kept = block_new(bytes, 0, NULL);
    block out = block_new(bytes, (offset * 3) % 8, NULL);
    block data, moved, again;
    unsigned char *to[3];
    size_t i;
    for (i = 0; i + 1 < bytes; i += 3)       /* some numbers; none of them a NaN */
        own.data[i] = (unsigned char)(i * 7 % 0x70);
    memcpy(kept.data, own.data, bytes);
    data = block_new(size, (offset * 5) % 8, NULL);
    CHECK(pccl_quantize(format, dtype, data.data, own.data, n) == PCCL_OK);
    moved = block_new(size, (offset + 1) % 8, data.data);
    again = block_new(size, (offset + 2) % 8, data.data);
    to[0] = data.data;
    to[1] = moved.data;
    to[2] = again.data;
    for (i = 0; i < 3; i++) {
        unsigned char *result = i == 0 ? out.data : i == 1 ? NULL : own.data;
        CHECK(pccl_quantized_reduce(format, dtype, redop, to[i], own.data, n, 3, result)
              == PCCL_OK);
        CHECK(i == 2 || memcmp(own.data, kept.data, bytes) == 0);
    }
    CHECK(memcmp(moved.data, data.data, size) == 0 && memcmp(again.data, data.data, size) == 0);
    CHECK(memcmp(own.data, out.data, bytes) == 0);
    CHECK(pccl_dequantize(format, dtype, kept.data, data.data, n) == PCCL_OK);
    CHECK(memcmp(kept.data, out.data, bytes) == 0);
    CHECK(pccl_quantized_combine(format, dtype, PCCL_MAX, kept.data, data.data, moved.data, n, 1)
          == PCCL_OK);
    CHECK(memcmp(kept.data, out.data, bytes) == 0);      /* the larger of two that are equal */
    memset(kept.data, 0, bytes);
    CHECK(pccl_dequantize_add(format, dtype, kept.data, data.data, n) == PCCL_OK);
    CHECK(pccl_dequantize(format, dtype, out.data, data.data, n) == PCCL_OK);
    CHECK(pccl_quantize(format, dtype, moved.data, kept.data, n) == PCCL_OK);
    CHECK(pccl_quantize(format, dtype, again.data, out.data, n) == PCCL_OK);
    CHECK(memcmp(moved.data, again.data, size) == 0);
    free(own.base);
    free(kept.base);
    free(out.base);
    free(data.base);
    free(moved.base);
    free(again.base);
}

static void test_shapes(void)
{
    int format;
    int dtype;
    size_t n;
    for (format = PCCL_BLOCK_8; format <= PCCL_ZERO_POINT_16; format++)
        for (dtype = PCCL_F16; dtype <= PCCL_F64; dtype++)
            for (n = 0; n <= 600; n += n < 70 ? 1 : 31) {
                test_shape(format, dtype, PCCL_AVG, n, n % 8);
                test_shape(format, dtype, n % 2 != 0 ? PCCL_MAX : PCCL_MIN, n, n % 8);
            }
}

static void test_arguments(void)
{
    unsigned char memory[64] = {0};
    CHECK(pccl_quantized_size(PCCL_BLOCK_8, PCCL_F32, 0) == 0);
    CHECK(pccl_quantized_size(PCCL_BLOCK_8, PCCL_F32, 257) == 257 + 2 * sizeof(float));
    CHECK(pccl_quantized_size(PCCL_BLOCK_4, PCCL_F64, 65) == 33 + 2 * sizeof(double));
    CHECK(pccl_quantize(PCCL_BLOCK_8, PCCL_I32, memory, memory, 1) == PCCL_EINVAL);
    CHECK(pccl_quantize(PCCL_UNQUANTIZED, PCCL_F32, memory, memory, 1) == PCCL_EINVAL);
    CHECK(pccl_dequantize_add(PCCL_BLOCK_8, PCCL_I32, memory, memory, 1) == PCCL_EINVAL);
    CHECK(pccl_quantized_reduce(PCCL_BLOCK_8, PCCL_F32, PCCL_AVG, memory, memory, 1, 0, NULL)
          == PCCL_EINVAL);
    CHECK(pccl_quantized_reduce(PCCL_BLOCK_8, PCCL_F32, PCCL_PROD, memory, memory, 1, 1, NULL)
          == PCCL_EINVAL);
    CHECK(pccl_quantized_combine(PCCL_BLOCK_8, PCCL_F32, PCCL_PROD, memory, memory, memory, 1, 1)
          == PCCL_EINVAL);
    CHECK(pccl_quantized_combine(PCCL_BLOCK_8, PCCL_I32, PCCL_SUM, memory, memory, memory, 1, 1)
          == PCCL_EINVAL);
}

int main(void)
{
    test_shapes();
    test_arguments();
    return check_report("quantize");
}
