/* A packed weight in a file of safetensors, as lowbit's PackedWeight.state_dict has it: the tensors, and under "spec" a
 * text that says what they are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { LINE_BYTES = 128, MOST_SPEC = 1 << 16 };

typedef struct {
    blob file;
    char *header, *spec;
    const char *data;
    int64_t bytes;
} saved;

static json tensor_about(const lowbit_matmul *h, int number) {
    json each = json_first(json_member(h->weight, "tensors"));
    while (each && number--) each = json_next(each);
    return each;
}

/* The type as safetensors writes it: numbers of 8 bits are bytes. */
static const char *type_of(json about) {
    static const char *const types[][2] = {{"i32", "I32"}, {"f16", "F16"}, {"bf16", "BF16"}, {"f32", "F32"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (json_is(json_member(about, "type"), types[i][0])) return types[i][1];
    return "U8";
}

static bool is_sparse(json about) { return json_is(json_member(about, "index"), "sparse"); }

/* -- writing */

static int64_t bytes_in_memory(const lowbit_matmul *h, int i, const void *tensor) {
    if (!is_sparse(tensor_about(h, i))) return lowbit_tensor_bytes(h, i);
    int64_t blocks = json_integer(json_member(json_member(h->weight, "packing"), "row_blocks"));
    return (int64_t)((const uint32_t *)tensor)[blocks] * LINE_BYTES; /* the table's last word: the number of lines */
}

/* Writes one entry of the header. */
static int write_entry(FILE *to, const char *name, const char *type, int shape_bytes, const char *shape, int64_t begin,
                       int64_t bytes) {
    return fprintf(to, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%.*s,\"data_offsets\":[%lld,%lld]}", begin ? "," : "{",
                   name, type, shape_bytes, shape, (long long)begin, (long long)(begin + bytes));
}

static bool write_header(const lowbit_matmul *h, const void *const *weight, int64_t spec_bytes, FILE *to) {
    char shape[64];
    uint64_t size = 0;
    bool fine = fwrite(&size, 8, 1, to) == 1; /* written again below */
    int length = snprintf(shape, sizeof shape, "[%lld]", (long long)spec_bytes);
    size += (uint64_t)write_entry(to, "spec", "U8", length, shape, 0, spec_bytes);
    int64_t begin = spec_bytes;
    for (int i = 0; i < h->tensors; i++) {
        json about = tensor_about(h, i), written = json_member(about, "shape");
        int64_t bytes = bytes_in_memory(h, i, weight[i]);
        length = snprintf(shape, sizeof shape, "[%lld,32]", (long long)(bytes / LINE_BYTES));
        if (is_sparse(about))
            size += (uint64_t)write_entry(to, h->tensor_name[i], type_of(about), length, shape, begin, bytes);
        else
            size += (uint64_t)write_entry(to, h->tensor_name[i], type_of(about), (int)(json_end(written) - written),
                                          written, begin, bytes);
        begin += bytes;
    }
    size += (uint64_t)fprintf(to, "}%*s", (int)(7 - size % 8), "");
    return fine && !fseek(to, 0, SEEK_SET) && fwrite(&size, 8, 1, to) == 1 && !fseek(to, 0, SEEK_END);
}

static bool write_all(const lowbit_matmul *h, const void *const *weight, const char *spec, size_t spec_bytes,
                      FILE *to) {
    bool fine = write_header(h, weight, (int64_t)spec_bytes, to) && fwrite(spec, 1, spec_bytes, to) == spec_bytes;
    for (int i = 0; i < h->tensors && fine; i++) {
        size_t bytes = (size_t)bytes_in_memory(h, i, weight[i]);
        fine = fwrite(weight[i], 1, bytes, to) == bytes;
    }
    return fine;
}

int lowbit_save(const lowbit_matmul *h, const char *path, const void *const *weight) {
    if (!h || !path || !weight) return fail(LOWBIT_BAD_ARGUMENT, "handle, path or weight is NULL");
    for (int i = 0; i < h->tensors; i++)
        if (!weight[i]) return fail(LOWBIT_BAD_ARGUMENT, "weight[%d], %s, is NULL", i, h->tensor_name[i]);
    size_t bytes = json_text(json_member(h->weight, "saved"), NULL, 0);
    char *spec = malloc(bytes + 1);
    FILE *file = spec ? fopen(path, "wb") : NULL;
    bool fine = file != NULL;
    if (fine) json_text(json_member(h->weight, "saved"), spec, bytes + 1);
    fine = fine && write_all(h, weight, spec, bytes, file);
    fine = (!file || !fclose(file)) && fine;
    free(spec);
    return fine ? LOWBIT_OK : fail(LOWBIT_BAD_FILE, "%s can't be written", path);
}

/* -- reading */

static int damaged(const char *path, const char *what) {
    return fail(LOWBIT_BAD_FILE, "%s is no weight that lowbit has saved: %s", path, what);
}

static void close_saved(saved *s) {
    drop(&s->file);
    free(s->header);
    free(s->spec);
}

/* The bytes of a tensor in the file; NULL where there are none. */
static const char *bytes_of(const saved *s, json about, int64_t *bytes) {
    json begin = json_first(json_member(about, "data_offsets")), end = begin ? json_next(begin) : NULL;
    int64_t from = json_integer(begin), to = json_integer(end);
    if (!end || from < 0 || to < from || to > s->bytes) return NULL;
    *bytes = to - from;
    return s->data + from;
}

static int open_saved(const char *path, saved *s) {
    uint64_t header;
    int code = map_file(path, false, &s->file);
    if (code) return code;
    if (s->file.bytes < 8) return damaged(path, "it is truncated");
    memcpy(&header, s->file.data, 8);
    if (header > s->file.bytes - 8) return damaged(path, "it is truncated");
    s->data = (const char *)s->file.data + 8 + header, s->bytes = (int64_t)(s->file.bytes - 8 - header);
    s->header = text_of(&(blob){(const char *)s->file.data + 8, header, false});
    if (!s->header) return fail(LOWBIT_NO_MEMORY, "no memory for the header of %s", path);
    int64_t bytes = 0;
    const char *spec = bytes_of(s, json_member(s->header, "spec"), &bytes);
    if (!spec || bytes > MOST_SPEC) return damaged(path, "it has no spec");
    s->spec = text_of(&(blob){spec, (size_t)bytes, false});
    return s->spec ? LOWBIT_OK : fail(LOWBIT_NO_MEMORY, "no memory for the spec of %s", path);
}

/* Checks that a weight was packed as this matmul reads it. */
static int check_spec(const lowbit_matmul *h, const char *path, const saved *s) {
    json spec = json_member(s->spec, "spec"), own = json_member(h->about, "spec");
    int64_t format = json_integer(json_member(s->spec, "format")),
            wanted = json_integer(json_member(h->text, "packing"));
    if (format != wanted)
        return fail(LOWBIT_BAD_VERSION,
                    "%s was saved in format %lld, this is %lld; save it again with the lowbit that exported", path,
                    (long long)format, (long long)wanted);
    for (json each = json_first(json_member(h->weight, "same")); each; each = json_next(each)) {
        char name[MOST_NAME];
        json_text(each, name, sizeof name);
        if (!json_same(json_member(spec, name), json_member(own, name)))
            return fail(LOWBIT_BAD_WEIGHT, "%s was packed with another %s; export for the spec that it has", path,
                        name);
    }
    json epilogue = json_member(spec, "epilogue");
    bool gated = epilogue && *epilogue == '"' && !json_is(epilogue, "residual");
    if (gated != h->gated)
        return fail(LOWBIT_BAD_WEIGHT, "%s was packed with another epilogue; export for the spec that it has", path);
    return LOWBIT_OK;
}

/* Checks the values with which a program would read memory that is not its own. */
static bool in_range(const lowbit_matmul *h, json about, const char *data, int64_t bytes) {
    bool permutation = json_is(json_member(about, "index"), "column");
    if (!permutation && !is_sparse(about)) return true;
    int64_t blocks = json_integer(json_member(json_member(h->weight, "packing"), "row_blocks")), last = 0;
    int64_t head = (blocks + 32) / 32, words = bytes / 4;
    for (int64_t i = 0; i < (permutation ? h->experts * h->k : blocks + 1); i++) {
        int32_t word;
        memcpy(&word, data + 4 * i, 4);
        if (permutation ? word < 0 || word >= h->k : word < last || (i ? 0 : word != head)) return false;
        last = word;
    }
    if (permutation) return true;
    for (int64_t i = head * 32; i < words; i++) {
        uint32_t word, column;
        memcpy(&word, data + 4 * i, 4), memcpy(&column, data + i / 32 * LINE_BYTES, 4);
        if (i % 32 && word && (int64_t)column + (word >> 4 & 4095) >= h->k) return false;
    }
    return last * LINE_BYTES == bytes;
}

static int find_tensor(const lowbit_matmul *h, const char *path, const saved *s, int i, const char **data,
                       int64_t *bytes) {
    json about = tensor_about(h, i), found = json_member(s->header, h->tensor_name[i]);
    int64_t least = lowbit_tensor_bytes(h, i);
    *data = bytes_of(s, found, bytes);
    bool fits =
        *data && json_is(json_member(found, "dtype"), type_of(about)) &&
        (is_sparse(about) ? *bytes >= least && *bytes % LINE_BYTES == 0
                          : *bytes == least && json_same(json_member(found, "shape"), json_member(about, "shape")));
    if (!fits || !in_range(h, about, *data, *bytes))
        return fail(LOWBIT_BAD_WEIGHT, "%s: %s are missing, of another size, or damaged", path, h->tensor_name[i]);
    return LOWBIT_OK;
}

static int read_saved(const lowbit_matmul *h, const char *path, void *const *weight, int64_t *sizes) {
    saved s = {0};
    int code = open_saved(path, &s);
    if (!code) code = check_spec(h, path, &s);
    for (int i = 0; i < h->tensors && !code; i++) {
        const char *data;
        int64_t bytes = 0;
        code = find_tensor(h, path, &s, i, &data, &bytes);
        if (!code && sizes) sizes[i] = bytes;
        if (!code && weight && !weight[i])
            code = fail(LOWBIT_BAD_ARGUMENT, "weight[%d], for %s, is NULL", i, h->tensor_name[i]);
        if (!code && weight) memcpy(weight[i], data, (size_t)bytes);
    }
    close_saved(&s);
    return code || !weight ? code : check_range(h, (const void *const *)weight);
}

int lowbit_load(const lowbit_matmul *h, const char *path, void *const *weight) {
    if (!h || !path || !weight) return fail(LOWBIT_BAD_ARGUMENT, "handle, path or weight is NULL");
    return read_saved(h, path, weight, NULL);
}

int lowbit_saved_bytes(const lowbit_matmul *h, const char *path, int64_t *bytes) {
    if (!h || !path || !bytes) return fail(LOWBIT_BAD_ARGUMENT, "handle, path or bytes is NULL");
    return read_saved(h, path, NULL, bytes);
}
