// The interface of FP6-LLM (fp6_llm/csrc/fp6_linear.cuh, without torch), by lowbit's kernels: a program that links to
// fp6.so links to fp6_llm.cpp in its place. Without CUDA's headers its types are declared alone.
#ifndef FP6_LLM_H
#define FP6_LLM_H

#include <cstddef>
#include <cstdint>

#if __has_include(<cuda_fp16.h>)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
struct uint4 {
    unsigned x, y, z, w;
};
struct __half {
    uint16_t bits;
};
using half = __half;
using cudaStream_t = struct CUstream_st *;
enum cudaError { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorUnknown = 999 };
using cudaError_t = cudaError;
#endif

// C [N_Global, M_Global] = B [N_Global, K_Global] times the weight [M_Global, K_Global]. Reduction_Workspace and
// Split_K are not used: fp6_use names the workspace.
cudaError_t fp6_linear_kernel(cudaStream_t stream, const uint4 *Weight, const half *Scales, const half *B, half *C,
                              const size_t M_Global, const size_t N_Global, const size_t K_Global,
                              float *Reduction_Workspace, int Split_K);

// FP6Weights: codes of e3m2 one after the other, the first in the highest bits. It may be packed in place.
void weight_matrix_prepacking(int *packed_weights, int *FP6Weights, size_t M, size_t K);

void DeQuantMatrix_FP6_To_FP16(half *A_16bit_h, unsigned char *A_6bit_h, size_t M, size_t K, half *scale);

// What FP6-LLM has not, and a program calls once, before the others: for which device (-1 for the CPU), and a workspace
// there, of all zeros, that fp6_linear_kernel may use. One workspace serves one stream.
int fp6_use(int device, void *workspace, int64_t workspace_bytes);
#endif
