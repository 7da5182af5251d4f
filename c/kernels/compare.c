/* compare.c - how two buffers of elements differ, for reports on shared state that has diverged.
 *
 * Elements are compared as sign and magnitude. The bits of IEEE 754 magnitudes have the same order
 * as the numbers, so the distance of two numbers in units in the last place is the difference of
 * two integers. */
#include "pccl_core.h"

#include <string.h>

struct form {
    size_t width;            /* bytes of an element */
    uint64_t sign;           /* the sign bit of floats; 0 in others */
    uint64_t infinity;       /* the greatest magnitude that is not a NaN */
    int is_signed;           /* an integer in two's complement */
};

struct number {
    uint64_t magnitude;
    int negative, nan;
};

static struct form form_of(int dtype)
{
    struct form form = {0};
    form.width = pccl_dtype_size(dtype);
    form.infinity = UINT64_MAX;
    switch (dtype) {
    case PCCL_F16:
        form.sign = 0x8000;
        form.infinity = 0x7c00;
        break;
    case PCCL_BF16:
        form.sign = 0x8000;
        form.infinity = 0x7f80;
        break;
    case PCCL_F32:
        form.sign = 0x80000000u;
        form.infinity = 0x7f800000u;
        break;
    case PCCL_F64:
        form.sign = UINT64_C(1) << 63;
        form.infinity = UINT64_C(0x7ff) << 52;
        break;
    case PCCL_I8: case PCCL_I16: case PCCL_I32: case PCCL_I64:
        form.is_signed = 1;
    }
    return form;
}

static uint64_t load(const unsigned char *at, size_t width)
{
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch (width) {
    case 1:
        return *at;
    case 2:
        memcpy(&two, at, 2);
        return two;
    case 4:
        memcpy(&four, at, 4);
        return four;
    }
    memcpy(&eight, at, 8);
    return eight;
}

static struct number read_number(const struct form *form, const unsigned char *at)
{
    struct number number = {0};
    uint64_t bits = load(at, form->width), top = UINT64_C(1) << (8 * form->width - 1);
    number.magnitude = bits & ~form->sign;
    number.negative = (bits & form->sign) != 0;
    if (form->is_signed && (bits & top) != 0) {
        number.negative = 1;
        number.magnitude = (~bits & (top - 1)) + 1;
    }
    number.nan = number.magnitude > form->infinity;
    return number;
}

static uint64_t distance(const struct number *a, const struct number *b)
{
    if (a->negative != b->negative)
        return a->magnitude + b->magnitude;
    return a->magnitude > b->magnitude ? a->magnitude - b->magnitude
                                       : b->magnitude - a->magnitude;
}

static uint64_t count_differing(const unsigned char *a, const unsigned char *b, size_t bytes)
{
    uint64_t n = 0;
    size_t i;
    for (i = 0; i < bytes; i++)
        n += a[i] != b[i];
    return n;
}

int pccl_compare(int dtype, const void *a, const void *b, size_t n, pccl_difference *out)
{
    const struct form form = form_of(dtype);
    const unsigned char *left = a, *right = b, *end = left + n * form.width;
    memset(out, 0, sizeof *out);
    if (form.width == 0)
        return PCCL_EINVAL;
    out->bytes = count_differing(left, right, n * form.width);
    for (; left < end; left += form.width, right += form.width) {
        struct number x = read_number(&form, left), y = read_number(&form, right);
        out->nans_a += (uint64_t)x.nan;
        out->nans_b += (uint64_t)y.nan;
        if (!x.nan && !y.nan && distance(&x, &y) > out->ulp)
            out->ulp = distance(&x, &y);
    }
    return PCCL_OK;
}
