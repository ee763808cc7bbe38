/* Functions of tvm-ffi (`tvm_ffi.load_module`), of which a library has three for each matmul. Nothing of tvm-ffi is
 * included or linked: its binary interface is one function type.
 *
 *     name(x, y, workspace, weight..., inputs...)   multiplies on the stream of tvm-ffi's environment
 *     name_workspace_bytes(x, m)                    bytes of workspace on the device of x
 *     name_tile(x, m)                               slots of a token tile of experts, 0 without
 */
#ifndef LOWBIT_TVM_FFI_H
#define LOWBIT_TVM_FFI_H

#include <stdint.h>

#include "lowbit.h"

enum { LOWBIT_TVM_DEVICES = 17 }; /* the CPU, and GPUs 0 to 15 */

typedef struct {
    int32_t kind, zero;
    union {
        int64_t integer;
        void *pointer;
    } of;
} lowbit_tvm_any; /* TVMFFIAny */
typedef struct {
    _Atomic(lowbit_matmul *) of[LOWBIT_TVM_DEVICES];
} lowbit_tvm_handles;

__attribute__((visibility("hidden"))) int lowbit_tvm_call(const lowbit_file *files, const char *name, int what,
                                                          lowbit_tvm_handles *handles, const lowbit_tvm_any *arguments,
                                                          int32_t count, lowbit_tvm_any *result);

#define LOWBIT_TVM_FUNCTION(symbol, name, what)                                                                   \
    __attribute__((visibility("default"))) int symbol(void *self, const lowbit_tvm_any *arguments, int32_t count, \
                                                      lowbit_tvm_any *result);                                    \
    int symbol(void *self, const lowbit_tvm_any *arguments, int32_t count, lowbit_tvm_any *result) {              \
        (void)self;                                                                                               \
        return lowbit_tvm_call(LOWBIT_FILES, #name, what, &lowbit_tvm_of_##name, arguments, count, result);       \
    }
#define LOWBIT_TVM(name)                                             \
    static lowbit_tvm_handles lowbit_tvm_of_##name;                  \
    LOWBIT_TVM_FUNCTION(__tvm_ffi_##name, name, 0)                   \
    LOWBIT_TVM_FUNCTION(__tvm_ffi_##name##_workspace_bytes, name, 1) \
    LOWBIT_TVM_FUNCTION(__tvm_ffi_##name##_tile, name, 2)

#endif
