/* Opens matmuls, checks calls, and hands them to a GPU or to the CPU. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { ALIGN = 16, PAGE = 256 };

static _Thread_local char text_of_error[640];

const char *lowbit_error_text(void) { return text_of_error; }

int fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text_of_error, sizeof text_of_error, format, arguments);
    va_end(arguments);
    return code;
}

/* -- opening */

/* Reads the manifest, whose last line has the checksum of all before it. */
static int read_manifest(lowbit_matmul *h) {
    static const char seal[] = ",\n \"crc32\": \"";
    blob file;
    int code = find_file(&h->from, "manifest.json", false, &file);
    if (code) return code;
    h->text = text_of(&file);
    size_t bytes = file.bytes;
    drop(&file);
    if (!h->text) return fail(LOWBIT_NO_MEMORY, "no memory for the manifest");
    char *sealed = bytes > 64 ? strstr(h->text + bytes - 64, seal) : NULL;
    if (!sealed || strtoul(sealed + sizeof seal - 1, NULL, 16) != crc32_of(h->text, (size_t)(sealed - h->text)))
        return fail(LOWBIT_BAD_FILE, "manifest.json is damaged, or not of lowbit export; export again");
    int64_t version = json_integer(json_member(h->text, "manifest"));
    if (version != MANIFEST)
        return fail(LOWBIT_BAD_VERSION,
                    "manifest.json is of version %lld, this runtime reads %d; export with the lowbit "
                    "that it came with",
                    (long long)version, MANIFEST);
    h->from.listed = json_member(h->text, "files");
    return LOWBIT_OK;
}

static int find_matmul(lowbit_matmul *h, const char *name) {
    json first = json_first(json_member(h->text, "matmuls"));
    json spec = name && *name == '{' ? json_member(name, "spec") : NULL; /* of Matmul.description */
    for (json each = first; each; each = json_next(each)) {
        bool named = name ? json_is(json_member(each, "name"), name) : !json_next(first);
        if (spec ? json_same(json_member(each, "spec"), spec) : named) h->about = each;
    }
    if (h->about) return LOWBIT_OK;
    if (!name) return fail(LOWBIT_BAD_ARGUMENT, "name is NULL, and the folder has several matmuls; name one");
    return fail(LOWBIT_NOT_THERE, "no matmul '%s' in the folder; manifest.json lists those that are there", name);
}

int array_named(const lowbit_matmul *h, json name) {
    int i = 0;
    for (json each = json_first(json_member(h->about, "arrays")); each; each = json_next(each), i++)
        if (json_same(json_member(each, "name"), name)) return i;
    return -1;
}

static int read_arrays(lowbit_matmul *h) {
    for (json each = json_first(json_member(h->about, "arrays")); each; each = json_next(each)) {
        if (h->arrays == MOST_ARRAYS)
            return fail(LOWBIT_BAD_VERSION, "more than %d arrays in the manifest", MOST_ARRAYS);
        json from = json_member(each, "from");
        h->row_bytes[h->arrays] = json_integer(json_member(each, "row_bytes"));
        json_text(json_member(each, "type"), h->type[h->arrays], sizeof *h->type);
        if (json_is(from, "buffer")) {
            if (h->buffers == MOST_BUFFERS)
                return fail(LOWBIT_BAD_VERSION, "more than %d buffers in the manifest", MOST_BUFFERS);
            h->buffer[h->buffers++] = h->arrays;
        }
        if (json_is(from, "weight")) json_text(json_member(each, "name"), h->tensor_name[h->tensors++], MOST_NAME);
        if (json_is(from, "input")) json_text(json_member(each, "name"), h->input_name[h->inputs++], MOST_NAME);
        if (json_is(from, "dequantized"))
            h->in_memory = h->arrays, h->in_memory_bytes = json_integer(json_member(each, "bytes"));
        h->arrays++;
    }
    h->weight = json_member(h->about, "weight");
    h->n = json_integer(json_member(h->about, "n"));
    h->k = json_integer(json_member(h->about, "k"));
    h->outputs = json_integer(json_member(h->about, "outputs"));
    h->experts = json_integer(json_member(h->about, "experts"));
    h->gated = json_true(json_member(json_member(h->weight, "packing"), "gated"));
    json tensor = json_first(json_member(h->weight, "tensors"));
    for (int i = 0; i < h->tensors; i++, tensor = json_next(tensor))
        h->tensor_bytes[i] = json_integer(json_member(tensor, "bytes"));
    return LOWBIT_OK;
}

static int open_here(lowbit_matmul *h, const char *name) {
    int code = read_manifest(h);
    if (!code) code = find_matmul(h, name);
    if (!code) code = read_arrays(h);
    json targets = json_member(h->about, "targets");
    if (!code) code = h->device == LOWBIT_CPU ? cpu_open(h, targets) : cuda_open(h, targets);
    json_text(json_member(h->target, "target"), h->target_name, MOST_NAME);
    return code;
}

static int open_from(source from, const char *name, int device, lowbit_matmul **handle) {
    if (!handle) return fail(LOWBIT_BAD_ARGUMENT, "handle is NULL");
    *handle = NULL;
    if (device < LOWBIT_CPU)
        return fail(LOWBIT_BAD_ARGUMENT, "device=%d must be the number of a GPU or LOWBIT_CPU", device);
    lowbit_matmul *h = calloc(1, sizeof *h);
    if (!h) return fail(LOWBIT_NO_MEMORY, "no memory for a handle");
    h->from = from, h->device = device;
    if (from.folder) {
        snprintf(h->folder, sizeof h->folder, "%s", from.folder);
        h->from.folder = h->folder;
    }
    int code = open_here(h, name);
    if (code)
        lowbit_close(h);
    else
        *handle = h;
    return code;
}

int lowbit_open(const char *folder, const char *name, int device, lowbit_matmul **handle) {
    if (!folder) return fail(LOWBIT_BAD_ARGUMENT, "folder is NULL");
    if (strlen(folder) >= MOST_PATH)
        return fail(LOWBIT_BAD_ARGUMENT, "folder is a path of more than %d bytes", MOST_PATH - 1);
    return open_from((source){.folder = folder}, name, device, handle);
}

int lowbit_open_files(const lowbit_file *files, const char *name, int device, lowbit_matmul **handle) {
    if (!files) return fail(LOWBIT_BAD_ARGUMENT, "files is NULL");
    return open_from((source){.files = files}, name, device, handle);
}

void lowbit_close(lowbit_matmul *h) {
    if (!h) return;
    if (h->device == LOWBIT_CPU)
        cpu_close(h);
    else
        cuda_close(h);
    free(h->text);
    free(h);
}

/* -- facts */

int64_t lowbit_n(const lowbit_matmul *h) { return h ? h->n : 0; }
int64_t lowbit_k(const lowbit_matmul *h) { return h ? h->k : 0; }
int64_t lowbit_outputs(const lowbit_matmul *h) { return h ? h->outputs : 0; }
const char *lowbit_target(const lowbit_matmul *h) { return h ? h->target_name : ""; }
int lowbit_tensors(const lowbit_matmul *h) { return h ? h->tensors : 0; }

const char *lowbit_tensor_name(const lowbit_matmul *h, int i) {
    return i >= 0 && i < lowbit_tensors(h) ? h->tensor_name[i] : "";
}

int64_t lowbit_tensor_bytes(const lowbit_matmul *h, int i) {
    return i >= 0 && i < lowbit_tensors(h) ? h->tensor_bytes[i] : 0;
}

int lowbit_inputs(const lowbit_matmul *h) { return h ? h->inputs : 0; }

const char *lowbit_input_name(const lowbit_matmul *h, int i) {
    return i >= 0 && i < lowbit_inputs(h) ? h->input_name[i] : "";
}

const char *lowbit_input_type(const lowbit_matmul *h, int i) {
    return i >= 0 && i < lowbit_inputs(h) ? h->type[TENSORS + h->tensors + i] : "";
}

int64_t lowbit_input_bytes(const lowbit_matmul *h, int i, int64_t m) {
    return i >= 0 && i < lowbit_inputs(h) && m > 0 ? m * h->row_bytes[TENSORS + h->tensors + i] : 0;
}

int lowbit_supports(const lowbit_matmul *h, int64_t m) {
    if (!h) return fail(LOWBIT_BAD_ARGUMENT, "handle is NULL");
    if (m < 0 || m > INT32_MAX)
        return fail(LOWBIT_BAD_ARGUMENT, "m=%lld must be 0 to %d rows of x", (long long)m, INT32_MAX);
    if (m && h->device != LOWBIT_CPU && !cuda_range(h, m))
        return fail(LOWBIT_NOT_THERE, "no kernel multiplies m=%lld rows; export again", (long long)m);
    return LOWBIT_OK;
}

int64_t lowbit_expert_tile(const lowbit_matmul *h, int64_t m) {
    if (lowbit_supports(h, m) || h->experts < 2 || h->top_k) return 0;
    if (h->device == LOWBIT_CPU) return 1 << 30; /* all slots of an expert */
    const range *r = cuda_range(h, m > 1 ? m : 1);
    return r ? r->tile : 0;
}

/* Room for a workspace of so many bytes to begin at a multiple of PAGE. */
static int64_t with_room(int64_t bytes) { return bytes ? bytes + PAGE : 0; }

static int64_t workspace_for(const lowbit_matmul *h, int64_t rows) {
    return with_room(h->device == LOWBIT_CPU ? cpu_workspace(h, rows) : cuda_workspace(h, rows));
}

int64_t lowbit_workspace_bytes(const lowbit_matmul *h, int64_t m) {
    return lowbit_supports(h, m) ? -1 : workspace_for(h, m);
}

int64_t lowbit_dequantize_bytes(const lowbit_matmul *h) {
    if (lowbit_supports(h, 0)) return -1;
    return with_room(h->device == LOWBIT_CPU ? cpu_dequantize_workspace(h) : cuda_dequantize_workspace(h));
}

int lowbit_allocate(const lowbit_matmul *h, int64_t bytes, void **memory) {
    if (!h || !memory || bytes < 0)
        return fail(LOWBIT_BAD_ARGUMENT, "a handle, bytes=%lld of at least 0, and a place for the address are needed",
                    (long long)bytes);
    size_t size = ((size_t)bytes + PAGE) / PAGE * PAGE; /* something also for no bytes */
    if (h->device != LOWBIT_CPU) return cuda_allocate(h, size, memory);
    *memory = aligned_alloc(PAGE, size);
    if (!*memory) return fail(LOWBIT_NO_MEMORY, "no memory for a workspace of %lld bytes", (long long)bytes);
    memset(*memory, 0, size);
    return LOWBIT_OK;
}

void lowbit_free(const lowbit_matmul *h, void *memory) {
    if (!h || !memory) return;
    if (h->device == LOWBIT_CPU)
        free(memory);
    else
        cuda_free(h, memory);
}

int lowbit_use_threads(lowbit_matmul *h, int threads, lowbit_parallel parallel, void *context) {
    if (!h || threads < 1 || (threads > 1 && !parallel))
        return fail(LOWBIT_BAD_ARGUMENT, "a handle, threads=%d of at least 1, and for several a function are needed",
                    threads);
    h->threads = threads, h->parallel = parallel, h->context_of_threads = context;
    return LOWBIT_OK;
}

/* -- calls */

static int check_pointer(const char *name, const void *pointer) {
    if (!pointer) return fail(LOWBIT_BAD_ARGUMENT, "%s is NULL", name);
    if ((uintptr_t)pointer % ALIGN)
        return fail(LOWBIT_BAD_ARGUMENT, "%s=%p must begin at a multiple of %d bytes", name, pointer, ALIGN);
    return LOWBIT_OK;
}

/* Checks a call's arrays, and writes them down in the order of the manifest. */
static int take_weight(const lowbit_matmul *h, const void *const *weight, char **arrays) {
    int code = weight ? LOWBIT_OK : fail(LOWBIT_BAD_ARGUMENT, "weight is NULL");
    for (int i = 0; i < h->tensors && !code; i++) {
        code = check_pointer(h->tensor_name[i], weight[i]);
        arrays[TENSORS + i] = (char *)weight[i];
    }
    return code;
}

static int take_workspace(void *workspace, int64_t given, int64_t needed, char **arrays) {
    if (given < needed)
        return fail(LOWBIT_BAD_ARGUMENT, "workspace_bytes=%lld must be at least %lld, as lowbit_workspace_bytes says",
                    (long long)given, (long long)needed);
    if (needed && !workspace)
        return fail(LOWBIT_BAD_ARGUMENT, "workspace is NULL, and %lld bytes are needed", (long long)needed);
    arrays[WORKSPACE] = (char *)(((uintptr_t)workspace + PAGE - 1) / PAGE * PAGE);
    return LOWBIT_OK;
}

static int take_inputs(const lowbit_matmul *h, const void *const *inputs, char **arrays) {
    int code = inputs || !h->inputs ? LOWBIT_OK
                                    : fail(LOWBIT_BAD_ARGUMENT, "inputs is NULL, and this matmul takes %d", h->inputs);
    for (int i = 0; i < h->inputs && !code; i++) {
        code = check_pointer("an input", inputs[i]);
        arrays[TENSORS + h->tensors + i] = (char *)inputs[i];
    }
    return code;
}

int lowbit_run(const lowbit_matmul *h, const lowbit_call *given) {
    char *arrays[MOST_ARRAYS] = {0};
    lowbit_call call = {0};
    if (!given || given->size < sizeof given->size || given->size > sizeof call)
        return fail(LOWBIT_BAD_ARGUMENT, "call must have size = sizeof(lowbit_call), %d bytes at most here",
                    (int)sizeof call);
    memcpy(&call, given, given->size);
    int code = lowbit_supports(h, call.m);
    int64_t x_rows = call.x_rows ? call.x_rows : call.m, rows = x_rows > call.m ? x_rows : call.m;
    if (!code && (x_rows < 0 || x_rows > INT32_MAX || (h->experts == 1 && x_rows != call.m)))
        code = fail(LOWBIT_BAD_ARGUMENT, "x_rows=%lld must be 0, or of experts the rows of x", (long long)x_rows);
    if (code || !call.m) return code;
    arrays[X] = (char *)call.x, arrays[Y] = call.y;
    if ((code = check_pointer("x", call.x)) || (code = check_pointer("y", call.y)) ||
        (code = take_weight(h, call.weight, arrays)) || (code = take_inputs(h, call.inputs, arrays)) ||
        (code = take_workspace(call.workspace, call.workspace_bytes, workspace_for(h, rows), arrays)))
        return code;
    if (h->device == LOWBIT_CPU) return cpu_run(h, arrays, call.m, x_rows);
    return cuda_run(h, arrays, call.m, x_rows, call.stream, call.flags & LOWBIT_SETTLED);
}

int lowbit_multiply(const lowbit_matmul *h, const void *x, const void *const *weight, void *y, int64_t m,
                    void *workspace, void *stream) {
    lowbit_call call = {
        .size = sizeof call, .x = x, .weight = weight, .y = y, .m = m, .workspace = workspace, .stream = stream};
    call.workspace_bytes = lowbit_workspace_bytes(h, m);
    return lowbit_run(h, &call);
}

int lowbit_dequantize(const lowbit_matmul *h, const void *const *weight, void *w, void *workspace, void *stream) {
    char *arrays[MOST_ARRAYS] = {0};
    int code = lowbit_supports(h, 0);
    if (code || (code = check_pointer("w", w)) || (code = take_weight(h, weight, arrays))) return code;
    int64_t bytes = lowbit_dequantize_bytes(h);
    if ((code = take_workspace(workspace, bytes, bytes, arrays))) return code;
    arrays[Y] = w;
    return h->device == LOWBIT_CPU ? cpu_dequantize(h, arrays) : cuda_dequantize(h, arrays, stream);
}

int lowbit_pack_codes(const lowbit_matmul *h, const void *codes, void *packed, void *stream) {
    char *arrays[MOST_ARRAYS] = {0};
    int code = lowbit_supports(h, 0);
    if (code || (code = check_pointer("codes", codes)) || (code = check_pointer("packed", packed))) return code;
    if (h->device == LOWBIT_CPU)
        return fail(LOWBIT_BAD_ARGUMENT, "lowbit_pack_codes is for codes on a GPU; this matmul was opened for the CPU, "
                                         "where lowbit_pack takes them");
    arrays[X] = (char *)codes, arrays[TENSORS] = packed;
    return cuda_pack_codes(h, arrays, stream);
}
