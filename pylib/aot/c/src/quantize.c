/* Rows of x in 8 bits on a CPU, as lowbit.quantize_activation makes them: of a row the largest |x|, but at least 2^-100,
 * is what the type's largest number stands for, and the others are rounded to nearest, ties to even. */
#include "numbers.h"

static float nearest_i8(float value) { return value != value ? 0 : rintf(fminf(fmaxf(value, -127), 127)); }

static float nearest_e4m3(float value) {
    if (value != value) return value;
    value = fminf(fmaxf(value, -448), 448);
    if (fabsf(value) < 0x1p-6f) return rintf(value * 0x1p9f) * 0x1p-9f;
    uint32_t bits = bits_of(value);
    return from_bits((bits + 0x7ffff + (bits >> 20 & 1)) & ~0xfffffu);
}

float quantize_row(uint16_t *row, int64_t k, number_type of_x, eight_bits type) {
    float peak = 0;
    for (int64_t c = 0; c < k; c++) {
        float size = fabsf(number_in(row, c, of_x));
        if (!(size <= peak)) peak = size; /* NaN stays */
        if (peak != peak) break;
    }
    float scale = (peak < 0x1p-100f ? 0x1p-100f : peak) * (type == I8 ? 1 / 127.0f : 1 / 448.0f), factor = 1 / scale;
    for (int64_t c = 0; c < k; c++) {
        float value = number_in(row, c, of_x) * factor;
        row[c] = to_f16(type == I8 ? nearest_i8(value) : nearest_e4m3(value));
    }
    return scale;
}
