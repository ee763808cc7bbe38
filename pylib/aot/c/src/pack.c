/* Packs a weight on the host, into the bytes that Python's `pack` makes: codes in the order of tensor-core fragments
 * (lowbit's dialect/formats/packing.py), tables of groups, numbers of rows, and outliers in lines. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "packing.h"

enum { LINE = 32, ENTRIES = 31, SPAN = 4096 }; /* of outliers: dialect/formats/outliers.py */

const lowbit_given *given_named(const char *name, const lowbit_given *given, int count) {
    for (int i = 0; i < count; i++)
        if (given[i].name && !strcmp(given[i].name, name)) return &given[i];
    return NULL;
}

/* -- numbers */

static int wrong(const tensor_slot *s, int64_t i, double value, const char *rule) {
    return fail(LOWBIT_BAD_WEIGHT, "%s[%lld, %lld] = %g %s", s->name, (long long)(i / s->columns),
                (long long)(i % s->columns), value, rule);
}

int64_t integer_at(const lowbit_given *g, int64_t i) {
    if (g->type == LOWBIT_U8) return ((const uint8_t *)g->data)[i];
    return g->type == LOWBIT_I8 ? ((const int8_t *)g->data)[i] : ((const int32_t *)g->data)[i];
}

static int store_float(const tensor_slot *s, int64_t i, uint32_t *bits) {
    float value = ((const float *)s->given->data)[i];
    int exponent;
    if (!isfinite(value)) return wrong(s, i, value, "must be finite; clean what the quantizer gave");
    if (!strcmp(s->type, "e8m0")) {
        if (frexp(value, &exponent) != 0.5 || exponent < -126)
            return wrong(s, i, value, "must be a power of two from 2^-127 to 2^127");
        *bits = (uint32_t)(exponent + 126);
        return LOWBIT_OK;
    }
    bool fits = true;
    if (!strcmp(s->type, "f32"))
        memcpy(bits, &value, 4);
    else if (!strcmp(s->type, "f16"))
        fits = ((*bits = nearest(value, 5, 10)) & 0x7fff) < 0x7c00;
    else if (!strcmp(s->type, "bf16"))
        fits = ((*bits = nearest(value, 8, 7)) & 0x7fff) < 0x7f80;
    else
        fits = fabsf(value) <= 464 && ((*bits = nearest(value, 4, 3)), true); /* e4m3: the tie between 448 and NaN */
    return fits ? LOWBIT_OK
                : wrong(s, i, value, "overflows the type that the spec has for it; export with a wider one");
}

static int store_integer(const tensor_slot *s, int64_t i, uint32_t *bits) {
    int64_t value = integer_at(s->given, i);
    if (value < s->low || value > s->high)
        return fail(LOWBIT_BAD_WEIGHT, "%s[%lld, %lld] = %lld must be in %lld..%lld", s->name,
                    (long long)(i / s->columns), (long long)(i % s->columns), (long long)value, (long long)s->low,
                    (long long)s->high);
    *bits = (uint32_t)(value - s->low) << s->bit;
    return LOWBIT_OK;
}

/* Writes number i of what is given as number `place` in memory, beside bits that are there already. */
static int store(const tensor_slot *s, int64_t i, int64_t place) {
    uint32_t bits = 0;
    int code = s->integer ? store_integer(s, i, &bits) : store_float(s, i, &bits);
    int width = width_of(s->type);
    unsigned char *at = s->memory + place * width;
    for (int byte = 0; byte < width && !code; byte++) at[byte] |= (unsigned char)(bits >> (8 * byte));
    return code;
}

/* -- codes */

static int pack_codes(const lowbit_matmul *h, const packing *p, const tensor_slot *s) {
    reg run[MOST_RUN];
    run_of((int)p->bits, run);
    for (int64_t r = 0; r < h->n; r++)
        for (int64_t c = 0; c < p->chunks * p->chunk; c++) {
            int64_t from = c / p->padded_group * p->group + c % p->padded_group;
            if (c % p->padded_group >= p->group || from >= h->k) continue;
            uint32_t code = 0;
            int failed = store_integer(s, given_row(h, r) * h->k + from, &code);
            if (failed) return failed;
            add_code(p, run, s->memory, r, c, code);
        }
    return LOWBIT_OK;
}

/* -- tables */

static int pack_groups(const lowbit_matmul *h, const packing *p, const tensor_slot *s) {
    int code = LOWBIT_OK;
    for (int64_t r = 0; r < h->n && !code; r++)
        for (int64_t g = 0; g < s->columns && !code; g++)
            code = store(s, given_row(h, r) * s->columns + g,
                         (r / ROWS_OF_BLOCK * p->groups + g) * ROWS_OF_BLOCK + r % ROWS_OF_BLOCK);
    return code;
}

/* The second level of scales that are codes: [row blocks, blocks, lanes]. */
static int pack_blocks(const lowbit_matmul *h, const packing *p, const tensor_slot *s, json shape) {
    json of_blocks = json_next(json_first(shape));
    int64_t blocks = json_integer(of_blocks), lanes = json_integer(json_next(of_blocks));
    int64_t height = ROWS_OF_BLOCK / p->block_rows;
    int code = LOWBIT_OK;
    for (int64_t i = 0; i < p->row_blocks * lanes && !code; i++) {
        int64_t row = i / lanes * height + i % lanes % height;
        if (row >= s->rows) continue;
        int64_t from = p->block_rows == 1 ? given_row(h, row) : row;
        for (int64_t b = 0; b < s->columns && !code; b++)
            code = store(s, from * s->columns + b, (i / lanes * blocks + b) * lanes + i % lanes);
    }
    return code;
}

static int pack_rows(const lowbit_matmul *h, const tensor_slot *s) {
    int code = LOWBIT_OK;
    for (int64_t r = 0; r < h->n && !code; r++) code = store(s, given_row(h, r), r);
    return code;
}

/* Permutations: each expert has one of k columns. */
static int pack_columns(const lowbit_matmul *h, const tensor_slot *s) {
    int code = LOWBIT_OK;
    int64_t *seen = calloc((size_t)h->k, sizeof *seen); /* the last expert that had a column, counted from 1 */
    if (!seen) return fail(LOWBIT_NO_MEMORY, "no memory to check the permutation");
    for (int64_t i = 0; i < h->experts * h->k && !code; i++) {
        if ((code = store(s, i, i))) break;
        int64_t column = integer_at(s->given, i), expert = i / h->k + 1;
        if (seen[column] == expert)
            code = fail(LOWBIT_BAD_WEIGHT, "permutation[%lld] = %lld is there twice", (long long)i, (long long)column);
        seen[column] = expert;
    }
    free(seen);
    return code;
}

/* -- outliers */

typedef struct {
    int64_t block, column, row;
    uint32_t bits;
} outlier;

static int by_place(const void *a, const void *b) {
    const outlier *x = a, *y = b;
    if (x->block != y->block) return x->block < y->block ? -1 : 1;
    if (x->column != y->column) return x->column < y->column ? -1 : 1;
    return (x->row > y->row) - (x->row < y->row);
}

static int check_outliers(const lowbit_matmul *h, const lowbit_given *offsets, const lowbit_given *columns,
                          const lowbit_given *values) {
    if (!offsets || !columns || !values || offsets->type != LOWBIT_I32 || columns->type != LOWBIT_I32 ||
        values->type != LOWBIT_F32 || offsets->count != h->n + 1 || columns->count != values->count || !offsets->data)
        return fail(LOWBIT_BAD_WEIGHT,
                    "outliers are outlier_offsets I32 [n + 1], outlier_columns I32 and outlier_values F32");
    const int32_t *from = offsets->data;
    for (int64_t r = 0; r < h->n; r++)
        if (from[r] > from[r + 1] || from[0])
            return fail(LOWBIT_BAD_WEIGHT, "outlier_offsets must begin with 0 and not fall; see row %lld",
                        (long long)r);
    if (from[h->n] != values->count || (values->count && !(columns->data && values->data)))
        return fail(LOWBIT_BAD_WEIGHT, "outlier_offsets end with %d, and there are %lld outliers", from[h->n],
                    (long long)values->count);
    return LOWBIT_OK;
}

/* Writes outliers down in their order in memory; *count becomes how many are not zero. */
static int sort_outliers(const lowbit_matmul *h, const lowbit_given *given, int number, outlier **found,
                         int64_t *count) {
    const lowbit_given *offsets = given_named("outlier_offsets", given, number);
    const lowbit_given *columns = given_named("outlier_columns", given, number);
    tensor_slot s = {.name = "outliers", .type = "f16", .columns = 1, .given = given_named("outlier_values", given, number)};
    int code = check_outliers(h, offsets, columns, s.given);
    if (code) return code;
    *found = malloc(sizeof **found * (size_t)(s.given->count + 1)), *count = 0;
    if (!*found) return fail(LOWBIT_NO_MEMORY, "no memory to sort outliers");
    for (int64_t r = 0; r < h->n && !code; r++)
        for (int64_t i = ((const int32_t *)offsets->data)[r]; i < ((const int32_t *)offsets->data)[r + 1] && !code;
             i++) {
            int64_t column = integer_at(columns, i), row = stored_row(h, r);
            outlier *o = &(*found)[*count];
            *o = (outlier){row / ROWS_OF_BLOCK, column, row % ROWS_OF_BLOCK, 0};
            if (column < 0 || column >= h->k)
                code =
                    fail(LOWBIT_BAD_WEIGHT, "an outlier is in column %lld of %lld", (long long)column, (long long)h->k);
            else
                code = store_float(&s, i, &o->bits);
            *count += ((const float *)s.given->data)[i] != 0;
        }
    if (!code) qsort(*found, (size_t)*count, sizeof **found, by_place);
    for (int64_t i = 1; i < *count && !code; i++)
        if (!by_place(&(*found)[i - 1], &(*found)[i]))
            code = fail(LOWBIT_BAD_WEIGHT, "an outlier is there twice; add them up");
    if (code) free(*found);
    return code;
}

/* Writes outliers in lines, and the table of the first line of each row block; returns how many lines there are. */
static int64_t write_lines(const packing *p, const outlier *o, int64_t count, uint32_t *memory) {
    int64_t head = (p->row_blocks + LINE) / LINE, line = head - 1, block = 0, used = ENTRIES;
    for (int64_t i = 0; i < count; i++) {
        bool joins =
            i && used < ENTRIES && o[i].block == o[i - 1].block && o[i].column / SPAN == o[i - 1].column / SPAN;
        if (!joins) line++, used = 0;
        if (memory) {
            if (!joins) memory[line * LINE] = (uint32_t)o[i].column;
            for (; block <= o[i].block; block++) memory[block] = (uint32_t)line;
            memory[line * LINE + 1 + used] =
                o[i].bits << 16 | ((uint32_t)o[i].column - memory[line * LINE]) << 4 | (uint32_t)o[i].row;
        }
        used++;
    }
    for (; memory && block <= p->row_blocks; block++) memory[block] = (uint32_t)line + 1;
    return line + 1;
}

int64_t lowbit_outlier_bytes(const lowbit_matmul *h, const lowbit_given *given, int count) {
    outlier *found = NULL;
    int64_t number = 0;
    if (!h || !given) return fail(LOWBIT_BAD_ARGUMENT, "handle or given is NULL") * 0 - 1;
    packing p = packing_of(h);
    if (sort_outliers(h, given, count, &found, &number)) return -1;
    int64_t lines = write_lines(&p, found, number, NULL);
    free(found);
    return lines * LINE * 4;
}

static int pack_outliers(const lowbit_matmul *h, const packing *p, const lowbit_given *given, int count, void *memory) {
    outlier *found = NULL;
    int64_t number = 0;
    int code = sort_outliers(h, given, count, &found, &number);
    if (code) return code;
    memset(memory, 0, (size_t)(write_lines(p, found, number, NULL) * LINE * 4));
    write_lines(p, found, number, memory);
    free(found);
    return LOWBIT_OK;
}

/* -- a weight */

int check_given(const tensor_slot *s) {
    const lowbit_given *g = s->given;
    if (!g || !g->data) return fail(LOWBIT_BAD_WEIGHT, "%s are missing", s->name);
    bool bytes = g->type == LOWBIT_U8 || g->type == LOWBIT_I8;
    if (s->integer ? !bytes && g->type != LOWBIT_I32 : g->type != LOWBIT_F32)
        return fail(LOWBIT_BAD_WEIGHT, "%s must be %s", s->name,
                    s->integer ? "integers: U8, I8 or I32" : "floats: F32");
    if (g->count != s->rows * s->columns)
        return fail(LOWBIT_BAD_WEIGHT, "%s must be [%lld, %lld], %lld numbers, not %lld", s->name, (long long)s->rows,
                    (long long)s->columns, (long long)(s->rows * s->columns), (long long)g->count);
    return LOWBIT_OK;
}

tensor_slot slot_of(json about, const lowbit_given *given, int count) {
    tensor_slot s = {0};
    json shape = json_member(about, "shape"), columns = json_next(json_first(shape));
    json_text(json_member(about, "name"), s.name, sizeof s.name);
    json_text(json_member(about, "type"), s.type, sizeof s.type);
    s.rows = json_integer(json_first(shape)), s.columns = columns ? json_integer(columns) : 1;
    s.low = json_integer(json_member(about, "low")), s.high = json_integer(json_member(about, "high"));
    s.bit = json_integer(json_member(about, "bit")), s.integer = json_true(json_member(about, "integer"));
    s.given = given_named(s.name, given, count);
    return s;
}

static int pack_slot(const lowbit_matmul *h, const packing *p, json about, const lowbit_given *given, int count,
                     void *const *weight) {
    tensor_slot s = slot_of(about, given, count);
    char tensor[MOST_NAME];
    json index = json_member(about, "index");
    json_text(json_member(about, "tensor"), tensor, sizeof tensor);
    s.memory = weight[tensor_named(h, tensor)];
    if (json_is(index, "sparse")) return pack_outliers(h, p, given, count, s.memory);
    int code = check_given(&s);
    if (code) return code;
    if (json_is(index, "element")) return pack_codes(h, p, &s);
    if (json_is(index, "group")) return pack_groups(h, p, &s);
    if (json_is(index, "block")) return pack_blocks(h, p, &s, json_member(about, "stored"));
    return json_is(index, "column") ? pack_columns(h, &s) : pack_rows(h, &s);
}

static int check_names(json given_tensors, const lowbit_given *given, int count) {
    for (int i = 0; i < count; i++) {
        bool known = false;
        for (json each = json_first(given_tensors); each && given[i].name; each = json_next(each))
            known |= json_is(json_member(each, "name"), given[i].name) ||
                     (json_is(json_member(each, "index"), "sparse") && !strncmp(given[i].name, "outlier_", 8));
        if (!known)
            return fail(LOWBIT_BAD_WEIGHT, "this matmul has no %s; drop it", given[i].name ? given[i].name : "NULL");
    }
    return LOWBIT_OK;
}

/* Fills a weight with zeros; codes that lowbit_pack_codes packs are not in host memory. */
static int clear(const lowbit_matmul *h, void *const *weight, bool codes) {
    for (int i = codes ? 0 : 1; i < h->tensors; i++) {
        if (!weight[i]) return fail(LOWBIT_BAD_ARGUMENT, "weight[%d], for %s, is NULL", i, h->tensor_name[i]);
        if (strcmp(h->tensor_name[i], "outliers")) memset(weight[i], 0, (size_t)lowbit_tensor_bytes(h, i));
    }
    return LOWBIT_OK;
}

static int pack_given(const lowbit_matmul *h, const lowbit_given *given, int count, void *const *weight) {
    packing p = packing_of(h);
    bool codes = weight[0] || given_named("codes", given, count);
    int code = clear(h, weight, codes);
    for (json each = json_first(json_member(h->weight, "given")); each && !code; each = json_next(each))
        if (codes || !json_is(json_member(each, "index"), "element")) code = pack_slot(h, &p, each, given, count, weight);
    return code ? code : check_range(h, (const void *const *)weight);
}

int lowbit_pack(const lowbit_matmul *h, const lowbit_given *given, int count, void *const *weight) {
    if (!h || !given || !weight) return fail(LOWBIT_BAD_ARGUMENT, "handle, given or weight is NULL");
    int code = check_names(json_member(h->weight, "given"), given, count);
    if (code || !json_true(json_member(h->weight, "folds"))) return code ? code : pack_given(h, given, count, weight);
    folded f = {0};
    code = fold_scales(h, given, count, &f);
    if (!code) code = pack_given(h, f.given, f.count, weight);
    drop_folded(&f);
    return code;
}
