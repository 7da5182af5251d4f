/* levels.h - replaces many numbers with four levels, computed from their statistics. The numbers
 * are divided into four bins, and each becomes its level, the mean of its bin.
 *
 * The bins meet at the mean m and at m - r and m + r, where r is 0.9816 standard deviations: the
 * best four bins for a normal distribution (J. Max, 1960). Distances are compared as squares,
 * because machines may round a square root differently. Sums are fp64, in which no sum of fp32
 * numbers overflows, and always add in the order of 64 lanes, for any width of vectors.
 *
 * If a number is not finite, all levels are NaN. No level is subnormal. */
#ifndef PCCL_LEVELS_H
#define PCCL_LEVELS_H

#include <stdbool.h>
#include <stddef.h>

#include "kernels/exact.h"

enum {
    LEVELS = 4,
    LEVEL_LANES = 64,
    LEVEL_NUMBERS = 1024     /* the most numbers at a time */
};

/* The sum of the lanes: adds the upper half to the lower half, until one lane is left. */
static PCCL_INLINE double level_total(double *lane)
{
    size_t width, j;
    for (width = LEVEL_LANES / 2; width > 0; width /= 2)
        for (j = 0; j < width; j++)
            lane[j] += lane[j + width];
    return lane[0];
}

static PCCL_INLINE double level_sum(const float *x, size_t n)
{
    double lane[LEVEL_LANES] = {0};
    size_t i, j;
    for (i = 0; i + LEVEL_LANES <= n; i += LEVEL_LANES)
        for (j = 0; j < LEVEL_LANES; j++)
            lane[j] += (double)x[i + j];
    for (j = 0; i + j < n; j++)
        lane[j] += (double)x[i + j];
    return level_total(lane);
}

static PCCL_INLINE double level_squares(const float *x, size_t n, double mean)
{
    double lane[LEVEL_LANES] = {0};
    size_t i, j;
    for (i = 0; i + LEVEL_LANES <= n; i += LEVEL_LANES)
        for (j = 0; j < LEVEL_LANES; j++)
            lane[j] += ((double)x[i + j] - mean) * ((double)x[i + j] - mean);
    for (j = 0; i + j < n; j++)
        lane[j] += ((double)x[i + j] - mean) * ((double)x[i + j] - mean);
    return level_total(lane);
}

static PCCL_INLINE void level_codes(const float *x, size_t n, double mean, double reach,
                                    unsigned char *codes)
{
    size_t i;
    for (i = 0; i < n; i++) {
        double distance = (double)x[i] - mean, square = distance * distance;
        unsigned above = distance >= 0, far = square >= reach;
        codes[i] = (unsigned char)(above != 0 ? 2u + far : 1u - far);
    }
}

/* The mean of the numbers in a bin, or 0 if the bin is empty. */
static PCCL_INLINE float level_of(const float *x, const unsigned char *codes, size_t n,
                                  unsigned bin)
{
    float inside[LEVEL_NUMBERS], level;
    uint32_t count = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits, all_if_inside = 0u - (uint32_t)(codes[i] == bin);
        memcpy(&bits, &x[i], sizeof bits);
        bits &= all_if_inside;
        count -= all_if_inside;
        memcpy(&inside[i], &bits, sizeof bits);
    }
    level = count > 0 ? (float)(level_sum(inside, n) / (double)count) : 0.0f;
    return level < FLT_MIN && level > -FLT_MIN ? 0.0f : level;
}

/* Computes the levels of n numbers, 0 < n <= LEVEL_NUMBERS, and the code of each number: that of
 * its bin. */
static PCCL_INLINE void levels_measure(const float *x, size_t n, float *level,
                                       unsigned char *codes)
{
    const double mean = level_sum(x, n) / (double)n;
    const double variance = level_squares(x, n, mean) / (double)n;
    unsigned bin;
    if (!(variance - variance == 0)) {
        for (bin = 0; bin < LEVELS; bin++)
            level[bin] = f32_from_bits(F32_NAN);
        memset(codes, 0, n);
        return;
    }
    level_codes(x, n, mean, 0.9816 * 0.9816 * variance, codes);
    for (bin = 0; bin < LEVELS; bin++)
        level[bin] = level_of(x, codes, n, bin);
}

/* Reads levels: false if they are not all finite. */
static PCCL_INLINE bool levels_read(const unsigned char *in, uint32_t *level)
{
    size_t bin;
    bool finite = true;
    memcpy(level, in, LEVELS * sizeof *level);
    for (bin = 0; bin < LEVELS; bin++)
        finite = finite && (level[bin] & 0x7fffffffu) < 0x7f800000u;
    return finite;
}

/* Writes the i-th number of an array, or adds to it. */
static PCCL_INLINE void level_put(unsigned char *out, size_t i, uint32_t level, bool adds)
{
    unsigned char *to = out + i * sizeof level;
    uint32_t there;
    if (adds) {
        memcpy(&there, to, sizeof there);
        level = f32_to_bits(f32_from_bits(there) + f32_from_bits(level));
    }
    memcpy(to, &level, sizeof level);
}

/* Makes n numbers NaN. */
static PCCL_INLINE void levels_spoil(unsigned char *out, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++)
        memcpy(out + i * sizeof F32_NAN, &F32_NAN, sizeof F32_NAN);
}

#endif
