/* Programs for a CPU: one function of one pointer, to an array of 64-bit words. Any number of threads may call it with
 * the same words; each takes work until none is left (lowbit's passes/cpu/task.py). */
#include <string.h>

#include "numbers.h"
#include "packing.h"

enum { TICKET, DONE, WORKERS, ROWS_OF_X, PARTS, X_WORD, Y_WORD, SCRATCH, FIRST_BLOCK, WORDS };
enum { SLAB = 1024, LINE = 64, PARTS_OF_A_THREAD = 4, WORTH_A_TEAM = 1 << 19 };

static int level_of_this_machine(void) {
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))) return 0;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")))
        return 3;
    return __builtin_cpu_supports("avx512bf16") ? 5 : 4;
}

static int unknown(const char *what) {
    return fail(LOWBIT_BAD_VERSION,
                "manifest.json lacks %s of the CPU's code, or has others than this runtime knows; export with the "
                "lowbit that it came with",
                what);
}

static int read_program(lowbit_matmul *h, json about, program *found) {
    int code = read_file(&h->from, json_member(about, "code"), true, &found->code);
    found->entry = json_integer(json_member(about, "entry"));
    found->most = json_integer(json_member(about, "most"));
    found->panel = json_integer(json_member(about, "panel"));
    found->block = json_integer(json_member(about, "block"));
    found->per_token = json_integer(json_member(about, "per_token"));
    found->per_worker = json_integer(json_member(about, "per_worker"));
    found->per_worker_token = json_integer(json_member(about, "per_worker_token"));
    return code || (found->block > 0 && found->panel > 0) ? code : unknown("`block` or `panel`");
}

static int read_range(lowbit_matmul *h, json about, cpu_range *found) {
    json in = json_member(about, "quantize");
    int code = LOWBIT_OK;
    found->first = json_integer(json_member(about, "first"));
    found->in = json_is(in, "i8") ? I8 : json_is(in, "f8e4m3") ? F8E4M3 : NOT_QUANTIZED;
    json p = json_first(json_member(about, "programs"));
    for (; p && found->programs < MOST_PROGRAMS && !code; p = json_next(p))
        code = read_program(h, p, &found->program[found->programs++]);
    if (!code && (p || !found->programs)) code = unknown("`programs`");
    if (!code && in && *in != 'n' && !found->in) code = unknown("`quantize`");
    return code;
}

static int read_ranges(lowbit_matmul *h, json r) {
    int code = LOWBIT_OK;
    for (; r && h->cpu_ranges < MOST_RANGES && !code; r = json_next(r))
        code = read_range(h, r, &h->of_rows[h->cpu_ranges++]);
    return code || (h->cpu_ranges && !r) ? code : unknown("`ranges`");
}

static const cpu_range *range_for(const lowbit_matmul *h, int64_t m) {
    const cpu_range *last = &h->of_rows[h->cpu_ranges - 1];
    return m < last->first ? h->of_rows : last;
}

static number_type type_of(json name) { return json_is(name, "bf16") ? BF16 : json_is(name, "f32") ? F32 : F16; }

static int read_types(lowbit_matmul *h) {
    json x = json_first(json_member(h->about, "arrays")), top_k = json_member(h->target, "top_k");
    h->of_x = type_of(json_member(x, "type"));
    h->of_y = type_of(json_member(json_next(x), "type"));
    if (!top_k || *top_k == 'n') return LOWBIT_OK;
    json weights = json_member(top_k, "weights");
    h->top_k = json_integer(json_member(top_k, "count"));
    h->wide_ids = json_is(json_member(top_k, "ids"), "i64");
    h->adds_up = weights != NULL, h->of_weights = type_of(weights);
    return h->top_k > 0 ? LOWBIT_OK : unknown("the count of `top_k`");
}

int cpu_open(lowbit_matmul *h, json targets) {
    int code, level = level_of_this_machine();
    for (json t = json_first(targets); t; t = json_next(t)) {
        int64_t wants = json_integer(json_member(t, "level"));
        if (wants && wants <= level) h->target = t; /* the last is the best */
    }
    if (!h->target)
        return fail(LOWBIT_NOT_THERE,
                    "no code in the folder runs on this CPU; export for target cpu, and use one with AVX2");
    code = read_ranges(h, json_first(json_member(h->target, "ranges")));
    if (!code) code = read_program(h, json_member(h->target, "dequantize"), &h->dequantizer);
    if (!code) code = read_types(h);
    for (json o = json_first(json_member(h->target, "operands")); o && h->operands < MOST_ARRAYS; o = json_next(o)) {
        int array = array_named(h, o);
        if (array < 0)
            return fail(LOWBIT_BAD_VERSION, "the CPU's code takes arguments that this runtime does not know");
        h->operand[h->operands++] = array;
    }
    int permutation = tensor_named(h, "permutation");
    h->permutation = permutation < 0 ? -1 : TENSORS + permutation;
    h->outliers = tensor_named(h, "outliers");
    h->row_blocks = json_integer(json_member(json_member(h->weight, "packing"), "row_blocks")) / h->experts;
    h->threads = 1;
    return code;
}

void cpu_close(lowbit_matmul *h) {
    for (int r = 0; r < h->cpu_ranges; r++)
        for (int i = 0; i < h->of_rows[r].programs; i++) drop(&h->of_rows[r].program[i].code);
    drop(&h->dequantizer.code);
}

static int64_t scratch_bytes(const program *p, int64_t m, int threads) {
    int64_t tokens = (m + p->block - 1) / p->block * p->block;
    return tokens * p->per_token + threads * (p->per_worker + tokens * p->per_worker_token);
}

static int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

/* Bytes for rows of x that are copied in front of a program: those of experts, of permuted columns, and in 8 bits. */
static int64_t copied_bytes(const lowbit_matmul *h, const cpu_range *r, int64_t rows) {
    bool copied = h->permutation >= 0 || h->experts > 1 || r->in;
    return copied ? lines(rows * h->row_bytes[X]) : 0;
}

/* And for the scales of rows in 8 bits, behind them. */
static int64_t scales_bytes(const cpu_range *r, int64_t rows) { return r->in ? lines(rows * 4) : 0; }

/* Bytes for what one of a token's experts makes of it, and for the sums of them all, in f32. */
static int64_t part_bytes(const lowbit_matmul *h) { return h->adds_up ? lines(h->row_bytes[Y]) : 0; }
static int64_t sums_bytes(const lowbit_matmul *h) { return h->adds_up ? lines(4 * h->outputs) : 0; }
static int64_t slots_of(const lowbit_matmul *h, int64_t m) { return h->adds_up ? m * h->top_k : m; }

int64_t cpu_workspace(const lowbit_matmul *h, int64_t m) {
    int64_t rows = h->top_k ? 1 : m < SLAB ? m : SLAB, most = 0;
    for (const cpu_range *r = h->of_rows; r <= range_for(h, slots_of(h, m)); r++) /* calls of fewer rows take the same workspace */
        for (const program *p = r->program; p < r->program + r->programs; p++) {
            int64_t bytes = scratch_bytes(p, p->most && rows > p->most ? p->most : rows, h->threads);
            bytes += copied_bytes(h, r, rows) + scales_bytes(r, rows);
            most = bytes > most ? bytes : most;
        }
    return part_bytes(h) + sums_bytes(h) + most;
}

int64_t cpu_dequantize_workspace(const lowbit_matmul *h) {
    return scratch_bytes(&h->dequantizer, 0, h->threads) + h->k * 2; /* and a row of the weight */
}

typedef struct {
    void (*run)(int64_t *);
    int64_t *words;
} work;

static void call(void *argument) {
    const work *w = argument;
    w->run(w->words);
}

/* What a program multiplies: rows `first` and on of y, by the weight of an expert; rows_of_x: numbers of those that x has
 * for them, NULL where they are the same. */
typedef struct {
    int64_t expert, first, rows;
    const int32_t *rows_of_x;
} piece;

/* Bytes of an expert's part of a tensor. Outliers are not cut: a program gets all of them, and finds its own by the
 * number of its first row block. */
static int64_t slice_bytes(const lowbit_matmul *h, int tensor) {
    bool cut = h->experts > 1 && tensor < h->tensors && tensor != h->outliers;
    return cut ? h->tensor_bytes[tensor] / h->experts : 0;
}

/* scales: of the rows of x, for a program that has them. */
static void run_program(const lowbit_matmul *h, const program *p, piece of, const char *x, const float *scales, char *y,
                        char *const *arrays, char *scratch) {
    int64_t n = h->n / h->experts, multiplied = of.rows ? of.rows : 1;
    int threads = h->parallel && multiplied * n * h->k >= WORTH_A_TEAM ? h->threads : 1;
    int64_t panels = (h->row_blocks + p->panel - 1) / p->panel;
    int64_t parts = threads == 1 ? 1 : PARTS_OF_A_THREAD * threads < panels ? PARTS_OF_A_THREAD * threads : panels;
    int64_t words[WORDS + MOST_ARRAYS + 1] = {[ROWS_OF_X] = of.rows,
                                              [PARTS] = parts,
                                              [X_WORD] = (intptr_t)x,
                                              [Y_WORD] = (intptr_t)y,
                                              [SCRATCH] = (intptr_t)scratch,
                                              [FIRST_BLOCK] = of.expert * h->row_blocks};
    for (int i = 0; i < h->operands; i++) {
        int array = h->operand[i];
        int64_t of_expert = of.expert * slice_bytes(h, array - TENSORS);
        words[WORDS + i] = (intptr_t)arrays[array] + of_expert + of.first * h->row_bytes[array];
    }
    words[WORDS + h->operands] = (intptr_t)scales;
    work w = {0, words};
    const char *code = (const char *)p->code.data + p->entry;
    memcpy(&w.run, &code, sizeof code);
    if (threads > 1)
        h->parallel(call, &w, threads, h->context_of_threads);
    else
        call(&w);
}

static const int32_t *columns_of(const lowbit_matmul *h, int64_t expert, char *const *arrays) {
    return h->permutation < 0 ? NULL : (const int32_t *)arrays[h->permutation] + expert * h->k;
}

/* The rows of x of a piece, side by side, with columns, of two bytes each, in the order of the weight's: copied to the
 * workspace where x is not so, or where it is quantized there. */
static const char *rows_of_x(const lowbit_matmul *h, const cpu_range *r, piece of, char *const *arrays) {
    const int32_t *columns = columns_of(h, of.expert, arrays);
    const char *x = arrays[X];
    char *to = arrays[WORKSPACE];
    if (!of.rows_of_x && !columns && !r->in) return x + of.first * h->row_bytes[X];
    for (int64_t i = 0; i < of.rows; i++, to += h->row_bytes[X]) {
        const char *from = x + (of.rows_of_x ? of.rows_of_x[i] : of.first + i) * h->row_bytes[X];
        if (!columns) memcpy(to, from, (size_t)h->row_bytes[X]);
        for (int64_t c = 0; columns && c < h->k; c++) memcpy(to + 2 * c, from + 2 * columns[c], 2);
    }
    return arrays[WORKSPACE];
}

static void run_piece(const lowbit_matmul *h, const cpu_range *r, piece whole, char *const *arrays) {
    const program *p = r->program, *last = p + r->programs - 1;
    while (p < last && whole.rows > p->most) p++;
    piece of = whole;
    for (int64_t end = whole.first + whole.rows; of.first < end; of.first += of.rows) {
        of.rows = end - of.first < SLAB ? end - of.first : SLAB;
        if (whole.rows_of_x) of.rows_of_x = whole.rows_of_x + (of.first - whole.first);
        const char *x = rows_of_x(h, r, of, arrays);
        char *behind = arrays[WORKSPACE] + copied_bytes(h, r, of.rows);
        float *scales = (float *)behind;
        for (int64_t i = 0; r->in && i < of.rows; i++)
            scales[i] = quantize_row((uint16_t *)(arrays[WORKSPACE] + i * h->row_bytes[X]), h->k, h->of_x, r->in);
        run_program(h, p, of, x, scales, arrays[Y] + of.first * h->row_bytes[Y], arrays,
                    behind + scales_bytes(r, of.rows));
    }
}

/* Token tiles of experts: of each its expert, its first slot, and the slot before which it ends. */
static int check_tiles(const lowbit_matmul *h, const int32_t *rows, const int32_t *tiles, int64_t m, int64_t x_rows) {
    if (tiles[0] < 0 || tiles[0] > m)
        return fail(LOWBIT_BAD_ARGUMENT, "tiles[0] says %d token tiles, of %lld slots", tiles[0], (long long)m);
    for (int64_t i = 1; i <= tiles[0]; i++) {
        const int32_t *t = tiles + 3 * i;
        if (t[0] < 0 || t[0] >= h->experts || t[1] < 0 || t[1] > t[2] || t[2] > m)
            return fail(LOWBIT_BAD_ARGUMENT, "tiles[%lld] has slots %d to %d of %lld, of expert %d of %lld", (long long)i,
                        t[1], t[2], (long long)m, t[0], (long long)h->experts);
        for (int32_t slot = t[1]; slot < t[2]; slot++)
            if (rows[slot] < 0 || rows[slot] >= x_rows)
                return fail(LOWBIT_BAD_ARGUMENT, "rows[%d] = %d is no row of x, which has %lld", slot, rows[slot],
                            (long long)x_rows);
    }
    return LOWBIT_OK;
}

static int run_experts(const lowbit_matmul *h, char *const *arrays, int64_t m, int64_t x_rows) {
    const int32_t *rows = (const int32_t *)arrays[TENSORS + h->tensors];
    const int32_t *tiles = (const int32_t *)arrays[TENSORS + h->tensors + 1];
    int code = check_tiles(h, rows, tiles, m, x_rows);
    for (int64_t i = 1; i <= tiles[0] && !code; i++) {
        const int32_t *t = tiles + 3 * i;
        run_piece(h, range_for(h, m), (piece){t[0], t[1], t[2] - t[1], rows + t[1]}, arrays);
    }
    return code;
}

/* The expert of an id, negative where it is elsewhere. */
static int64_t expert_at(const lowbit_matmul *h, const void *ids, int64_t i) {
    int64_t id = h->wide_ids ? ((const int64_t *)ids)[i] : ((const int32_t *)ids)[i];
    return id < h->experts ? id : -1;
}

/* Experts by ids, one row of x at a time: a row of y for each id, which is not written where its expert is elsewhere. */
static void run_each(const lowbit_matmul *h, char *const *given, int64_t slots) {
    char *arrays[MOST_ARRAYS];
    memcpy(arrays, given, sizeof arrays);
    for (int64_t slot = 0; slot < slots; slot++, arrays[Y] += h->row_bytes[Y]) {
        int64_t expert = expert_at(h, given[TENSORS + h->tensors], slot);
        int32_t row = (int32_t)(slot / h->top_k);
        if (expert >= 0) run_piece(h, range_for(h, slots), (piece){expert, 0, 1, &row}, arrays);
    }
}

/* The same added up, by weights and in the order of the ids: a row of y for each token. */
static void run_sums(const lowbit_matmul *h, char *const *given, int64_t m) {
    char *arrays[MOST_ARRAYS];
    memcpy(arrays, given, sizeof arrays);
    char *part = arrays[Y] = given[WORKSPACE];
    float *sums = (float *)(part + part_bytes(h));
    arrays[WORKSPACE] += part_bytes(h) + sums_bytes(h);
    for (int64_t slot = 0; slot < m * h->top_k; slot++) {
        int64_t expert = expert_at(h, given[TENSORS + h->tensors], slot), token = slot / h->top_k;
        float weight = number_in(given[TENSORS + h->tensors + 1], slot, h->of_weights);
        int32_t row = (int32_t)slot;
        if (slot % h->top_k == 0) memset(sums, 0, sizeof *sums * (size_t)h->outputs);
        if (expert >= 0) run_piece(h, range_for(h, m * h->top_k), (piece){expert, 0, 1, &row}, arrays);
        for (int64_t c = 0; c < h->outputs && expert >= 0; c++) sums[c] += number_in(part, c, h->of_y) * weight;
        for (int64_t c = 0; c < h->outputs && slot % h->top_k == h->top_k - 1; c++)
            store_number(given[Y] + token * h->row_bytes[Y], c, h->of_y, sums[c]);
    }
}

static int run_ids(const lowbit_matmul *h, char *const *arrays, int64_t m, int64_t x_rows) {
    int64_t slots = slots_of(h, m), rows = h->adds_up ? slots : slots / h->top_k;
    if (slots % h->top_k || x_rows != rows || slots > INT32_MAX)
        return fail(LOWBIT_BAD_ARGUMENT, "x_rows=%lld and m=%lld must be %s, for %lld ids of a token", (long long)x_rows,
                    (long long)m, h->adds_up ? "ids and tokens" : "tokens and ids", (long long)h->top_k);
    if (h->adds_up)
        run_sums(h, arrays, m);
    else
        run_each(h, arrays, slots);
    return LOWBIT_OK;
}

int cpu_run(const lowbit_matmul *h, char *const *arrays, int64_t m, int64_t x_rows) {
    if (h->top_k) return run_ids(h, arrays, m, x_rows);
    if (h->experts > 1) return run_experts(h, arrays, m, x_rows);
    run_piece(h, range_for(h, m), (piece){0, 0, m, NULL}, arrays);
    return LOWBIT_OK;
}

/* Brings rows of a gated weight from the order of memory into its own, a cycle of them at a time. */
static void restore_rows(const lowbit_matmul *h, char *w, size_t bytes, char *kept) {
    for (int64_t first = 0; first < h->n; first++) {
        int64_t r = stored_row(h, first), from;
        while (r > first) r = stored_row(h, r);
        if (r < first) continue; /* a row before this one was of the same cycle */
        memcpy(kept, w + first * (int64_t)bytes, bytes);
        for (; (from = stored_row(h, r)) != first; r = from)
            memcpy(w + r * (int64_t)bytes, w + from * (int64_t)bytes, bytes);
        memcpy(w + r * (int64_t)bytes, kept, bytes);
    }
}

static void restore_columns(const lowbit_matmul *h, char *w, size_t bytes, char *const *arrays, char *kept) {
    int64_t rows = h->n / h->experts;
    for (int64_t r = 0; r < h->n; r++, w += bytes) {
        const int32_t *columns = columns_of(h, r / rows, arrays);
        memcpy(kept, w, bytes);
        for (int64_t c = 0; columns && c < h->k; c++) memcpy(w + 2 * columns[c], kept + 2 * c, 2);
    }
}

int cpu_dequantize(const lowbit_matmul *h, char *const *arrays) {
    const program *p = &h->dequantizer;
    size_t bytes = (size_t)h->k * 2;
    char *kept = arrays[WORKSPACE] + scratch_bytes(p, 0, h->threads);
    for (int64_t expert = 0; expert < h->experts; expert++) {
        char *w = arrays[Y] + expert * (h->n / h->experts) * (int64_t)bytes;
        run_program(h, p, (piece){expert, 0, 0, NULL}, NULL, NULL, w, arrays, arrays[WORKSPACE]);
    }
    if (h->gated) restore_rows(h, arrays[Y], bytes, kept);
    if (h->permutation >= 0) restore_columns(h, arrays[Y], bytes, arrays, kept);
    return LOWBIT_OK;
}
