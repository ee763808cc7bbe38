/* Tells whether the numbers of a weight fit the activation's type, to which kernels for many rows round them: the rules
 * of lowbit's pylib/weights/value_range.py, by what is in memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "numbers.h"
#include "packing.h"

/* A tensor's numbers as they are stored: codes in bits of a byte, or numbers of a type. */
typedef struct {
    const unsigned char *memory; /* NULL: the weight has no such numbers */
    char type[8];
    int64_t low, bit, mask;
} numbers;

/* Scales, zeros or offsets of groups; they may be codes of a second level. */
typedef struct {
    numbers first, scale, zero, offset;
} level;

typedef struct {
    const lowbit_matmul *h;
    packing p;
    json about;
    level scales, zeros, offsets;
    numbers rows;
    const unsigned char *codes;
    bool float_zeros, has_table;
    int64_t low, block_groups, blocks, lanes; /* of the second level: [row blocks, blocks, lanes] */
    double largest, smallest, top, step;
    float values[256], table[256];
} ranges_of_weight;

static numbers numbers_named(const lowbit_matmul *h, const char *role, const char *suffix, const void *const *weight) {
    numbers found = {0};
    char name[MOST_NAME], tensor[MOST_NAME];
    snprintf(name, sizeof name, "%s%s", role, suffix);
    for (json each = json_first(json_member(h->weight, "given")); each; each = json_next(each)) {
        if (!json_is(json_member(each, "name"), name)) continue;
        json_text(json_member(each, "tensor"), tensor, sizeof tensor);
        json_text(json_member(each, "type"), found.type, sizeof found.type);
        found.memory = weight[tensor_named(h, tensor)], found.low = json_integer(json_member(each, "low"));
        found.bit = json_integer(json_member(each, "bit"));
        found.mask = strcmp(tensor, name) ? json_integer(json_member(each, "high")) - found.low : 255;
    }
    return found;
}

static level level_named(const lowbit_matmul *h, const char *name, const char *role, const void *const *weight) {
    return (level){numbers_named(h, name, "", weight), numbers_named(h, role, "_scales", weight),
                   numbers_named(h, role, "_zeros", weight), numbers_named(h, role, "_offsets", weight)};
}

static float number_at(const numbers *n, int64_t place) {
    uint32_t bits = 0;
    int width = width_of(n->type);
    memcpy(&bits, n->memory + place * width, (size_t)width);
    if (!strcmp(n->type, "f32")) return from_bits(bits);
    if (!strcmp(n->type, "f16")) return small_float(bits, 5, 10);
    if (!strcmp(n->type, "bf16")) return from_bits(bits << 16);
    if (!strcmp(n->type, "e4m3")) return small_float(bits, 4, 3);
    if (!strcmp(n->type, "e8m0")) return ldexpf(1, (int)bits - 127);
    return (float)((int64_t)(bits >> n->bit & n->mask) + n->low);
}

/* The number that the stored row r has for a group; 0 where the weight has none. */
static float value_of(const ranges_of_weight *w, const level *l, int64_t r, int64_t group) {
    if (!l->first.memory) return 0;
    float value = number_at(&l->first, (r / ROWS_OF_BLOCK * w->p.groups + group) * ROWS_OF_BLOCK + r % ROWS_OF_BLOCK);
    if (!l->scale.memory) return value;
    int64_t at = (r / ROWS_OF_BLOCK * w->blocks + group / w->block_groups) * w->lanes;
    at += r % ROWS_OF_BLOCK / w->p.block_rows;
    if (w->has_table) value = w->table[(int)value];
    if (l->zero.memory) value -= number_at(&l->zero, at);
    value *= number_at(&l->scale, at);
    return l->offset.memory ? value + number_at(&l->offset, at) : value;
}

/* The least and the largest value of the codes of a group. */
static void ends_of(const ranges_of_weight *w, const reg *run, int64_t r, int64_t group, double *ends) {
    int64_t size = w->p.group < w->h->k ? w->p.group : w->h->k;
    ends[0] = INFINITY, ends[1] = -INFINITY;
    for (int64_t c = 0; c < size; c++) {
        uint32_t code = code_at(&w->p, run, w->codes, r, group * w->p.padded_group + c);
        double value = w->values[code];
        ends[0] = fmin(ends[0], value), ends[1] = fmax(ends[1], value);
    }
}

/* The largest |s (q - z) + o| of a row, or without codes whether it can be beyond the type: infinity. */
static double peak_of(const ranges_of_weight *w, const reg *run, int64_t r, double factor) {
    double peak = 0, ends[2] = {-w->top, w->top};
    for (int64_t g = 0; g < w->h->k / w->p.group; g++) {
        double s = factor * value_of(w, &w->scales, r, g), z = value_of(w, &w->zeros, r, g);
        double o = factor * value_of(w, &w->offsets, r, g);
        if (w->codes) ends_of(w, run, r, g, ends);
        for (int i = 0; i < 2; i++) peak = fmax(peak, fabs(s * (ends[i] - z) + o));
    }
    return peak;
}

/* Whether a row's scales alone say that it fits, whatever the codes. */
static bool row_fits(const ranges_of_weight *w, int64_t r, double factor, bool *never) {
    double largest_scale = 0, most = 0;
    for (int64_t g = 0; g < w->h->k / w->p.group; g++) {
        double s = fabs(factor * value_of(w, &w->scales, r, g)), z = fabs(value_of(w, &w->zeros, r, g));
        *never |= s * z > w->largest || (w->float_zeros && z + w->top > w->largest);
        largest_scale = fmax(largest_scale, s), most = fmax(most, s * (w->top + z));
    }
    double least = largest_scale * w->step;
    return !w->float_zeros && !w->offsets.first.memory && most <= w->largest && (least >= w->smallest || least == 0);
}

static bool fits(const ranges_of_weight *w, const reg *run, int64_t r, double factor) {
    bool never = false;
    if (row_fits(w, r, factor, &never) && !never) return true;
    double peak = never ? INFINITY : peak_of(w, run, r, factor);
    return peak <= w->largest && (!w->codes || peak == 0 || peak >= w->smallest);
}

static double largest_outlier(const lowbit_matmul *h, const packing *p, const uint32_t *lines) {
    double largest = 0;
    for (int64_t i = (p->row_blocks + 32) / 32 * 32; lines && i < (int64_t)lines[p->row_blocks] * 32; i++)
        if (i % 32) largest = fmax(largest, fabs(small_float(lines[i] >> 16, 5, 10)));
    return h->k ? largest : 0;
}

static void read_values(ranges_of_weight *w) {
    json values = json_first(json_member(w->about, "values"));
    double least = INFINITY;
    for (int64_t i = 0; i < 1 << w->p.bits; i++, values = values ? json_next(values) : NULL) {
        w->values[i] = values ? from_bits((uint32_t)json_integer(values)) : (float)(i + w->low);
        double size = fabs(w->values[i]);
        w->top = fmax(w->top, size), least = size > 0 ? fmin(least, size) : least;
    }
    w->step = w->zeros.first.memory ? 1 : least;
    int i = 0;
    for (json t = json_first(json_member(w->about, "table")); t && i < 256; t = json_next(t))
        w->table[i++] = from_bits((uint32_t)json_integer(t));
}

static void read_weight(const lowbit_matmul *h, const void *const *weight, ranges_of_weight *w) {
    int sparse = tensor_named(h, "outliers");
    *w = (ranges_of_weight){.h = h, .p = packing_of(h), .about = json_member(h->weight, "range"), .codes = weight[0]};
    w->scales = level_named(h, "scales", "scale", weight), w->zeros = level_named(h, "zeros", "zero", weight);
    w->offsets = level_named(h, "offsets", "offset", weight), w->rows = numbers_named(h, "row_scales", "", weight);
    w->float_zeros = json_true(json_member(w->about, "float_zeros"));
    w->low = json_integer(json_member(w->about, "low"));
    w->block_groups = json_integer(json_member(w->about, "block_groups"));
    w->blocks = json_integer(json_member(w->about, "blocks"));
    w->lanes = json_integer(json_member(w->about, "lanes"));
    w->has_table = json_first(json_member(w->about, "table")) != NULL;
    bool f16 = json_is(json_member(json_first(json_member(h->about, "arrays")), "type"), "f16");
    w->largest = f16 ? 65504 : from_bits(0x7f7f0000u), w->smallest = f16 ? 0x1p-14 : 0x1p-126;
    if (sparse >= 0) w->largest -= largest_outlier(h, &w->p, weight[sparse]);
    read_values(w);
}

int check_range(const lowbit_matmul *h, const void *const *weight) {
    if (!json_true(json_member(h->target, "rounds_weights"))) return LOWBIT_OK;
    ranges_of_weight w;
    reg run[MOST_RUN];
    read_weight(h, weight, &w);
    run_of((int)w.p.bits, run);
    for (int64_t r = 0; r < h->n; r++) {
        double row = w.rows.memory ? number_at(&w.rows, r) : 1;
        if (!fits(&w, run, r, 1) || (row != 1 && !fits(&w, run, r, row)))
            return fail(LOWBIT_BAD_WEIGHT,
                        "row %lld of the weight %s beyond the range of x's type, to which kernels of this folder round "
                        "weights; export with --wide-range",
                        (long long)given_row(h, r), w.codes ? "has numbers" : "may have numbers");
    }
    return LOWBIT_OK;
}
