/* A 4-bit weight in C: packed, multiplied on the CPU, saved, loaded, and compared with the definition. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <lowbit.h>
#include <u4.h>

enum { N = 96, K = 256, GROUP = 64, GROUPS = K / GROUP, M = 3, TENSORS = 3 };

static void check(int code) {
    if (!code) return;
    fprintf(stderr, "lowbit: %s\n", lowbit_error_text());
    exit(1);
}

static void *memory(int64_t bytes) {
    void *found = aligned_alloc(64, (size_t)(bytes + 127) / 64 * 64);
    if (!found) exit(2);
    return memset(found, 0, (size_t)bytes);
}

static double half(uint16_t bits) { /* the value of a normal f16 number, or 0 */
    double value = ldexp(1 + (bits & 1023) / 1024.0, (bits >> 10 & 31) - 15);
    return bits & 0x7fff ? (bits >> 15 ? -value : value) : 0;
}

/* The largest difference from x W^T, in parts of the largest y. */
static double error_of(const uint16_t *y, const uint8_t *codes, const float *scales, const int32_t *zeros) {
    double worst = 0, largest = 0;
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            double sum = 0; /* x is 1 in even columns and -m in odd ones */
            for (int k = 0; k < K; k++) {
                int group = n * GROUPS + k / GROUP;
                sum += (k % 2 ? -m : 1) * scales[group] * (codes[n * K + k] - zeros[group]);
            }
            worst = fmax(worst, fabs(half(y[m * N + n]) - sum)), largest = fmax(largest, fabs(sum));
        }
    return worst / largest;
}

int main(void) {
    static const uint16_t minus[M] = {0x8000, 0xbc00, 0xc000}; /* -0, -1 and -2 in f16 */
    static uint8_t codes[N * K];
    static float scales[N * GROUPS];
    static int32_t zeros[N * GROUPS];
    for (int i = 0; i < N * K; i++) codes[i] = (uint8_t)(i * 2654435761u >> 28);
    for (int i = 0; i < N * GROUPS; i++) scales[i] = (float)(1 + i % 7) / 64, zeros[i] = i % 16;

    lowbit_matmul *mm;
    check(lowbit_open_files(u4_files, "u4", LOWBIT_CPU, &mm));
    printf("u4 [%lld, %lld] for %s\n", (long long)lowbit_n(mm), (long long)lowbit_k(mm), lowbit_target(mm));

    void *weight[TENSORS], *loaded[TENSORS];
    for (int i = 0; i < lowbit_tensors(mm); i++)
        weight[i] = memory(lowbit_tensor_bytes(mm, i)), loaded[i] = memory(lowbit_tensor_bytes(mm, i));
    lowbit_given given[] = {{"codes", LOWBIT_U8, codes, N * K},
                            {"scales", LOWBIT_F32, scales, N * GROUPS},
                            {"zeros", LOWBIT_I32, zeros, N * GROUPS}};
    check(lowbit_pack(mm, given, 3, weight));
    check(lowbit_save(mm, "u4.safetensors", (const void *const *)weight)); /* Python reads it, too */
    check(lowbit_load(mm, "u4.safetensors", loaded));

    uint16_t *x = memory(M * K * 2), *y = memory(M * N * 2);
    for (int i = 0; i < M * K; i++) x[i] = i % 2 ? minus[i / K] : 0x3c00; /* 1 in f16 */
    void *workspace = memory(lowbit_workspace_bytes(mm, M));
    check(lowbit_multiply(mm, x, (const void *const *)loaded, y, M, workspace, NULL));
    double error = error_of(y, codes, scales, zeros);
    printf("largest error, relative to the largest value: %.1e\n", error);

    if (!lowbit_multiply(mm, x, NULL, y, M, workspace, NULL)) return 3;
    printf("without a weight: %s\n", lowbit_error_text());
    for (int i = 0; i < lowbit_tensors(mm); i++) free(weight[i]), free(loaded[i]);
    free(x), free(y), free(workspace);
    lowbit_close(mm);
    return error < 1e-3 ? 0 : 4;
}
