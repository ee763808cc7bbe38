/* What the files of the runtime share. */
#ifndef LOWBIT_INTERNAL_H
#define LOWBIT_INTERNAL_H

#include <stdbool.h>

#include "json.h"
#include "lowbit.h"

enum { MANIFEST = 3, MOST_ARRAYS = 40, MOST_PARAMS = 32, MOST_BUFFERS = 8, MOST_NAME = 64, MOST_PATH = 512 };
enum { MOST_RANGES = 2, MOST_PROGRAMS = 3 }; /* of a CPU's code */
enum { X, Y, WORKSPACE, TENSORS }; /* the first of the arrays, in the order of every manifest */

/* Keeps the text for lowbit_error_text, and returns the code. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* -- files (files.c) */

typedef struct {
    const void *data;
    size_t bytes;
    bool mapped;
} blob;

typedef struct {
    const char *folder; /* NULL: `files` */
    const lowbit_file *files;
    json listed; /* "files" of the manifest */
} source;

int map_file(const char *path, bool executable, blob *found);
int find_file(const source *from, const char *name, bool executable, blob *found); /* not checked */
int read_file(const source *from, json name, bool executable, blob *found);        /* checked against the manifest */
void drop(blob *file);
char *text_of(const blob *file); /* a copy that ends with a zero, to be freed; NULL without memory */
uint32_t crc32_of(const void *data, size_t bytes);

/* -- a GPU (cuda.c) */

typedef struct {
    int kind; /* POINTER, ROWS, TILE or MAP */
    int array;
    int type, width, swizzle, promotion; /* of a tensor map */
    uint32_t box[2];
    uint64_t columns;
} param;
enum { POINTER, ROWS, TILE, MAP };

typedef struct { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    struct launch_attribute *attributes;
    unsigned attribute_count;
} launch_config;

typedef struct {
    char name[MOST_NAME];
    void *module, *function;
    launch_config config;      /* of every launch; what depends on the call is filled in then */
    int64_t rows_of_a_block[3]; /* along an axis of the grid; 0 where its extent is that of `config` */
    bool may_overlap;
    int params;
    param param[MOST_PARAMS];
} kernel;

typedef struct {
    int kernel;
    int64_t rows;
} launch; /* rows: of the launch; 0: all that are left */

typedef struct {
    int64_t first, last, tile; /* INT64_MAX: without end; tile: slots of a token tile of experts */
    int prepared, launches;
    struct {
        int kernel;
        bool for_y; /* for all rows of y, not of x */
    } prepare[2];
    launch *launch;
} range;

/* -- a CPU (cpu.c) */

typedef enum { F16, BF16, F32 } number_type; /* numbers.h */
typedef enum { NOT_QUANTIZED, I8, F8E4M3 } eight_bits;
/* Quantizes a row of x in place, to values of 8 bits as f16; returns its scale. */
float quantize_row(uint16_t *row, int64_t k, number_type of_x, eight_bits type);

typedef struct {
    blob code;
    int64_t entry, most, panel, block, per_token, per_worker, per_worker_token;
} program;

typedef struct {
    int64_t first;    /* rows of a call from which it serves */
    eight_bits in;    /* what x is quantized to */
    int programs;     /* the first that serves a number of rows multiplies them; the last any */
    program program[MOST_PROGRAMS];
} cpu_range;

struct lowbit_matmul {
    source from;
    char *text; /* the manifest */
    char folder[MOST_PATH];
    json about, weight, target; /* of this matmul, in it */
    char target_name[MOST_NAME];
    int device, gpu; /* as CUDA counts, and CUdevice */
    int64_t n, k, outputs, experts;
    bool gated; /* whether rows of two halves are stored side by side */
    int tensors, arrays, inputs;
    int64_t tensor_bytes[MOST_ARRAYS];
    char tensor_name[MOST_ARRAYS][MOST_NAME];
    int64_t row_bytes[MOST_ARRAYS];
    char type[MOST_ARRAYS][8]; /* of the numbers of x, y and inputs */
    char input_name[MOST_ARRAYS][MOST_NAME];
    int buffers, buffer[MOST_BUFFERS]; /* arrays in the workspace, behind each other */
    int in_memory; /* the array that has a dequantized weight in the order of memory; 0 where it needs none */
    int64_t in_memory_bytes;
    /* of a GPU */
    void *context;
    int multiprocessors;
    int64_t launch_workspace;
    int kernels, ranges, prepack, dequantizing;
    int dequantize[2];
    kernel *kernel;
    range *range;
    /* of a CPU */
    cpu_range of_rows[MOST_RANGES];
    int cpu_ranges;
    program dequantizer;
    number_type of_x, of_y, of_weights; /* the last of a router's weights */
    int64_t top_k;                      /* ids of a token's experts; 0 where rows are sorted by expert */
    bool wide_ids, adds_up;             /* ids of 64 bits; weights by which a token's experts are added up */
    int operand[MOST_ARRAYS], operands, permutation, outliers;
    int64_t row_blocks; /* of an expert */
    int threads;
    lowbit_parallel parallel;
    void *context_of_threads;
};

int array_named(const lowbit_matmul *h, json name); /* -1 where there is none */
int64_t stored_row(const lowbit_matmul *h, int64_t r); /* where row r of a weight is stored (packing.c) */
int check_range(const lowbit_matmul *h, const void *const *weight); /* fails for numbers that kernels can't round */

int cuda_open(lowbit_matmul *h, json targets);
void cuda_close(lowbit_matmul *h);
int64_t cuda_workspace(const lowbit_matmul *h, int64_t m);
const range *cuda_range(const lowbit_matmul *h, int64_t m);
int cuda_run(const lowbit_matmul *h, char **arrays, int64_t m, int64_t x_rows, void *stream, bool overlap);
int cuda_allocate(const lowbit_matmul *h, size_t bytes, void **memory);
void cuda_free(const lowbit_matmul *h, void *memory);
int64_t cuda_dequantize_workspace(const lowbit_matmul *h);
int cuda_dequantize(const lowbit_matmul *h, char **arrays, void *stream);
int cuda_pack_codes(const lowbit_matmul *h, char *const *arrays, void *stream);

int cpu_open(lowbit_matmul *h, json targets);
void cpu_close(lowbit_matmul *h);
int64_t cpu_workspace(const lowbit_matmul *h, int64_t m);
int cpu_run(const lowbit_matmul *h, char *const *arrays, int64_t m, int64_t x_rows);
int64_t cpu_dequantize_workspace(const lowbit_matmul *h);
int cpu_dequantize(const lowbit_matmul *h, char *const *arrays);

#endif
