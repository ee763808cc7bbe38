/* Kernels on NVIDIA GPUs: loaded when a matmul is opened, and started as the manifest says. Of cuda.h it takes a few
 * numbers that the driver's binary interface does not change. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct launch_attribute { /* CUlaunchAttribute */
    int id;
    char pad[4];
    union {
        int value;
        char bytes[64];
    } of;
};
typedef struct {
    _Alignas(64) char bytes[128];
} tensor_map; /* CUtensorMap */

enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_PER_BLOCK = 97 }; /* CUdevice_attribute */
enum { DYNAMIC_SHARED_BYTES = 8, OVERLAP = 6, RELAXED = 2 }; /* CUfunction_, CUlaunchAttributeID, CUstreamCaptureMode */
enum { MOST_MAPS = 4, PAGE = 256 };

static struct {
    int (*cuInit)(unsigned);
    int (*cuDeviceGet)(int *, int);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuDevicePrimaryCtxRelease_v2)(int);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxPushCurrent_v2)(void *);
    int (*cuCtxPopCurrent_v2)(void **);
    int (*cuThreadExchangeStreamCaptureMode)(int *);
    int (*cuMemAlloc_v2)(uint64_t *, size_t);
    int (*cuMemsetD8_v2)(uint64_t, unsigned char, size_t);
    int (*cuMemFree_v2)(uint64_t);
    int (*cuModuleLoadData)(void **, const void *);
    int (*cuModuleUnload)(void *);
    int (*cuModuleGetFunction)(void **, void *, const char *);
    int (*cuFuncSetAttribute)(void *, int, int);
    int (*cuLaunchKernelEx)(const launch_config *, void *, void **, void **);
    int (*cuTensorMapEncodeTiled)(tensor_map *, int, uint32_t, void *, const uint64_t *, const uint64_t *,
                                  const uint32_t *, const uint32_t *, int, int, int, int);
    int (*cuGetErrorString)(int, const char **);
} cu;
static const char *const names[] = {"cuInit",
                                    "cuDeviceGet",
                                    "cuDeviceGetAttribute",
                                    "cuDevicePrimaryCtxRetain",
                                    "cuDevicePrimaryCtxRelease_v2",
                                    "cuCtxGetCurrent",
                                    "cuCtxPushCurrent_v2",
                                    "cuCtxPopCurrent_v2",
                                    "cuThreadExchangeStreamCaptureMode",
                                    "cuMemAlloc_v2",
                                    "cuMemsetD8_v2",
                                    "cuMemFree_v2",
                                    "cuModuleLoadData",
                                    "cuModuleUnload",
                                    "cuModuleGetFunction",
                                    "cuFuncSetAttribute",
                                    "cuLaunchKernelEx",
                                    "cuTensorMapEncodeTiled",
                                    "cuGetErrorString"};
_Static_assert(sizeof cu == sizeof names, "a name for each function of the driver");

static struct launch_attribute may_start_early = {.id = OVERLAP, .of.value = 1}; /* which the driver reads */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char missing[160];

static void load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        strcpy(missing, "there is no libcuda.so.1 on this machine; open the matmul for LOWBIT_CPU");
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *found = dlsym(library, names[i]);
        if (!found) {
            strcat(strcat(strcpy(missing, "the driver has no "), names[i]), "; update it to one of CUDA 12.0 or later");
            return;
        }
        memcpy((char *)&cu + i * sizeof found, &found, sizeof found);
    }
    if (cu.cuInit(0)) strcpy(missing, "cuInit failed: no GPU can be used here");
}

static int refused(int code, const char *what, const char *of) {
    const char *text = NULL;
    cu.cuGetErrorString(code, &text);
    return fail(LOWBIT_CUDA_FAILED, "%s %s: %s (%d)", what, of, text ? text : "unknown error", code);
}

static int read_param(const lowbit_matmul *h, json p, param *found) {
    json kind = json_member(p, "kind"), map = json_member(p, "map");
    bool number = json_is(kind, "i32"), tile = json_is(json_member(p, "from"), "tile");
    found->kind = number ? (tile ? TILE : ROWS) : map ? MAP : POINTER;
    found->array = number ? 0 : array_named(h, json_member(p, "from"));
    if (found->array < 0 || json_is(kind, "f32")) return LOWBIT_BAD_VERSION;
    found->type = (int)json_integer(json_member(map, "type"));
    found->width = (int)json_integer(json_member(map, "bytes"));
    found->swizzle = (int)json_integer(json_member(map, "swizzle"));
    found->promotion = (int)json_integer(json_member(map, "promotion"));
    found->columns = (uint64_t)json_integer(json_member(map, "columns"));
    json box = json_first(json_member(map, "box"));
    found->box[0] = (uint32_t)json_integer(box);
    found->box[1] = box ? (uint32_t)json_integer(json_next(box)) : 0;
    return LOWBIT_OK;
}

static int64_t up(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* An extent of the grid: fixed on this GPU, or as many blocks as a call's rows need. */
static int read_extent(const lowbit_matmul *h, json extent, kernel *found, int axis) {
    json rule = json_member(extent, "rule");
    int64_t number = json_integer(json_member(extent, "number")), blocks = 0;
    found->config.grid[axis] = 1;
    if (number < 1) return LOWBIT_BAD_VERSION;
    if (json_is(rule, "ceil")) return found->rows_of_a_block[axis] = number, LOWBIT_OK;
    if (json_is(rule, "constant")) blocks = number;
    if (json_is(rule, "sm_count")) blocks = h->multiprocessors * number;
    if (json_is(rule, "sm_part")) blocks = h->multiprocessors / number > 1 ? h->multiprocessors / number : 1;
    found->config.grid[axis] = (unsigned)blocks;
    return blocks < 1 || blocks > (axis ? 65535 : INT32_MAX) ? LOWBIT_BAD_VERSION : LOWBIT_OK;
}

static int read_kernel(const lowbit_matmul *h, json about, kernel *found) {
    json_text(json_member(about, "name"), found->name, sizeof found->name);
    found->config.block[0] = (unsigned)json_integer(json_member(about, "threads"));
    found->config.block[1] = found->config.block[2] = 1;
    found->config.shared_bytes = (unsigned)json_integer(json_member(about, "shared_bytes"));
    found->may_overlap = json_true(json_member(about, "may_overlap"));
    int axis = 0, maps = 0, unknown = 0;
    for (json e = json_first(json_member(about, "grid")); e && axis < 3; e = json_next(e), axis++)
        unknown |= read_extent(h, e, found, axis);
    for (json p = json_first(json_member(about, "params")); p && !unknown; p = json_next(p))
        unknown = found->params == MOST_PARAMS || read_param(h, p, &found->param[found->params]) ||
                  (maps += found->param[found->params++].kind == MAP) > MOST_MAPS;
    if (!unknown) return LOWBIT_OK;
    return fail(LOWBIT_BAD_VERSION, "kernel %s is started in a way that this runtime does not know", found->name);
}

/* Loads the code of a kernel into the current context: machine code of the GPU's generation, else PTX. */
static int load_kernel(const lowbit_matmul *h, json about, bool same_generation, kernel *found) {
    blob file = {0};
    char function[MOST_NAME];
    int code = read_file(&h->from, json_member(about, same_generation ? "cubin" : "ptx"), false, &file);
    if (code) return code;
    char *image = text_of(&file); /* PTX ends with a zero */
    drop(&file);
    if (!image) return fail(LOWBIT_NO_MEMORY, "no memory to load kernel %s", found->name);
    json_text(json_member(about, "function"), function, sizeof function);
    code = cu.cuModuleLoadData(&found->module, image);
    free(image);
    if (!code) code = cu.cuModuleGetFunction(&found->function, found->module, function);
    if (!code) code = cu.cuFuncSetAttribute(found->function, DYNAMIC_SHARED_BYTES, (int)found->config.shared_bytes);
    return code ? refused(code, "loading kernel", found->name) : LOWBIT_OK;
}

static int count(json list) {
    int n = 0;
    for (json each = json_first(list); each; each = json_next(each)) n++;
    return n;
}

static int read_ranges(lowbit_matmul *h) {
    json listed = json_member(h->target, "ranges");
    h->range = calloc((size_t)count(listed) + 1, sizeof *h->range);
    if (!h->range) return fail(LOWBIT_NO_MEMORY, "no memory for the ranges of rows");
    for (json r = json_first(listed); r; r = json_next(r)) {
        range *found = &h->range[h->ranges++];
        json last = json_member(r, "last"), launches = json_member(r, "launches");
        found->first = json_integer(json_member(r, "first"));
        found->tile = json_integer(json_member(r, "tile"));
        found->last = last && *last == 'n' ? INT64_MAX : json_integer(last);
        for (json p = json_first(json_member(r, "prepare")); p && found->prepared < 2; p = json_next(p)) {
            found->prepare[found->prepared].kernel = (int)json_integer(json_member(p, "kernel"));
            found->prepare[found->prepared++].for_y = json_is(json_member(p, "rows_of"), "y");
        }
        found->launch = calloc((size_t)count(launches) + 1, sizeof *found->launch);
        if (!found->launch) return fail(LOWBIT_NO_MEMORY, "no memory for the ranges of rows");
        for (json l = json_first(launches); l; l = json_next(l))
            found->launch[found->launches++] =
                (launch){(int)json_integer(json_member(l, "kernel")), json_integer(json_member(l, "rows"))};
    }
    return LOWBIT_OK;
}

static int read_kernels(lowbit_matmul *h, bool same_generation) {
    json listed = json_member(h->target, "kernels"), prepack = json_member(h->target, "prepack");
    h->kernel = calloc((size_t)count(listed) + 1, sizeof *h->kernel);
    if (!h->kernel) return fail(LOWBIT_NO_MEMORY, "no memory for kernels");
    int code = LOWBIT_OK;
    for (json each = json_first(listed); each && !code; each = json_next(each)) {
        kernel *found = &h->kernel[h->kernels++];
        int64_t workspace = json_integer(json_member(each, "workspace_bytes"));
        if (up(workspace) > h->launch_workspace) h->launch_workspace = up(workspace);
        code = read_kernel(h, each, found);
        if (!code) code = load_kernel(h, each, same_generation, found);
    }
    h->prepack = (int)json_integer(prepack);
    for (json d = json_first(json_member(h->target, "dequantize")); d && h->dequantizing < 2; d = json_next(d))
        h->dequantize[h->dequantizing++] = (int)json_integer(d);
    return code ? code : read_ranges(h);
}

/* The target for a GPU: one of its own, or else the nearest before it whose PTX runs later. */
static int choose(lowbit_matmul *h, json targets, int device, int *generation) {
    int major = 0, minor = 0, shared = 0, code;
    if ((code = cu.cuDeviceGetAttribute(&major, MAJOR, device)) ||
        (code = cu.cuDeviceGetAttribute(&minor, MINOR, device)) ||
        (code = cu.cuDeviceGetAttribute(&shared, SHARED_PER_BLOCK, device)) ||
        (code = cu.cuDeviceGetAttribute(&h->multiprocessors, MULTIPROCESSORS, device)))
        return refused(code, "asking", "the GPU");
    for (json t = json_first(targets); t; t = json_next(t)) {
        int64_t capability = json_integer(json_member(t, "capability")), wants = 10 * major + minor;
        bool runs =
            capability == wants || (capability && capability < wants && json_true(json_member(t, "runs_later")));
        if (runs && json_integer(json_member(t, "shared_per_block")) <= shared)
            h->target = t, *generation = (int)capability / 10 == major;
    }
    if (h->target) return LOWBIT_OK;
    return fail(LOWBIT_NOT_THERE, "no kernel in the folder runs on this GPU, sm_%d%d; export for it as well", major,
                minor);
}

static int open_on(lowbit_matmul *h, json targets, int device) {
    int same_generation = 0, mode = RELAXED, code = choose(h, targets, device, &same_generation);
    if (code) return code;
    code = cu.cuDevicePrimaryCtxRetain(&h->context, device);
    if (code) return refused(code, "taking", "the GPU's context");
    cu.cuCtxPushCurrent_v2(h->context);
    cu.cuThreadExchangeStreamCaptureMode(&mode); /* code may be loaded while this thread captures a graph */
    code = read_kernels(h, same_generation);
    cu.cuThreadExchangeStreamCaptureMode(&mode);
    cu.cuCtxPopCurrent_v2(&(void *){0});
    return code;
}

int cuda_open(lowbit_matmul *h, json targets) {
    pthread_once(&once, load_driver);
    if (*missing) return fail(LOWBIT_CUDA_FAILED, "%s", missing);
    int code = cu.cuDeviceGet(&h->gpu, h->device);
    return code ? refused(code, "finding", "the GPU") : open_on(h, targets, h->gpu);
}

void cuda_close(lowbit_matmul *h) {
    if (h->context) cu.cuCtxPushCurrent_v2(h->context);
    for (int i = 0; i < h->kernels; i++)
        if (h->kernel[i].module) cu.cuModuleUnload(h->kernel[i].module);
    if (h->context) cu.cuCtxPopCurrent_v2(&(void *){0}), cu.cuDevicePrimaryCtxRelease_v2(h->gpu);
    for (int i = 0; i < h->ranges; i++) free(h->range[i].launch);
    free(h->range);
    free(h->kernel);
}

/* -- a call */

int64_t cuda_workspace(const lowbit_matmul *h, int64_t m) {
    int64_t bytes = h->launch_workspace;
    for (int i = 0; i < h->buffers; i++) bytes += up(m * h->row_bytes[h->buffer[i]]);
    return bytes;
}

int64_t cuda_dequantize_workspace(const lowbit_matmul *h) { return h->launch_workspace + h->in_memory_bytes; }

const range *cuda_range(const lowbit_matmul *h, int64_t m) {
    for (int i = 0; i < h->ranges; i++)
        if (m >= h->range[i].first && m <= h->range[i].last) return &h->range[i];
    return NULL;
}

static bool find_grid(const kernel *k, int64_t rows, unsigned *grid) {
    for (int axis = 0; axis < 3; axis++) {
        int64_t of_a_block = k->rows_of_a_block[axis];
        if (!of_a_block) continue;
        int64_t blocks = (rows + of_a_block - 1) / of_a_block;
        if (blocks < 1 || blocks > (axis ? 65535 : INT32_MAX)) return false;
        grid[axis] = (unsigned)blocks;
    }
    return true;
}

static int encode(const param *p, void *address, int64_t rows, tensor_map *map) {
    uint64_t shape[2] = {p->columns, (uint64_t)rows}, stride = p->columns * (uint64_t)p->width;
    uint32_t steps[2] = {1, 1};
    return cu.cuTensorMapEncodeTiled(map, p->type, 2, address, shape, &stride, p->box, steps, 0, p->swizzle,
                                     p->promotion, 0);
}

/* Starts a kernel for rows `first` to `first + rows`, of experts with token tiles of `tile` slots. */
static int start(const lowbit_matmul *h, const kernel *k, char *const *arrays, int64_t first, int64_t rows, int tile,
                 void *stream, bool overlap) {
    launch_config config = k->config;
    tensor_map maps[MOST_MAPS];
    char *pointers[MOST_PARAMS];
    void *values[MOST_PARAMS];
    int used = 0, code, count_of_rows = (int)rows;
    if (!find_grid(k, rows, config.grid))
        return fail(LOWBIT_BAD_ARGUMENT, "m is more than kernel %s takes; multiply fewer rows at once", k->name);
    for (int i = 0; i < k->params; i++) {
        const param *p = &k->param[i];
        pointers[i] = arrays[p->array] ? arrays[p->array] + first * h->row_bytes[p->array] : NULL;
        values[i] = p->kind == ROWS ? (void *)&count_of_rows : p->kind == TILE ? (void *)&tile : &pointers[i];
        if (p->kind == MAP) {
            if ((code = encode(p, pointers[i], rows, &maps[used]))) return refused(code, "describing x for", k->name);
            values[i] = &maps[used++];
        }
    }
    config.stream = stream;
    if (overlap && k->may_overlap) config.attributes = &may_start_early, config.attribute_count = 1;
    code = cu.cuLaunchKernelEx(&config, k->function, values, NULL);
    return code ? refused(code, "starting", k->name) : LOWBIT_OK;
}

static int run_range(const lowbit_matmul *h, const range *r, char *const *arrays, int64_t m, int64_t x_rows,
                     void *stream, bool overlap) {
    int code = LOWBIT_OK, tile = (int)r->tile;
    for (int i = 0; i < r->prepared && !code; i++) {
        int64_t rows = r->prepare[i].for_y ? m : x_rows;
        code = start(h, &h->kernel[r->prepare[i].kernel], arrays, 0, rows, tile, stream, overlap);
    }
    const launch *l = r->launch;
    for (int64_t first = 0, rows; first < m && !code; first += rows) {
        rows = l->rows && l->rows < m - first ? l->rows : m - first;
        code = start(h, &h->kernel[l->kernel], arrays, first, rows, tile, stream, overlap);
        if (l + 1 < r->launch + r->launches) l++;
    }
    return code;
}

/* Gives this thread the GPU's context, if it has another; tells whether it had. */
static bool enter(const lowbit_matmul *h) {
    void *current = NULL;
    if (!cu.cuCtxGetCurrent(&current) && current == h->context) return false;
    return !cu.cuCtxPushCurrent_v2(h->context);
}

static void leave(bool entered) {
    if (entered) cu.cuCtxPopCurrent_v2(&(void *){0});
}

int cuda_allocate(const lowbit_matmul *h, size_t bytes, void **memory) {
    uint64_t address = 0;
    bool entered = enter(h);
    int code = cu.cuMemAlloc_v2(&address, bytes);
    if (!code && (code = cu.cuMemsetD8_v2(address, 0, bytes))) cu.cuMemFree_v2(address);
    leave(entered);
    *memory = code ? NULL : (void *)(uintptr_t)address;
    return code ? refused(code, "allocating", "a workspace") : LOWBIT_OK;
}

void cuda_free(const lowbit_matmul *h, void *memory) {
    bool entered = enter(h);
    cu.cuMemFree_v2((uint64_t)(uintptr_t)memory);
    leave(entered);
}

int cuda_run(const lowbit_matmul *h, char **arrays, int64_t m, int64_t x_rows, void *stream, bool overlap) {
    char *buffer = arrays[WORKSPACE] + h->launch_workspace;
    int64_t rows = m > x_rows ? m : x_rows;
    for (int i = 0; i < h->buffers; i++) {
        arrays[h->buffer[i]] = buffer;
        buffer += up(rows * h->row_bytes[h->buffer[i]]);
    }
    bool entered = enter(h);
    int code = run_range(h, cuda_range(h, m), arrays, m, x_rows, stream, overlap);
    leave(entered);
    return code;
}

int cuda_dequantize(const lowbit_matmul *h, char **arrays, void *stream) {
    int code = LOWBIT_OK;
    if (h->in_memory) arrays[h->in_memory] = arrays[WORKSPACE] + h->launch_workspace;
    bool entered = enter(h);
    for (int i = 0; i < h->dequantizing && !code; i++)
        code = start(h, &h->kernel[h->dequantize[i]], arrays, 0, 0, 0, stream, false);
    leave(entered);
    return code;
}

int cuda_pack_codes(const lowbit_matmul *h, char *const *arrays, void *stream) {
    bool entered = enter(h);
    int code = start(h, &h->kernel[h->prepack], arrays, 0, 0, 0, stream, false);
    leave(entered);
    return code;
}
