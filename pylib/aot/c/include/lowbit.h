/* lowbit.h: matmuls with low-bit weights, y = x W^T, from a folder that `lowbit export` has written.
 *
 *     lowbit_matmul *mm;
 *     if (lowbit_open("folder", "name", LOWBIT_CPU, &mm)) puts(lowbit_error_text());
 *     lowbit_pack(mm, given, 2, weight);
 *     lowbit_multiply(mm, x, weight, y, m, workspace, stream);
 *
 * A handle does not change after it was opened: any number of threads may use it at once. A call allocates nothing and
 * waits for nothing, so it can be captured in a CUDA graph. The CUDA driver is loaded when a GPU is opened, no earlier.
 */
#ifndef LOWBIT_H
#define LOWBIT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef LOWBIT_API /* define it as nothing to keep the names inside a shared library of your own */
#define LOWBIT_API __attribute__((visibility("default")))
#endif

#define LOWBIT_CPU (-1)   /* in place of the number of a GPU */
#define LOWBIT_SETTLED 1u /* of lowbit_call.flags, see there */

typedef enum {
    LOWBIT_OK = 0,
    LOWBIT_BAD_ARGUMENT = 1, /* null, a negative number, a misaligned pointer, a workspace that is too small */
    LOWBIT_BAD_FILE = 2,     /* missing, truncated, changed, or not what it should be */
    LOWBIT_BAD_VERSION = 3,  /* a manifest or a weight of another version of lowbit */
    LOWBIT_NOT_THERE = 4,    /* no matmul of this name, or no code for this device */
    LOWBIT_BAD_WEIGHT = 5,   /* numbers that can't be packed, or a weight of another matmul */
    LOWBIT_CUDA_FAILED = 6,  /* the driver is missing or refused; the text has its words */
    LOWBIT_NO_MEMORY = 7
} lowbit_code;

typedef struct lowbit_matmul lowbit_matmul;

/* A file in memory: lists end with a name of NULL. `lowbit_add_matmul` of CMake makes them. */
typedef struct {
    const char *name;
    const void *data;
    size_t bytes;
} lowbit_file;

/* What the last call of this thread that failed found wrong, and what helps. Never NULL. */
LOWBIT_API const char *lowbit_error_text(void);

/* Opens a matmul of a folder for a GPU, by its number as CUDA counts, or for LOWBIT_CPU. All code is loaded now.
 * name: NULL where the folder has one matmul; also what `Matmul.description` is in Python, the argument of its operator
 * that saved graphs hold. */
LOWBIT_API int lowbit_open(const char *folder, const char *name, int device, lowbit_matmul **handle);
/* The same of files that are part of the program. They must outlive the handle. */
LOWBIT_API int lowbit_open_files(const lowbit_file *files, const char *name, int device, lowbit_matmul **handle);
LOWBIT_API void lowbit_close(lowbit_matmul *handle);

/* Sizes: rows and columns of the weight, columns of y. */
LOWBIT_API int64_t lowbit_n(const lowbit_matmul *handle);
LOWBIT_API int64_t lowbit_k(const lowbit_matmul *handle);
LOWBIT_API int64_t lowbit_outputs(const lowbit_matmul *handle);
/* The name of what the code is for: "sm_90a", "x86-64-v4". */
LOWBIT_API const char *lowbit_target(const lowbit_matmul *handle);

/* LOWBIT_OK where m rows can be multiplied. */
LOWBIT_API int lowbit_supports(const lowbit_matmul *handle, int64_t m);
/* The most slots of a token tile in the tables that a call of m slots of experts takes; 0 without such tables. */
LOWBIT_API int64_t lowbit_expert_tile(const lowbit_matmul *handle, int64_t m);
/* Bytes of workspace that any call of up to m rows needs; 0 where it needs none. A GPU's must be all zeros before its
 * first call; kernels leave in it what the next one expects. One workspace serves calls that follow each other: one
 * for each stream, or for each thread on a CPU. Negative for an m that is none. */
LOWBIT_API int64_t lowbit_workspace_bytes(const lowbit_matmul *handle, int64_t m);

/* Memory of all zeros on the handle's device, such as a workspace; free it before the handle is closed. On a GPU these
 * wait for the device, so they are for the start and the end of a program, not for calls. */
LOWBIT_API int lowbit_allocate(const lowbit_matmul *handle, int64_t bytes, void **memory);
LOWBIT_API void lowbit_free(const lowbit_matmul *handle, void *memory);

/* -- the weight: tensors in memory, each aligned to 16 bytes */

/* How many tensors the weight has; name and bytes of each. Outliers may have more bytes: ask lowbit_outlier_bytes. */
LOWBIT_API int lowbit_tensors(const lowbit_matmul *handle);
LOWBIT_API const char *lowbit_tensor_name(const lowbit_matmul *handle, int tensor);
LOWBIT_API int64_t lowbit_tensor_bytes(const lowbit_matmul *handle, int tensor);

typedef enum { LOWBIT_U8, LOWBIT_I8, LOWBIT_I32, LOWBIT_F32 } lowbit_type;

/* A tensor as a quantizer gives it, contiguous, in the shape and order that lowbit.Matmul.pack has in Python: codes
 * U8 or I8 [n, k], other integers I32, floats F32. Outliers are three: "outlier_offsets" I32 [n + 1],
 * "outlier_columns" I32 and "outlier_values" F32. count: how many numbers there are. */
typedef struct {
    const char *name;
    lowbit_type type;
    const void *data;
    int64_t count;
} lowbit_given;

/* Packs a weight into host memory, weight[i] for tensor i: byte for byte what Python packs. Values beyond the range of x's
 * type are refused where kernels round weights to it, unless the folder was exported with --wide-range. Without "codes"
 * weight[0] may be NULL: lowbit_pack_codes packs them. */
LOWBIT_API int lowbit_pack(const lowbit_matmul *handle, const lowbit_given *given, int count, void *const *weight);
/* Packs codes that are on the handle's GPU, bytes [n, k], into memory there for tensor 0, by a kernel on the stream.
 * They are not looked at: of a code that the format has not the low bits are packed. */
LOWBIT_API int lowbit_pack_codes(const lowbit_matmul *handle, const void *codes, void *packed, void *stream);
/* Bytes of the outliers' tensor for these outliers; negative where something is wrong with them. */
LOWBIT_API int64_t lowbit_outlier_bytes(const lowbit_matmul *handle, const lowbit_given *given, int count);

/* Files of safetensors with one packed weight, as Python's save_file(w.state_dict(), path) writes and reads them. */
LOWBIT_API int lowbit_save(const lowbit_matmul *handle, const char *path, const void *const *weight);
LOWBIT_API int lowbit_load(const lowbit_matmul *handle, const char *path, void *const *weight);
/* Bytes of each tensor in a file, for lowbit_load; they differ from lowbit_tensor_bytes for outliers alone. */
LOWBIT_API int lowbit_saved_bytes(const lowbit_matmul *handle, const char *path, int64_t *bytes);

/* -- calls */

/* What a call has besides x and the weight, in its order: how many; name and type of each ("f16", "bf16", "f32", "i32" or
 * "i64"), and its bytes for m rows of y, 0 for the table of token tiles. Nothing checks what is at the addresses of a
 * call: engines that know types and sizes of their tensors can. */
LOWBIT_API int lowbit_inputs(const lowbit_matmul *handle);
LOWBIT_API const char *lowbit_input_name(const lowbit_matmul *handle, int input);
LOWBIT_API const char *lowbit_input_type(const lowbit_matmul *handle, int input);
LOWBIT_API int64_t lowbit_input_bytes(const lowbit_matmul *handle, int input, int64_t m);

/* Everything that a call may have. Set `size` to sizeof(lowbit_call), and what is not used to 0.
 *
 * x         [m, k] in the act type, contiguous; of experts [x_rows, k]
 * weight    the tensors of the weight, on the device
 * y         [m, outputs] in the out type
 * m         rows of y; of experts slots, or, by ids that weights add up, tokens
 * x_rows    rows of x where it differs from m, for experts; 0: m
 * inputs    what a call has besides: {residual [m, outputs]}; of experts {rows, tiles}, the tables of a `Routing` in
 *           Python (of tiles[0] the third number may be 0), or {ids} and {ids, router weights} of a spec with top_k;
 *           NULL without
 * workspace of lowbit_workspace_bytes
 * stream    a CUstream (or cudaStream_t)
 * flags     LOWBIT_SETTLED: the weight was written by work that had ended before the kernel in front of this call
 *           began. The call may then overlap with that kernel (programmatic dependent launch)
 */
typedef struct {
    size_t size;
    const void *x;
    const void *const *weight;
    void *y;
    int64_t m;
    int64_t x_rows;
    const void *const *inputs;
    void *workspace;
    int64_t workspace_bytes;
    void *stream;
    unsigned flags;
} lowbit_call;

LOWBIT_API int lowbit_run(const lowbit_matmul *handle, const lowbit_call *call);
/* lowbit_run of a call without inputs and flags, with a workspace of lowbit_workspace_bytes(handle, m). */
LOWBIT_API int lowbit_multiply(const lowbit_matmul *handle, const void *x, const void *const *weight, void *y,
                               int64_t m, void *workspace, void *stream);
/* Writes the weight [n, k] in the act type, its rows in the order in which lowbit_pack takes them, its columns in that of
 * x. The workspace is of lowbit_dequantize_bytes; it may be that of calls, if it is as large. */
LOWBIT_API int lowbit_dequantize(const lowbit_matmul *handle, const void *const *weight, void *w, void *workspace,
                                 void *stream);
LOWBIT_API int64_t lowbit_dequantize_bytes(const lowbit_matmul *handle);

/* Lets a CPU's calls be done by several threads. `parallel` calls work(argument) in that many threads at once, or in
 * fewer, and returns when all have returned. Not while calls are under way; changes lowbit_workspace_bytes. */
typedef void (*lowbit_parallel)(void (*work)(void *), void *argument, int threads, void *context);
LOWBIT_API int lowbit_use_threads(lowbit_matmul *handle, int threads, lowbit_parallel parallel, void *context);

#ifdef __cplusplus
}
#endif
#endif
