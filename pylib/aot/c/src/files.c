/* Files of a folder, mapped into memory, or of the program itself; each is checked before it is used. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

uint32_t crc32_of(const void *data, size_t bytes) {
    static const uint32_t step[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                      0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                      0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const unsigned char *at = data;
    uint32_t crc = 0xffffffff;
    for (size_t i = 0; i < bytes; i++) {
        crc = step[(crc ^ at[i]) & 15] ^ (crc >> 4);
        crc = step[(crc ^ (at[i] >> 4)) & 15] ^ (crc >> 4);
    }
    return ~crc;
}

int map_file(const char *path, bool executable, blob *found) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return fail(LOWBIT_BAD_FILE, "%s can't be opened; is it a folder that lowbit export has written?", path);
    struct stat about;
    void *data = MAP_FAILED;
    if (!fstat(file, &about) && S_ISREG(about.st_mode) && about.st_size > 0)
        data = mmap(NULL, (size_t)about.st_size, PROT_READ | (executable ? PROT_EXEC : 0), MAP_PRIVATE, file, 0);
    close(file);
    if (data == MAP_FAILED)
        return fail(LOWBIT_BAD_FILE, "%s is empty or can't be mapped%s", path,
                    executable ? "; code must be on a file system that lets it run" : "");
    *found = (blob){data, (size_t)about.st_size, true};
    return LOWBIT_OK;
}

void drop(blob *file) {
    if (file->mapped) munmap((void *)file->data, file->bytes);
    *file = (blob){0};
}

char *text_of(const blob *file) {
    char *text = malloc(file->bytes + 1);
    if (text) memcpy(text, file->data, file->bytes), text[file->bytes] = 0;
    return text;
}

int find_file(const source *from, const char *name, bool executable, blob *found) {
    if (from->folder) {
        char path[2 * MOST_PATH];
        snprintf(path, sizeof path, "%s/%s", from->folder, name);
        return map_file(path, executable, found);
    }
    for (const lowbit_file *file = from->files; file->name; file++)
        if (!strcmp(file->name, name)) {
            *found = (blob){file->data, file->bytes, false};
            return LOWBIT_OK;
        }
    return fail(LOWBIT_BAD_FILE, "the program has no file %s; build its library again", name);
}

int read_file(const source *from, json name, bool executable, blob *found) {
    char text[MOST_PATH], crc[16];
    json_text(name, text, sizeof text);
    json listed = json_member(from->listed, text);
    int code = find_file(from, text, executable, found);
    if (code) return code;
    json_text(json_member(listed, "crc32"), crc, sizeof crc);
    int64_t bytes = json_integer(json_member(listed, "bytes"));
    if ((int64_t)found->bytes == bytes && crc32_of(found->data, found->bytes) == strtoul(crc, NULL, 16))
        return LOWBIT_OK;
    code = fail(LOWBIT_BAD_FILE, "%s is damaged: it has %lld bytes of %lld, or others than were written; export again",
                text, (long long)found->bytes, (long long)bytes);
    drop(found);
    return code;
}
