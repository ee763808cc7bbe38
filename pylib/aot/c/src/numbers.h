/* Numbers in memory, of 16 bits and of 32. */
#ifndef LOWBIT_NUMBERS_H
#define LOWBIT_NUMBERS_H

#include <math.h>
#include <string.h>

#include "internal.h"

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float of_f16(uint32_t number) {
    uint32_t sign = (number & 0x8000) << 16, rest = (number & 0x7fff) << 13;
    if (rest >= 0x7c00 << 13) return from_bits(sign | rest | 0x7f800000); /* infinity or NaN */
    return from_bits(sign | bits_of(from_bits(rest) * 0x1p112f));
}

/* The nearest f16, ties to even. */
static inline uint16_t to_f16(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (value != value) return (uint16_t)(sign | 0x7e00);
    if (size >= bits_of(65520)) return (uint16_t)(sign | 0x7c00);
    if (size < bits_of(0x1p-14f)) return (uint16_t)(sign | (uint32_t)rintf(from_bits(size) * 0x1p24f));
    return (uint16_t)(sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13);
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    return (uint16_t)(value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The bits of the nearest number with so many bits of exponent and of mantissa, ties to even. */
static inline uint32_t nearest(double value, int exponent_bits, int mantissa) {
    int bias = (1 << (exponent_bits - 1)) - 1, exponent;
    uint32_t sign = signbit(value) ? 1u << (exponent_bits + mantissa) : 0;
    if (value == 0) return sign;
    frexp(value, &exponent);
    exponent =
        exponent - 1 < 1 - bias ? 1 - bias : exponent - 1; /* subnormal numbers are as coarse as the least normal */
    double units = nearbyint(ldexp(fabs(value), mantissa - exponent));
    return sign | (uint32_t)((exponent + bias - 1) * (1 << mantissa) + (int64_t)units);
}

/* The value of a number with so many bits of exponent and of mantissa, that is finite. */
static inline float small_float(uint32_t bits, int exponent_bits, int mantissa) {
    int exponent = (int)(bits >> mantissa & ((1u << exponent_bits) - 1)), bias = (1 << (exponent_bits - 1)) - 1;
    int digits = (int)(bits & ((1u << mantissa) - 1)) + (exponent ? 1 << mantissa : 0);
    float value = ldexpf((float)digits, (exponent ? exponent : 1) - bias - mantissa);
    return bits >> (exponent_bits + mantissa) & 1 ? -value : value;
}

/* Number i of an array. */
static inline float number_in(const void *array, int64_t i, number_type type) {
    if (type == F32) return ((const float *)array)[i];
    uint32_t number = ((const uint16_t *)array)[i];
    return type == BF16 ? from_bits(number << 16) : of_f16(number);
}

static inline void store_number(void *array, int64_t i, number_type type, float value) {
    if (type == F32)
        ((float *)array)[i] = value;
    else
        ((uint16_t *)array)[i] = type == BF16 ? to_bf16(value) : to_f16(value);
}

#endif
