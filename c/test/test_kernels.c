/* test_kernels.c - the kernels at every type, operation, size and alignment, in blocks of exactly
 * the right size (for the sanitizers), and integer arithmetic that would be undefined in plain C.
 * tests/unit/test_kernels.py compares the values with numpy. */
#include "check.h"
#include "pccl_core.h"

#include <stdlib.h>
#include <string.h>

enum { SIZE_MAX_TESTED = 130, ALIGNMENT_MAX = 9 };

static uint32_t state = 1;

static unsigned char random_byte(void)
{
    state = state * 1664525u + 1013904223u;
    return (unsigned char)(state >> 24);
}

/* A block of exactly `bytes` that starts `offset` bytes after an aligned address. */
typedef struct {
    unsigned char *base;
    unsigned char *data;
} block;

static block block_new(size_t bytes, size_t offset)
{
    block made;
    size_t i;
    made.base = malloc(offset + bytes + (offset + bytes == 0));
    if (made.base == NULL)
        abort();
    made.data = made.base + offset;
    for (i = 0; i < bytes; i++)
        made.data[i] = random_byte();
    return made;
}

/* An operation on arrays gives the same results as on single elements, in place or not, and does
 * not change its operands. */
static void test_shape(int dtype, int redop, size_t n, size_t offset)
{
    const size_t size = pccl_dtype_size(dtype);
    const size_t bytes = n * size;
    block a = block_new(bytes, offset);
    block b = block_new(bytes, (offset * 5) % ALIGNMENT_MAX);
    block out = block_new(bytes, (offset * 3) % ALIGNMENT_MAX);
    block kept = block_new(bytes, 0);
    block wanted = block_new(bytes, 0);
    size_t i;

    for (i = 0; i < n; i++)
        pccl_reduce(dtype, redop, wanted.data + i * size, a.data + i * size, b.data + i * size, 1,
                    7);
    memcpy(kept.data, a.data, bytes);
    CHECK(pccl_reduce(dtype, redop, out.data, a.data, b.data, n, 7) == PCCL_OK);
    CHECK(memcmp(out.data, wanted.data, bytes) == 0);
    CHECK(memcmp(a.data, kept.data, bytes) == 0);
    CHECK(pccl_reduce(dtype, redop, a.data, a.data, b.data, n, 7) == PCCL_OK);
    CHECK(memcmp(a.data, wanted.data, bytes) == 0);
    CHECK(pccl_reduce(dtype, redop, b.data, kept.data, b.data, n, 7) == PCCL_OK);
    CHECK(memcmp(b.data, wanted.data, bytes) == 0);
    CHECK(pccl_reduce(dtype, redop, out.data, kept.data, kept.data, n, 7) == PCCL_OK);
    CHECK(pccl_reduce(dtype, redop, kept.data, kept.data, kept.data, n, 7) == PCCL_OK);
    CHECK(memcmp(kept.data, out.data, bytes) == 0);
    free(a.base);
    free(b.base);
    free(out.base);
    free(kept.base);
    free(wanted.base);
}

static void test_shapes(void)
{
    int dtype;
    int redop;
    size_t n;
    for (dtype = PCCL_U8; dtype <= PCCL_F64; dtype++)
        for (redop = PCCL_SUM; redop <= PCCL_MIN; redop++)
            for (n = 0; n <= SIZE_MAX_TESTED; n++)
                test_shape(dtype, redop, n, n % ALIGNMENT_MAX);
}

static void test_integers(void)
{
    const int32_t low = INT32_MIN;
    const int32_t high = INT32_MAX;
    const int32_t one = 1;
    const int32_t zero = 0;
    const int64_t low64 = INT64_MIN;
    const int64_t zero64 = 0;
    const uint16_t big = 65535;
    const int8_t minus = -7;
    const int8_t none = 0;
    int32_t out;
    int64_t out64;
    uint16_t out16;
    int8_t out8;

    pccl_reduce(PCCL_I32, PCCL_SUM, &out, &high, &one, 1, 0);
    CHECK(out == INT32_MIN);
    pccl_reduce(PCCL_I32, PCCL_PROD, &out, &high, &high, 1, 0);
    CHECK(out == 1);
    pccl_reduce(PCCL_I32, PCCL_AVG, &out, &low, &zero, 1, UINT32_MAX);
    CHECK(out == 0);
    pccl_reduce(PCCL_I32, PCCL_AVG, &out, &low, &zero, 1, 1);
    CHECK(out == INT32_MIN);
    pccl_reduce(PCCL_I64, PCCL_AVG, &out64, &low64, &zero64, 1, 2);
    CHECK(out64 == INT64_MIN / 2);
    pccl_reduce(PCCL_U16, PCCL_PROD, &out16, &big, &big, 1, 0);
    CHECK(out16 == 1);
    pccl_reduce(PCCL_I8, PCCL_AVG, &out8, &minus, &none, 1, 2);
    CHECK(out8 == -3);
}

static void test_arguments(void)
{
    unsigned char memory[8] = {0};
    int dtype;

    CHECK(pccl_dtype_size(-1) == 0 && pccl_dtype_size(PCCL_I128 + 1) == 0);
    for (dtype = PCCL_U8; dtype <= PCCL_F64; dtype++)
        CHECK(pccl_dtype_size(dtype) >= 1 && pccl_dtype_size(dtype) <= 8);
    CHECK(pccl_reduce(-1, PCCL_SUM, memory, memory, memory, 1, 1) == PCCL_EINVAL);
    CHECK(pccl_reduce(PCCL_I128 + 1, PCCL_SUM, memory, memory, memory, 1, 1) == PCCL_EINVAL);
    CHECK(pccl_reduce(PCCL_I128, PCCL_MAX, memory, memory, memory, 0, 1) == PCCL_EINVAL);
    CHECK(pccl_reduce(PCCL_F32, -1, memory, memory, memory, 1, 1) == PCCL_EINVAL);
    CHECK(pccl_reduce(PCCL_F32, PCCL_MIN + 1, memory, memory, memory, 1, 1) == PCCL_EINVAL);
    CHECK(pccl_reduce(PCCL_F32, PCCL_AVG, memory, memory, memory, 1, 0) == PCCL_EINVAL);
    CHECK(pccl_reduce(PCCL_F32, PCCL_SUM, NULL, NULL, NULL, 0, 0) == PCCL_OK);
}

static void test_outer(void)
{
    enum { N = 67 };
    /* Unaligned, and of exactly the right size. */
    block theta = block_new(N * sizeof(float), 1);
    block v = block_new(N * sizeof(float), 2);
    block g = block_new(N * sizeof(float), 3);
    const float two = 2.0f;
    const float half = 0.5f;
    float value;
    int i;

    for (i = 0; i < N; i++) {
        memcpy(theta.data + 4 * i, &two, 4);
        memcpy(v.data + 4 * i, &half, 4);
        memcpy(g.data + 4 * i, &half, 4);
    }
    /* v = 0.5 * 0.5 + 0.5 = 0.75; theta = 2 - 1 * (0.5 + 0.5 * 0.75) = 1.125 */
    pccl_outer_sgd((void *)theta.data, (void *)v.data, (void *)g.data, N, 1.0f, 0.5f, 1);
    for (i = 0; i < N; i++) {
        memcpy(&value, v.data + 4 * i, 4);
        CHECK(value == 0.75f);
        memcpy(&value, theta.data + 4 * i, 4);
        CHECK(value == 1.125f);
    }
    pccl_subtract_f32((void *)theta.data, (void *)theta.data, (void *)g.data, N);
    pccl_subtract_f32((void *)g.data, (void *)theta.data, (void *)g.data, N);
    memcpy(&value, g.data + 4 * (N - 1), 4);
    CHECK(value == 0.125f);
    free(theta.base);
    free(v.base);
    free(g.base);
}

static void test_self_test(void)
{
    const size_t size = pccl_self_test(NULL, 0);
    unsigned char *whole = malloc(size);
    unsigned char *again = malloc(size);

    if (whole == NULL || again == NULL)
        abort();
    memset(again, 0x5a, size);
    CHECK(size > 10000);
    CHECK(pccl_self_test(whole, size) == size);
    CHECK(pccl_self_test(again, 1001) == size);
    CHECK(memcmp(whole, again, 1001) == 0 && again[1001] == 0x5a);
    free(whole);
    free(again);
}

int main(void)
{
    test_shapes();
    test_integers();
    test_arguments();
    test_outer();
    test_self_test();
    return check_report("kernels");
}
