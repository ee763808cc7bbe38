// What a user of FP6-LLM does: a stream of 6-bit codes, packed in place, multiplied, and compared with f16 weights.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fp6_llm.h"
#include "lowbit.hpp"

namespace {

constexpr size_t M = 128, K = 256, N = 5;

double value(half h) {
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double magnitude = std::ldexp(exponent ? 1024 + mantissa : mantissa, (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -magnitude : magnitude;
}

half from_bits(uint16_t bits) {
    half h;
    std::memcpy(&h, &bits, 2);
    return h;
}

} // namespace

int main() {
    lowbit::Memory stream(M * K * 6 / 8), scales(M * 2), x(N * K * 2), y(N * M * 2), workspace(1 << 20);
    std::vector<half> dense(M * K);
    auto *bytes = static_cast<unsigned char *>(stream.data());
    auto *of_scales = static_cast<half *>(scales.data()), *of_x = static_cast<half *>(x.data()),
         *of_y = static_cast<half *>(y.data());
    for (int64_t i = 0; i < stream.bytes(); i++) bytes[i] = static_cast<unsigned char>(i * 2654435761u >> 24);
    for (size_t i = 0; i < M; i++) of_scales[i] = from_bits(static_cast<uint16_t>(0x2400 + 37 * i)); // about 1/64
    for (size_t i = 0; i < N * K; i++)
        of_x[i] = from_bits(static_cast<uint16_t>(0x3800 + i * 7 % 2048 + (i % 3 ? 0 : 0x8000)));

    fp6_use(-1, workspace.data(), workspace.bytes());
    DeQuantMatrix_FP6_To_FP16(dense.data(), bytes, M, K, of_scales);
    weight_matrix_prepacking(static_cast<int *>(stream.data()), static_cast<int *>(stream.data()), M, K);
    if (fp6_linear_kernel(nullptr, static_cast<const uint4 *>(stream.data()), of_scales, of_x, of_y, M, N, K, nullptr,
                          1))
        return 1;

    double worst = 0, largest = 0;
    for (size_t n = 0; n < N; n++)
        for (size_t m = 0; m < M; m++) {
            double sum = 0;
            for (size_t k = 0; k < K; k++) sum += value(of_x[n * K + k]) * value(dense[m * K + k]);
            worst = std::fmax(worst, std::fabs(value(of_y[n * M + m]) - sum)),
            largest = std::fmax(largest, std::fabs(sum));
        }
    std::printf("f6e3m2 [%zu, %zu]: largest error, relative to the largest value: %.1e\n", M, K, worst / largest);
    return worst / largest < 2e-3 ? 0 : 2;
}
