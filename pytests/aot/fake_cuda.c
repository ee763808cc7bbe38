/* A CUDA driver without a GPU, which writes down what is launched, a line of JSON each, to the file FAKE_CUDA_LOG. The
 * code of a kernel is a text: its name, and a letter for each argument: p a pointer, i an integer, t a tensor map. The
 * GPU is of capability FAKE_CUDA_CAPABILITY and has 4 multiprocessors. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
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

static __thread void *stack[8];
static __thread int depth;
static int contexts, modules, allocated;

static int capability(void) { return atoi(getenv("FAKE_CUDA_CAPABILITY")); }
static void log_line(const char *text) {
    FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    fputs(text, log), fclose(log);
}

int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int *device, int number) { return *device = number, number == 0 ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75   ? capability() / 10
             : which == 76 ? capability() % 10
             : which == 16 ? 4
             : which == 97 ? 227 << 10
                           : 0;
    return device;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return contexts++, *context = &contexts, device; }
int cuDevicePrimaryCtxRelease_v2(int device) {
    contexts--;
    char line[120];
    snprintf(line, sizeof line, "{\"closed\": true, \"contexts\": %d, \"modules\": %d, \"allocated\": %d}\n", contexts,
             modules, allocated);
    return log_line(line), device;
}
int cuCtxGetCurrent(void **context) { return *context = depth ? stack[depth - 1] : NULL, 0; }
int cuCtxPushCurrent_v2(void *context) { return stack[depth++] = context, 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = stack[--depth], 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int current = 0;
    int before = current;
    return current = *mode, *mode = before, 0;
}
int cuModuleLoadData(void **module, const void *image) {
    function *made = calloc(1, sizeof *made);
    if (depth != 1 || sscanf(image, "%199s %63s", made->name, made->kinds) != 2) return free(made), 218;
    return modules++, *module = made, 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (depth != 1 || bytes > 1 << 30) return 2;
    return allocated++, *address = (uintptr_t)malloc(bytes), memset((void *)(uintptr_t)*address, 0xa5, bytes), 0;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
    return memset((void *)(uintptr_t)address, value, bytes), depth != 1;
}
int cuMemFree_v2(uint64_t address) { return allocated--, free((void *)(uintptr_t)address), depth != 1; }
int cuModuleUnload(void *module) { return modules--, free(module), 0; }
int cuModuleGetFunction(void **found, void *module, const char *name) { return *found = module, name[0] == 0; }
int cuFuncSetAttribute(void *of, int which, int value) { return ((function *)of)->shared = value, which != 8; }
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
    function *f = of;
    if (depth != 1 || extra) return 201;
    int overlap = c->count == 1 && c->attributes->id == 6 && c->attributes->value[0] == 1;
    int used = sprintf(
        line,
        "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"allowed\": %d, "
        "\"stream\": %llu, \"overlap\": %s, \"arguments\": [",
        f->name, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, f->shared,
        (unsigned long long)(uintptr_t)c->stream, overlap ? "true" : "false");
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
