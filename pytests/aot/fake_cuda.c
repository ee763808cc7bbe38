/* A CUDA driver with two GPUs that are none. It writes down what is launched, a line of JSON each, to the file
 * FAKE_CUDA_LOG, if there is one. The code of a kernel is a text: its name, and a letter for each argument: p a pointer,
 * i an integer, t a tensor map. FAKE_CUDA_CAPABILITY has the capability of each GPU, as in "80,90", or that of both; they
 * have 4 multiprocessors.
 *
 * It ends the process where a real driver would do harm: at a kernel, a module or memory of another GPU than that of the
 * current context, and, while fake_cuda_serves is set, at functions that allocate, load or wait. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int device;
    char name[200], kinds[64];
    int shared;
} function;
typedef struct {
    int id;
    char pad[4];
    int value[16];
} attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    attribute *attributes;
    unsigned count;
} config;
typedef struct {
    int type, rank;
    uint64_t address, dims[2], stride;
    uint32_t box[2], steps[2];
    int interleave, swizzle, promotion, fill;
} map;

enum { GPUS = 2, HEADER = 256 }; /* bytes in front of memory, which begin with the number of its GPU */
static __thread void *stack[8];
static __thread int depth;
static char context_of[GPUS];
static atomic_int contexts, modules, allocated;
atomic_int fake_cuda_serves; /* set while calls are made, which may be captured in a graph */

static void log_line(const char *text) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    const char *path = getenv("FAKE_CUDA_LOG");
    if (!path) return;
    pthread_mutex_lock(&one_at_a_time);
    FILE *log = fopen(path, "a");
    fputs(text, log), fclose(log);
    pthread_mutex_unlock(&one_at_a_time);
}
static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fake driver: %s\n", what);
    abort();
}
static void not_in_a_call(const char *function) { must(!fake_cuda_serves, function); }
/* The GPU of the current context. */
static int here(void) {
    must(depth > 0, "there is no current context");
    return (int)((char *)stack[depth - 1] - context_of);
}
static int capability(int device) {
    const char *given = getenv("FAKE_CUDA_CAPABILITY"), *second = strchr(given, ',');
    return atoi(device && second ? second + 1 : given);
}

int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int *device, int number) { return *device = number, number < GPUS ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75   ? capability(device) / 10
             : which == 76 ? capability(device) % 10
             : which == 16 ? 4
             : which == 97 ? 227 << 10
                           : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    not_in_a_call("cuDevicePrimaryCtxRetain");
    contexts++;
    *context = &context_of[device];
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    char line[120];
    not_in_a_call("cuDevicePrimaryCtxRelease");
    contexts--;
    snprintf(line, sizeof line, "{\"closed\": true, \"contexts\": %d, \"modules\": %d, \"allocated\": %d}\n", contexts,
             modules, allocated);
    return log_line(line), device >= GPUS;
}
int cuCtxGetCurrent(void **context) { return *context = depth ? stack[depth - 1] : NULL, 0; }
int cuCtxPushCurrent_v2(void *context) {
    must(context >= (void *)context_of && depth < 8, "a context that is none, or too many of them");
    return stack[depth++] = context, 0;
}
int cuCtxPopCurrent_v2(void **context) {
    must(depth > 0, "no context to take away");
    return *context = stack[--depth], 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int current = 0;
    int before = current;
    return current = *mode, *mode = before, 0;
}
int cuModuleLoadData(void **module, const void *image) {
    not_in_a_call("cuModuleLoadData");
    function *made = calloc(1, sizeof *made);
    if (sscanf(image, "%199s %63s", made->name, made->kinds) != 2) return free(made), 218;
    made->device = here();
    modules++;
    *module = made;
    return 0;
}
int cuModuleUnload(void *module) {
    not_in_a_call("cuModuleUnload");
    must(((function *)module)->device == here(), "cuModuleUnload of another GPU's module");
    modules--;
    free(module);
    return 0;
}
int cuModuleGetFunction(void **found, void *module, const char *name) { return *found = module, name[0] == 0; }
int cuFuncSetAttribute(void *of, int which, int value) { return ((function *)of)->shared = value, which != 8; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    not_in_a_call("cuMemAlloc");
    if (bytes > 1 << 30) return 2;
    char *made = aligned_alloc(HEADER, bytes / HEADER * HEADER + 2 * HEADER);
    memset(made, 0xa5, bytes + HEADER), *(int *)made = here();
    allocated++;
    *address = (uintptr_t)made + HEADER;
    return 0;
}
static int *header_of(uint64_t address) {
    int *header = (int *)(uintptr_t)(address - HEADER);
    must(*header == here(), "memory of another GPU");
    return header;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
    not_in_a_call("cuMemsetD8");
    return header_of(address), memset((void *)(uintptr_t)address, value, bytes), 0;
}
int cuMemFree_v2(uint64_t address) {
    not_in_a_call("cuMemFree");
    allocated--;
    free(header_of(address));
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    return *text = code == 101 ? "invalid device ordinal" : "an error", 0;
}

int cuTensorMapEncodeTiled(void *to, int type, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    map made = {type,
                (int)rank,
                (uintptr_t)address,
                {dims[0], dims[1]},
                strides[0],
                {box[0], box[1]},
                {steps[0], steps[1]},
                interleave,
                swizzle,
                promotion,
                fill};
    if ((uintptr_t)to % 64) return 1;
    return memcpy(to, &made, sizeof made), 0;
}

int cuLaunchKernelEx(const config *c, void *of, void **arguments, void **extra) {
    char line[4096];
    const function *f = of;
    if (extra) return 201;
    must(f->device == here(), "cuLaunchKernelEx of another GPU's kernel");
    if (!getenv("FAKE_CUDA_LOG")) return 0;
    int overlap = c->count == 1 && c->attributes->id == 6 && c->attributes->value[0] == 1;
    int used = sprintf(
        line,
        "{\"kernel\": \"%s\", \"device\": %d, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, "
        "\"allowed\": %d, \"stream\": %llu, \"overlap\": %s, \"arguments\": [",
        f->name, f->device, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
        f->shared, (unsigned long long)(uintptr_t)c->stream, overlap ? "true" : "false");
    for (int i = 0; f->kinds[i]; i++) {
        const map *m = arguments[i];
        used += sprintf(line + used, i ? ", " : "");
        if (f->kinds[i] == 'p')
            used += sprintf(line + used, "%llu", (unsigned long long)*(uint64_t *)arguments[i]);
        else if (f->kinds[i] == 'i')
            used += sprintf(line + used, "%d", *(int *)arguments[i]);
        else
            used += sprintf(line + used,
                            "{\"type\": %d, \"rank\": %d, \"address\": %llu, \"dims\": [%llu, %llu], \"stride\": %llu, "
                            "\"box\": [%u, %u], \"steps\": [%u, %u], \"rest\": [%d, %d, %d, %d]}",
                            m->type, m->rank, (unsigned long long)m->address, (unsigned long long)m->dims[0],
                            (unsigned long long)m->dims[1], (unsigned long long)m->stride, m->box[0], m->box[1],
                            m->steps[0], m->steps[1], m->interleave, m->swizzle, m->promotion, m->fill);
    }
    strcpy(line + used, "]}\n");
    return log_line(line), 0;
}
