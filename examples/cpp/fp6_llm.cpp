#include "fp6_llm.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <fp6.h>
#include <lowbit.hpp>

namespace {

int device = LOWBIT_CPU;
void *workspace;
int64_t workspace_bytes;

// The matmul of a shape, opened when it is first asked for. On the CPU for packing.
const lowbit::Matmul &matmul(size_t m, size_t k, int on) {
    static std::map<std::string, lowbit::Matmul> opened;
    static std::mutex lock;
    std::string name = "fp6_" + std::to_string(m) + "x" + std::to_string(k);
    std::lock_guard guard(lock);
    std::string key = name + "@" + std::to_string(on);
    auto found = opened.find(key);
    if (found == opened.end()) found = opened.emplace(key, lowbit::Matmul(fp6_files, name.c_str(), on)).first;
    return found->second;
}

// Code number i of a stream of bits.
uint8_t code_at(const unsigned char *stream, size_t i) {
    size_t bit = 6 * i, byte = bit / 8;
    unsigned next = bit % 8 > 2 ? stream[byte + 1] : 0;
    return static_cast<uint8_t>((stream[byte] << 8 | next) >> (10 - bit % 8) & 63);
}

float value_of(uint8_t code) { // e3m2: no infinities, no NaN
    int exponent = code >> 2 & 7, mantissa = code & 3;
    float magnitude = std::ldexp(static_cast<float>(exponent ? 4 + mantissa : mantissa), (exponent ? exponent : 1) - 5);
    return code & 32 ? -magnitude : magnitude;
}

float from_half(half h) {
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float magnitude =
        std::ldexp(static_cast<float>(exponent ? 1024 + mantissa : mantissa), (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -magnitude : magnitude;
}

half to_half(float value) { // of numbers in the range of f16, ties to even
    int exponent = 0;
    std::frexp(value, &exponent);
    exponent = exponent - 1 < -14 ? -14 : exponent - 1;
    auto units = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), 10 - exponent)));
    auto bits =
        static_cast<uint16_t>((std::signbit(value) ? 0x8000 : 0) | (value == 0 ? 0 : (exponent + 14) * 1024 + units));
    half result;
    std::memcpy(&result, &bits, 2);
    return result;
}

} // namespace

int fp6_use(int on, void *memory, int64_t bytes) {
    device = on, workspace = memory, workspace_bytes = bytes;
    return 0;
}

void weight_matrix_prepacking(int *packed_weights, int *FP6Weights, size_t M, size_t K) {
    const lowbit::Matmul &mm = matmul(M, K, LOWBIT_CPU);
    std::vector<uint8_t> codes(M * K);
    for (size_t i = 0; i < codes.size(); i++)
        codes[i] = code_at(reinterpret_cast<const unsigned char *>(FP6Weights), i);
    std::vector<float> scales(M, 1.0f); // those of the weight go to fp6_linear_kernel as they are
    lowbit::Weight weight = mm.pack({lowbit::given("codes", codes), lowbit::given("scales", scales)});
    std::memcpy(packed_weights, weight.tensors()[0].data(), static_cast<size_t>(weight.tensors()[0].bytes()));
}

cudaError_t fp6_linear_kernel(cudaStream_t stream, const uint4 *Weight, const half *Scales, const half *B, half *C,
                              const size_t M_Global, const size_t N_Global, const size_t K_Global, float *, int) {
    try {
        const void *weight[] = {Weight, Scales};
        lowbit_call call = {};
        call.size = sizeof call, call.x = B, call.weight = weight, call.y = C, call.m = static_cast<int64_t>(N_Global);
        call.workspace = workspace, call.workspace_bytes = workspace_bytes, call.stream = stream;
        matmul(M_Global, K_Global, device).run(call);
        return cudaSuccess;
    } catch (const lowbit::Error &error) {
        std::fprintf(stderr, "fp6_linear_kernel: %s\n", error.what());
        return error.code == LOWBIT_CUDA_FAILED ? cudaErrorUnknown : cudaErrorInvalidValue;
    }
}

void DeQuantMatrix_FP6_To_FP16(half *A_16bit_h, unsigned char *A_6bit_h, size_t M, size_t K, half *scale) {
    for (size_t i = 0; i < M * K; i++) A_16bit_h[i] = to_half(value_of(code_at(A_6bit_h, i)) * from_half(scale[i / K]));
}
