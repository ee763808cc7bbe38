/* Makes files part of a program: `embedded.c`, which `lowbit export` writes, is made of these. Machine code for a CPU
 * becomes part of the program's own, so that it can be called where it is. LOWBIT_FOLDER is the folder, as a string. */
#ifndef LOWBIT_EMBED_H
#define LOWBIT_EMBED_H

#include "lowbit.h"

#define LOWBIT_EMBED(number, section, path)                                         \
    extern const char lowbit_file_##number[] __attribute__((visibility("hidden"))); \
    __asm__(".pushsection " section "\n"                                            \
            ".balign 64\n"                                                          \
            "lowbit_file_" #number ":\n"                                            \
            ".incbin \"" LOWBIT_FOLDER "/" path "\"\n"                              \
            ".popsection\n");
extern LOWBIT_API const lowbit_file LOWBIT_FILES[];

#define LOWBIT_DATA ".rodata"
#define LOWBIT_CODE ".text"

#endif
