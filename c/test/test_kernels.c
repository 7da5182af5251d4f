/* test_kernels.c - the kernels at every type, operation, size and alignment, in blocks of exactly
 * the right size (for the sanitizers), and integer arithmetic that would be undefined in plain C.
 * tests/unit/test_kernels.py compares the values with numpy. */
#include "check.h"
#include "kernels/half.h"
#include "pccl_core.h"

#include <stdlib.h>
#include <string.h>

enum { SIZE_MAX_TESTED = 130, ALIGNMENT_MAX = 9 };

static uint32_t state = 1;

static uint32_t random_word(void)
{
    state = state * 1664525u + 1013904223u;
    return state;
}

static unsigned char random_byte(void)
{
    return (unsigned char)(random_word() >> 24);
}

/* The best instruction set that the kernels may use. */
static enum isa allowed = ISA_V4;

enum isa __real_pccl_isa(void);
enum isa __wrap_pccl_isa(void);

enum isa __wrap_pccl_isa(void)
{
    const enum isa found = __real_pccl_isa();
    return found < allowed ? found : allowed;
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

/* Every sum of bytes by many divisors, and sums of words, by the division of C. */
static void test_means(void)
{
    const uint32_t far[] = {65535, 65536, 65537, UINT32_MAX};
    uint32_t divisor, i;
    for (divisor = 2; divisor < 700; divisor++) {
        const uint32_t d = divisor < 600 ? divisor : far[divisor % 4];
        unsigned char in[256], none[256] = {0}, out[256];
        int8_t signs[256];
        for (i = 0; i < 256; i++)
            in[i] = (unsigned char)i;
        pccl_reduce(PCCL_U8, PCCL_AVG, out, in, none, 256, d);
        pccl_reduce(PCCL_I8, PCCL_AVG, signs, in, none, 256, d);
        for (i = 0; i < 256; i++) {
            int8_t number;
            memcpy(&number, &in[i], 1);
            CHECK(out[i] == i / d && signs[i] == (int64_t)number / (int64_t)d);
        }
    }
    for (i = 0; i < 20000; i++) {
        const uint32_t d = (random_word() >> random_word() % 31) | 1;
        const uint64_t near = ((uint64_t)random_word() << 32 | random_word()) / d * d;
        const uint64_t in[3] = {near - 1, near, near + 1}, none[3] = {0};
        uint64_t out[3];
        int64_t numbers[3], signs[3];
        size_t j;
        memcpy(numbers, in, sizeof in);
        pccl_reduce(PCCL_U64, PCCL_AVG, out, in, none, 3, d);
        pccl_reduce(PCCL_I64, PCCL_AVG, signs, in, none, 3, d);
        for (j = 0; j < 3; j++)
            CHECK(out[j] == in[j] / d && signs[j] == numbers[j] / (int64_t)d);
    }
}

/* The instructions of a processor convert as half.h does: every half to fp32; and to a half, every
 * number that is one or halfway between two, its neighbors, and many others. */
static void test_halves(void)
{
    enum { HALVES = 1 << 16, NEAR = 9 };
    static float numbers[NEAR * HALVES];
    static uint16_t in[HALVES], out[NEAR * HALVES];
    uint32_t i, j, bits, wanted;
    for (i = 0; i < HALVES; i++)
        in[i] = (uint16_t)i;
    load_f16(numbers, (const unsigned char *)in, HALVES);
    for (i = 0; i < HALVES; i++) {
        const float value = f16_to_f32(in[i]);
        memcpy(&bits, &numbers[i], sizeof bits);
        memcpy(&wanted, &value, sizeof wanted);
        CHECK(bits == wanted || (value != value && numbers[i] != numbers[i]));
    }
    for (i = 0; i < HALVES; i++)
        for (j = 0; j < NEAR; j++) {
            const uint32_t steps[] = {0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 1u << 22, 1u << 23};
            const float value = f16_to_f32(in[i]);
            memcpy(&bits, &value, sizeof bits);
            bits = j < NEAR - 1 ? bits + steps[j] : random_word();
            memcpy(&numbers[NEAR * i + j], &bits, sizeof bits);
        }
    store_f16((unsigned char *)out, numbers, NEAR * HALVES);
    for (i = 0; i < NEAR * HALVES; i++)
        CHECK(out[i] == f32_to_f16(numbers[i]));
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

/* The self-test as every instruction set computes it, whole or cut short. */
static void test_self_test(void)
{
    const size_t size = pccl_self_test(NULL, 0);
    unsigned char *whole = malloc(size);
    unsigned char *again = malloc(size);
    const int best = allowed;
    int isa;

    if (whole == NULL || again == NULL)
        abort();
    CHECK(size > 10000);
    allowed = ISA_BASE;
    CHECK(pccl_self_test(whole, size) == size);
    for (isa = ISA_V3; isa <= best; isa++) {
        allowed = (enum isa)isa;
        CHECK(pccl_self_test(again, size) == size && memcmp(whole, again, size) == 0);
    }
    memset(again, 0x5a, size);
    CHECK(pccl_self_test(again, 1001) == size);
    CHECK(memcmp(whole, again, 1001) == 0 && again[1001] == 0x5a);
    free(whole);
    free(again);
}

int main(void)
{
    int isa;
    for (isa = ISA_BASE; isa <= ISA_V4; isa++) {
        allowed = (enum isa)isa;
        test_shapes();
        test_integers();
        test_means();
        test_halves();
    }
    test_arguments();
    test_outer();
    test_self_test();
    return check_report("kernels");
}
