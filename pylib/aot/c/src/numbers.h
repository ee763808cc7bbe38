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
