/* Programs for a CPU: one function of one pointer, to an array of 64-bit words. Any number of threads may call it with
 * the same words; each takes work until none is left (lowbit's passes/cpu/task.py). */
#include <string.h>

#include "internal.h"

enum { TICKET, PREPARED, WORKERS, ROWS_OF_X, PARTS, X_WORD, Y_WORD, SCRATCH, WORDS };
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

static int read_program(lowbit_matmul *h, const char *name, program *found) {
    json about = json_member(json_member(h->target, "programs"), name);
    int code = read_file(&h->from, json_member(about, "code"), true, &found->code);
    found->entry = json_integer(json_member(about, "entry"));
    found->most = json_integer(json_member(about, "most"));
    found->panel = json_integer(json_member(about, "panel"));
    found->block = json_integer(json_member(about, "block"));
    found->per_token = json_integer(json_member(about, "per_token"));
    found->per_worker = json_integer(json_member(about, "per_worker"));
    found->per_worker_token = json_integer(json_member(about, "per_worker_token"));
    return code;
}

int cpu_open(lowbit_matmul *h, json targets) {
    static const char *const names[PROGRAMS] = {"few", "many", "dequantize"};
    int code = LOWBIT_OK, level = level_of_this_machine();
    for (json t = json_first(targets); t; t = json_next(t)) {
        int64_t wants = json_integer(json_member(t, "level"));
        if (wants && wants <= level) h->target = t; /* the last is the best */
    }
    if (!h->target)
        return fail(LOWBIT_NOT_THERE,
                    "no code in the folder runs on this CPU; export for target cpu, and use one with AVX2");
    for (int i = 0; i < PROGRAMS && !code; i++) code = read_program(h, names[i], &h->program[i]);
    for (json o = json_first(json_member(h->target, "operands")); o && h->operands < MOST_ARRAYS; o = json_next(o)) {
        int array = array_named(h, o);
        if (array < 0)
            return fail(LOWBIT_BAD_VERSION, "the CPU's code takes arguments that this runtime does not know");
        h->operand[h->operands++] = array;
    }
    h->permutation = -1;
    for (int i = 0; i < h->tensors; i++)
        if (!strcmp(h->tensor_name[i], "permutation")) h->permutation = TENSORS + i;
    h->row_blocks = json_integer(json_member(json_member(h->weight, "packing"), "row_blocks"));
    h->threads = 1;
    return code;
}

void cpu_close(lowbit_matmul *h) {
    for (int i = 0; i < PROGRAMS; i++) drop(&h->program[i].code);
}

static int64_t scratch_bytes(const program *p, int64_t m, int threads) {
    int64_t tokens = (m + p->block - 1) / p->block * p->block;
    return tokens * p->per_token + threads * (p->per_worker + tokens * p->per_worker_token);
}

static int64_t x_in_order_bytes(const lowbit_matmul *h, int64_t rows) {
    return h->permutation < 0 ? 0 : (rows * h->row_bytes[X] + LINE - 1) / LINE * LINE;
}

int64_t cpu_workspace(const lowbit_matmul *h, int64_t m) {
    int64_t rows = m < SLAB ? m : SLAB, most = scratch_bytes(&h->program[DEQUANTIZE], 0, h->threads);
    for (int i = FEW; i <= MANY; i++) { /* calls of fewer rows take the same workspace */
        int64_t bytes = scratch_bytes(
            &h->program[i], i == FEW && rows > h->program[FEW].most ? h->program[FEW].most : rows, h->threads);
        most = bytes > most ? bytes : most;
    }
    return most + x_in_order_bytes(h, rows);
}

typedef struct {
    void (*run)(int64_t *);
    int64_t *words;
} work;

static void call(void *argument) {
    const work *w = argument;
    w->run(w->words);
}

static void run_program(const lowbit_matmul *h, const program *p, int64_t m, int64_t multiplied, const char *x, char *y,
                        char *const *arrays, char *scratch, int64_t first) {
    int threads = h->parallel && multiplied * h->n * h->k >= WORTH_A_TEAM ? h->threads : 1;
    int64_t panels = (h->row_blocks + p->panel - 1) / p->panel;
    int64_t parts = threads == 1 ? 1 : PARTS_OF_A_THREAD * threads < panels ? PARTS_OF_A_THREAD * threads : panels;
    int64_t words[WORDS + MOST_ARRAYS] = {0, 0, 0, m, parts, (intptr_t)x, (intptr_t)y, (intptr_t)scratch};
    for (int i = 0; i < h->operands; i++)
        words[WORDS + i] = (intptr_t)arrays[h->operand[i]] + first * h->row_bytes[h->operand[i]];
    work w = {0, words};
    const char *code = (const char *)p->code.data + p->entry;
    memcpy(&w.run, &code, sizeof code);
    if (threads > 1)
        h->parallel(call, &w, threads, h->context_of_threads);
    else
        call(&w);
}

/* Brings columns of x, of two bytes each, into the order of the weight's. */
static const char *in_order(const lowbit_matmul *h, const char *x, int64_t rows, char *const *arrays, char *to) {
    if (h->permutation < 0) return x;
    const int32_t *columns = (const int32_t *)arrays[h->permutation];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < h->k; c++) memcpy(to + 2 * (r * h->k + c), x + 2 * (r * h->k + columns[c]), 2);
    return to;
}

int cpu_run(const lowbit_matmul *h, char *const *arrays, int64_t m) {
    const program *p = &h->program[m <= h->program[FEW].most ? FEW : MANY];
    for (int64_t first = 0; first < m; first += SLAB) {
        int64_t rows = m - first < SLAB ? m - first : SLAB;
        const char *x = in_order(h, arrays[X] + first * h->row_bytes[X], rows, arrays, arrays[WORKSPACE]);
        char *scratch = arrays[WORKSPACE] + x_in_order_bytes(h, rows);
        run_program(h, p, rows, rows, x, arrays[Y] + first * h->row_bytes[Y], arrays, scratch, first);
    }
    return LOWBIT_OK;
}

int cpu_dequantize(const lowbit_matmul *h, char *const *arrays) {
    if (!json_true(json_member(h->target, "dequantizes")))
        return fail(LOWBIT_NOT_THERE,
                    "this matmul's weight is not dequantized in C: its rows or columns are in an order of "
                    "their own");
    run_program(h, &h->program[DEQUANTIZE], 0, 1, NULL, arrays[Y], arrays, arrays[WORKSPACE], 0);
    return LOWBIT_OK;
}
