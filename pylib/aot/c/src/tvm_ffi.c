/* tvm-ffi: tensors come as DLPack's views, and errors go to its own store, if it is in the process. */
#define _GNU_SOURCE
#include "tvm_ffi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "internal.h"

typedef struct { /* DLTensor */
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t dims;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } type;
    int64_t *shape, *strides;
    uint64_t offset;
} tensor;

enum {
    INTEGER = 1,
    VIEW = 7,
    OBJECT = 70,
    HEADER = 24
}; /* type indices, and the bytes in front of a tensor object's view */
enum { ON_CPU = 1, ON_CUDA = 2, MOST_OPERANDS = MOST_ARRAYS };

static void *of_tvm(const char *symbol) {
    void *library = dlopen("libtvm_ffi.so", RTLD_NOW | RTLD_NOLOAD), *found = dlsym(RTLD_DEFAULT, symbol);
    if (!found && library) found = dlsym(library, symbol);
    if (library) dlclose(library); /* it stays, as whoever has loaded it holds it */
    return found;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void (*raise_error)(const char *, const char *);
static void *(*stream_of)(int32_t, int32_t);

static void find_tvm(void) {
    *(void **)&raise_error = of_tvm("TVMFFIErrorSetRaisedFromCStr");
    *(void **)&stream_of = of_tvm("TVMFFIEnvGetStream");
}

static int raised(void) {
    if (raise_error) raise_error("ValueError", lowbit_error_text());
    return -1;
}

static const tensor *tensor_of(const lowbit_tvm_any *argument) {
    if (argument->kind == VIEW) return argument->of.pointer;
    return argument->kind == OBJECT ? (const tensor *)((const char *)argument->of.pointer + HEADER) : NULL;
}

static const void *data_of(const tensor *t) { return (const char *)t->data + t->offset; }

static bool is_contiguous(const tensor *t) {
    int64_t stride = 1;
    for (int i = t->dims - 1; i >= 0; stride *= t->shape[i--])
        if (t->strides && t->shape[i] != 1 && t->strides[i] != stride) return false;
    return true;
}

static int64_t bytes_of(const tensor *t) {
    int64_t bytes = t->type.bits * t->type.lanes / 8;
    for (int i = 0; i < t->dims; i++) bytes *= t->shape[i];
    return bytes;
}

static bool has_type(const tensor *t, const char *name) {
    static const struct {
        const char *name;
        int code, bits;
    } types[] = {{"f16", 2, 16}, {"bf16", 4, 16}, {"f32", 2, 32}, {"i32", 0, 32}, {"i64", 0, 64}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(name, types[i].name))
            return t->type.code == types[i].code && t->type.bits == types[i].bits && t->type.lanes == 1;
    return false;
}

/* The handle for the device of a tensor, opened when the first call asks for it. */
static lowbit_matmul *handle_for(const lowbit_file *files, const char *name, lowbit_tvm_handles *handles,
                                 const tensor *x) {
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    int device = x->device.type == ON_CPU ? LOWBIT_CPU : x->device.id;
    if ((x->device.type != ON_CPU && x->device.type != ON_CUDA) || device + 1 >= LOWBIT_TVM_DEVICES) {
        fail(LOWBIT_NOT_THERE, "x is on a device of type %d, number %d; it must be a CPU or one of 16 GPUs",
             x->device.type, x->device.id);
        return NULL;
    }
    lowbit_matmul *found = atomic_load_explicit(&handles->of[device + 1], memory_order_acquire);
    if (found) return found;
    pthread_mutex_lock(&opening);
    found = atomic_load(&handles->of[device + 1]);
    if (!found && !lowbit_open_files(files, name, device, &found)) atomic_store(&handles->of[device + 1], found);
    pthread_mutex_unlock(&opening);
    return found;
}

static int check_matrix(const lowbit_matmul *h, int array, const char *name, const tensor *t, const tensor *x,
                        int64_t columns) {
    if (!has_type(t, h->type[array]) || t->dims != 2 || t->shape[1] != columns || !is_contiguous(t))
        return fail(LOWBIT_BAD_ARGUMENT, "%s must be contiguous, [rows, %lld], and of the type that was exported", name,
                    (long long)columns);
    if (t->device.type != x->device.type || t->device.id != x->device.id)
        return fail(LOWBIT_BAD_ARGUMENT, "%s is on another device than x; move one of them", name);
    return LOWBIT_OK;
}

/* A tensor of the weight, or behind these an input, for m rows of y. */
static int check_operand(const lowbit_matmul *h, int i, const tensor *t, const tensor *x, int64_t m) {
    int input = i - h->tensors;
    const char *name = input < 0 ? lowbit_tensor_name(h, i) : lowbit_input_name(h, input);
    int64_t least = input < 0 ? lowbit_tensor_bytes(h, i) : lowbit_input_bytes(h, input, m);
    if (!is_contiguous(t) || t->device.type != x->device.type || t->device.id != x->device.id)
        return fail(LOWBIT_BAD_ARGUMENT, "%s, argument %d, must be contiguous and on the device of x", name, i + 3);
    if (input >= 0 && !has_type(t, lowbit_input_type(h, input)))
        return fail(LOWBIT_BAD_ARGUMENT, "%s, argument %d, must be of type %s, as it was exported; convert it", name, i + 3,
                    lowbit_input_type(h, input));
    if (bytes_of(t) < least)
        return fail(LOWBIT_BAD_ARGUMENT, "%s, argument %d, has %lld bytes, and %lld are read for %lld rows of y", name,
                    i + 3, (long long)bytes_of(t), (long long)least, (long long)m);
    return LOWBIT_OK;
}

static int multiply(const lowbit_matmul *h, const tensor *const *given, int32_t count) {
    const tensor *x = given[0], *y = given[1], *workspace = given[2];
    const void *operands[MOST_OPERANDS];
    if (count != 3 + h->tensors + h->inputs)
        return fail(LOWBIT_BAD_ARGUMENT,
                    "x, y, a workspace, %d tensors of the weight and %d others are wanted, not %d arguments",
                    h->tensors, h->inputs, count);
    int code = check_matrix(h, X, "x", x, x, h->k);
    if (code || (code = check_matrix(h, Y, "y", y, x, h->outputs))) return code;
    if (h->experts == 1 && x->shape[0] != y->shape[0])
        return fail(LOWBIT_BAD_ARGUMENT, "x has %lld rows, and y %lld", (long long)x->shape[0], (long long)y->shape[0]);
    for (int i = 0; i < count - 3; i++) {
        if ((code = check_operand(h, i, given[i + 3], x, y->shape[0]))) return code;
        operands[i] = data_of(given[i + 3]);
    }
    lowbit_call call = {.size = sizeof call,
                        .x = data_of(x),
                        .weight = operands,
                        .y = (void *)data_of(y),
                        .m = y->shape[0],
                        .x_rows = x->shape[0],
                        .inputs = operands + h->tensors,
                        .workspace = (void *)data_of(workspace),
                        .workspace_bytes = bytes_of(workspace)};
    if (x->device.type == ON_CUDA && stream_of) call.stream = stream_of(x->device.type, x->device.id);
    return lowbit_run(h, &call);
}

int lowbit_tvm_call(const lowbit_file *files, const char *name, int what, lowbit_tvm_handles *handles,
                    const lowbit_tvm_any *arguments, int32_t count, lowbit_tvm_any *result) {
    const tensor *given[MOST_OPERANDS];
    pthread_once(&once, find_tvm);
    int tensors = what ? 1 : count;
    if (count < (what ? 2 : 3) || count > MOST_OPERANDS || (what && (count != 2 || arguments[1].kind != INTEGER))) {
        fail(LOWBIT_BAD_ARGUMENT,
             what ? "a tensor and a number of rows are wanted" : "x, y, a workspace and a weight are wanted");
        return raised();
    }
    for (int i = 0; i < tensors; i++)
        if (!(given[i] = tensor_of(&arguments[i]))) {
            fail(LOWBIT_BAD_ARGUMENT, "argument %d must be a tensor", i);
            return raised();
        }
    lowbit_matmul *h = handle_for(files, name, handles, given[0]);
    if (!h) return raised();
    if (!what) return multiply(h, given, count) ? raised() : 0;
    int64_t m = arguments[1].of.integer, found = what == 1 ? lowbit_workspace_bytes(h, m) : lowbit_expert_tile(h, m);
    if (found < 0) return raised();
    *result = (lowbit_tvm_any){INTEGER, 0, {.integer = found}};
    return 0;
}
