/* Takes a power of two from the scales and offsets of every row to the scale of the row, so that scaled weights are
 * numbers of 8 bits: the rules of lowbit's pylib/weights/folding.py, in doubles and in their order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "packing.h"

static const double LEAST_LOST = 8; /* the part of a row's largest weight that is an error to lose */
enum { LEAST_EXPONENT = -126, MOST_EXPONENT = 127 };
static const char *const SCALED[] = {"scales",        "offsets",       "scale_scales",
                                     "scale_offsets", "offset_scales", "offset_offsets"};

/* Scales, zeros or offsets of groups; they may be codes of a second level. Without memory there are none. */
typedef struct {
    tensor_slot first, scale, zero, offset;
} level;

typedef struct {
    int64_t n, groups, group, height, block_groups, blocks;
    level scales, zeros, offsets;
    tensor_slot codes;
    bool by_codes, has_table;
    double low, high, values[256], table[256];
    double largest; /* number of the type that weights are rounded to */
} weight;

static tensor_slot named(const lowbit_matmul *h, const char *role, const char *suffix, const lowbit_given *given,
                         int count) {
    char name[MOST_NAME];
    snprintf(name, sizeof name, "%s%s", role, suffix);
    for (json each = json_first(json_member(h->weight, "given")); each; each = json_next(each))
        if (json_is(json_member(each, "name"), name)) return slot_of(each, given, count);
    return (tensor_slot){0};
}

static level level_of(const lowbit_matmul *h, const char *name, const char *role, const lowbit_given *given,
                      int count) {
    return (level){named(h, name, "", given, count), named(h, role, "_scales", given, count),
                   named(h, role, "_zeros", given, count), named(h, role, "_offsets", given, count)};
}

/* -- the largest weight of a row */

/* A number as it is given, or rounded to its type; powers of two are what they are. */
static double number_of(const tensor_slot *s, int64_t i, bool rounded) {
    if (s->given->type != LOWBIT_F32) return (double)integer_at(s->given, i);
    double value = ((const float *)s->given->data)[i];
    if (!rounded || !strcmp(s->type, "e8m0") || !strcmp(s->type, "f32")) return value;
    if (!strcmp(s->type, "bf16")) return from_bits(nearest(value, 8, 7) << 16);
    if (!strcmp(s->type, "e4m3")) return small_float(nearest(value, 4, 3), 4, 3);
    uint32_t bits = nearest(value, 5, 10);
    return (bits & 0x7fff) < 0x7c00 ? small_float(bits, 5, 10) : INFINITY;
}

/* The number of row r for a group; 0 where the weight has none. */
static double value_of(const weight *w, const level *l, int64_t r, int64_t group, bool rounded) {
    if (!l->first.given) return 0;
    double value = number_of(&l->first, r * w->groups + group, rounded);
    if (!l->scale.given) return value;
    int64_t at = r / w->height * w->blocks + group / w->block_groups;
    if (w->has_table) value = w->table[(int)value & 255];
    if (l->zero.given) value -= number_of(&l->zero, at, rounded);
    value *= number_of(&l->scale, at, rounded);
    return l->offset.given ? value + number_of(&l->offset, at, rounded) : value;
}

static double largest_of(const weight *w, int64_t r, bool rounded) {
    double largest = 0;
    for (int64_t g = 0; g < w->groups; g++) {
        double low = w->low, high = w->high, z = value_of(w, &w->zeros, r, g, rounded);
        for (int64_t c = 0; w->by_codes && c < w->group; c++) {
            int64_t code = integer_at(w->codes.given, (r * w->groups + g) * w->group + c) - w->codes.low;
            double value = w->values[code & 255];
            low = c ? fmin(low, value) : value, high = c ? fmax(high, value) : value;
        }
        double size = fabs(value_of(w, &w->scales, r, g, rounded)) * fmax(fabs(low - z), fabs(high - z));
        size += fabs(value_of(w, &w->offsets, r, g, rounded));
        if (!(size <= largest)) largest = size; /* what is no number stays */
    }
    return largest;
}

/* The least e with largest <= 2^e; 0 for rows of zeros, and of what is no number, which is refused later. */
static int exponent_of(double largest) {
    int exponent;
    if (!(largest > 0) || isinf(largest)) return 0;
    if (frexp(largest, &exponent) == 0.5) exponent--;
    return exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent > MOST_EXPONENT ? MOST_EXPONENT : exponent;
}

/* -- a weight */

static int check_all(const lowbit_matmul *h, const lowbit_given *given, int count, bool codes) {
    int code = LOWBIT_OK;
    for (json each = json_first(json_member(h->weight, "given")); each && !code; each = json_next(each)) {
        tensor_slot s = slot_of(each, given, count);
        bool optional = !strcmp(s.name, "row_scales") ? !s.given : !strcmp(s.name, "codes") && !codes;
        if (!optional && !json_is(json_member(each, "index"), "sparse")) code = check_given(&s);
    }
    return code;
}

static void read_values(const lowbit_matmul *h, const packing *p, weight *w) {
    json about = json_member(h->weight, "range"), values = json_first(json_member(about, "values"));
    int64_t low = json_integer(json_member(about, "low")), i = 0;
    w->low = INFINITY, w->high = -INFINITY;
    for (int64_t code = 0; code < 1 << p->bits; code++, values = values ? json_next(values) : NULL) {
        w->values[code] = values ? from_bits((uint32_t)json_integer(values)) : (double)(code + low);
        w->low = fmin(w->low, w->values[code]), w->high = fmax(w->high, w->values[code]);
    }
    for (json t = json_first(json_member(about, "table")); t && i < 256; t = json_next(t))
        w->table[i++] = from_bits((uint32_t)json_integer(t));
    w->has_table = i > 0, w->by_codes = json_true(json_member(h->weight, "folds_by_codes"));
    w->largest = (double)json_integer(json_member(h->weight, "folds_to"));
    w->block_groups = json_integer(json_member(about, "block_groups"));
    w->blocks = json_integer(json_member(about, "blocks"));
}

static int read_weight(const lowbit_matmul *h, const lowbit_given *given, int count, weight *w) {
    packing p = packing_of(h);
    read_values(h, &p, w);
    int code = check_all(h, given, count, w->by_codes || given_named("codes", given, count));
    w->n = h->n, w->group = p.group, w->groups = h->k / p.group, w->height = p.block_rows;
    w->scales = level_of(h, "scales", "scale", given, count), w->zeros = level_of(h, "zeros", "zero", given, count);
    w->offsets = level_of(h, "offsets", "offset", given, count), w->codes = named(h, "codes", "", given, count);
    for (int64_t i = 0; w->by_codes && !code && i < w->n * h->k; i++) {
        int64_t value = integer_at(w->codes.given, i);
        if (value < w->codes.low || value > w->codes.high)
            code = fail(LOWBIT_BAD_WEIGHT, "codes[%lld, %lld] = %lld must be in %lld..%lld", (long long)(i / h->k),
                        (long long)(i % h->k), (long long)value, (long long)w->codes.low, (long long)w->codes.high);
    }
    return code;
}

/* Scales a number that is given: rows of it have the power of two of their row, or of the first of those that share
 * it. */
static int scale(const lowbit_matmul *h, const char *name, const int *exponents, int64_t height, folded *f) {
    tensor_slot s = named(h, name, "", f->given, f->count);
    if (!s.given || s.integer) return LOWBIT_OK;
    int64_t i = s.given - f->given, share = s.rows == h->n ? 1 : height;
    float *scaled = f->memory[i] = malloc(sizeof *scaled * (size_t)s.given->count);
    if (!scaled) return fail(LOWBIT_NO_MEMORY, "no memory to fold scales");
    for (int64_t at = 0; at < s.given->count; at++)
        scaled[at] = (float)ldexp(((const float *)s.given->data)[at], -exponents[at / s.columns * share]);
    f->given[i].data = scaled;
    return LOWBIT_OK;
}

static int scale_rows(const lowbit_matmul *h, const int *exponents, folded *f) {
    const lowbit_given *rows = given_named("row_scales", f->given, f->count);
    int64_t i = rows ? rows - f->given : f->count++;
    float *scaled = f->memory[i] = malloc(sizeof *scaled * (size_t)h->n);
    if (!scaled) return fail(LOWBIT_NO_MEMORY, "no memory to fold scales");
    for (int64_t r = 0; r < h->n; r++)
        scaled[r] = (float)ldexp(rows ? ((const float *)rows->data)[r] : 1, exponents[r]);
    f->given[i] = (lowbit_given){.name = "row_scales", .type = LOWBIT_F32, .data = scaled, .count = h->n};
    return LOWBIT_OK;
}

static int check_rounded(const lowbit_matmul *h, const folded *f, const double *largest, const int *exponents,
                         weight *w) {
    int code = read_weight(h, f->given, f->count, w);
    for (int64_t r = 0; r < w->n && !code; r++) {
        double lost = fabs(ldexp(largest_of(w, r, true), exponents[r]) - largest[r]);
        if (lost > largest[r] / LEAST_LOST)
            code = fail(LOWBIT_BAD_WEIGHT,
                        "fold_scales takes 2^%d from the scales of row %lld, which leaves less than their type holds; "
                        "export with a wider scale",
                        exponents[r], (long long)r);
    }
    return code;
}

static int fold(const lowbit_matmul *h, weight *w, double *largest, int *exponents, folded *f) {
    for (int64_t r = 0; r < w->n; r++) {
        largest[r] = largest_of(w, r, false);
        exponents[r] = exponent_of(largest[r] / w->largest);
    }
    for (int64_t r = 0; r < w->n; r += w->height) {
        int64_t end = r + w->height < w->n ? r + w->height : w->n;
        int most = LEAST_EXPONENT;
        for (int64_t i = r; i < end; i++) most = exponents[i] > most ? exponents[i] : most;
        for (int64_t i = r; i < end; i++) exponents[i] = most;
    }
    int code = LOWBIT_OK;
    for (size_t i = 0; i < sizeof SCALED / sizeof *SCALED && !code; i++)
        code = scale(h, SCALED[i], exponents, w->height, f);
    if (!code) code = check_rounded(h, f, largest, exponents, w);
    return code ? code : scale_rows(h, exponents, f);
}

int fold_scales(const lowbit_matmul *h, const lowbit_given *given, int count, folded *f) {
    weight w = {0};
    if (count >= MOST_GIVEN) return fail(LOWBIT_BAD_WEIGHT, "%d tensors are more than a weight has", count);
    int code = read_weight(h, given, count, &w);
    if (code) return code;
    memcpy(f->given, given, sizeof *given * (size_t)count), f->count = count;
    double *largest = malloc(sizeof *largest * (size_t)w.n);
    int *exponents = malloc(sizeof *exponents * (size_t)w.n);
    code = largest && exponents ? fold(h, &w, largest, exponents, f)
                                : fail(LOWBIT_NO_MEMORY, "no memory to fold scales");
    free(largest), free(exponents);
    return code;
}

void drop_folded(folded *f) {
    for (int i = 0; i < f->count; i++) free(f->memory[i]);
}
