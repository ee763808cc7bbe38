/* Rows of x in 8 bits on a CPU, as lowbit.quantize_activation makes them: of a row the largest |x|, but at least 2^-100,
 * is what the type's largest number stands for, and the others are rounded to nearest, ties to even. */
#include <math.h>
#include <string.h>

#include "internal.h"

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float wide(uint16_t number, bool bf16) {
    if (bf16) return from_bits((uint32_t)number << 16);
    uint32_t sign = (uint32_t)(number & 0x8000) << 16, rest = (uint32_t)(number & 0x7fff) << 13;
    if (rest >= 0x7c00 << 13) return from_bits(sign | rest | 0x7f800000); /* infinity or NaN */
    return from_bits(sign | bits_of(from_bits(rest) * 0x1p112f));
}

/* The f16 of a value of 8 bits, all of which it has. */
static uint16_t narrow(float value) {
    uint32_t bits = bits_of(value * 0x1p-112f);
    return (uint16_t)(value != value ? 0x7e00 : (bits >> 16 & 0x8000) | (bits >> 13 & 0x7fff));
}

static float nearest_i8(float value) { return value != value ? 0 : rintf(fminf(fmaxf(value, -127), 127)); }

static float nearest_e4m3(float value) {
    if (value != value) return value;
    value = fminf(fmaxf(value, -448), 448);
    if (fabsf(value) < 0x1p-6f) return rintf(value * 0x1p9f) * 0x1p-9f;
    uint32_t bits = bits_of(value);
    return from_bits((bits + 0x7ffff + (bits >> 20 & 1)) & ~0xfffffu);
}

float quantize_row(uint16_t *row, int64_t k, bool bf16, eight_bits type) {
    float peak = 0;
    for (int64_t c = 0; c < k; c++) {
        float size = fabsf(wide(row[c], bf16));
        if (!(size <= peak)) peak = size; /* NaN stays */
        if (peak != peak) break;
    }
    float scale = (peak < 0x1p-100f ? 0x1p-100f : peak) * (type == I8 ? 1 / 127.0f : 1 / 448.0f), factor = 1 / scale;
    for (int64_t c = 0; c < k; c++) {
        float value = wide(row[c], bf16) * factor;
        row[c] = narrow(type == I8 ? nearest_i8(value) : nearest_e4m3(value));
    }
    return scale;
}
