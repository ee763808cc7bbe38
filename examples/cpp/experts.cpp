// A mixture of experts in C++20 on the CPU: the first matmul of a gated MLP. Slots, one for each expert of a token, are
// sorted by expert; two tables say which row of x each reads, and which slots an expert has.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include <experts.h>
#include <lowbit.hpp>

namespace {

constexpr int64_t EXPERTS = 4, HIDDEN = 64, K = 128, GROUPS = 2, ROWS = EXPERTS * 2 * HIDDEN, TOKENS = 5;
constexpr int IDS[TOKENS][2] = {{0, 2}, {2, 3}, {3, 0}, {2, 0}, {0, 3}}; // expert 1 has no tokens

// What lowbit::route makes in Python: rows [slots], and tiles [slots + 1, 3] with how many there are in front.
struct Routing {
    std::vector<int32_t> rows, tiles;
    explicit Routing(int64_t tile) : tiles(3 * (2 * TOKENS + 1)) {
        for (int expert = 0; expert < EXPERTS; expert++) {
            auto first = static_cast<int32_t>(rows.size());
            for (int token = 0; token < TOKENS; token++)
                for (int id : IDS[token])
                    if (id == expert) rows.push_back(token);
            auto end = static_cast<int32_t>(rows.size());
            for (int64_t slot = first; slot < end; slot += tile) {
                int32_t *next = &tiles[static_cast<size_t>(3 * ++tiles[0])];
                next[0] = expert, next[1] = static_cast<int32_t>(slot);
                next[2] = static_cast<int32_t>(slot + tile < end ? slot + tile : end);
            }
        }
        tiles[1] = static_cast<int32_t>(rows.size());
    }
};

double value(uint16_t half) {
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double size = std::ldexp(exponent ? 1024 + mantissa : mantissa, (exponent ? exponent : 1) - 25);
    return half >> 15 ? -size : size;
}

// The sum of a row of x, all ones, and of a row of the weight.
double sum_of(const uint16_t *row) {
    double sum = 0;
    for (int64_t k = 0; k < K; k++) sum += value(row[k]);
    return sum;
}

template <typename T> lowbit::Memory aligned(const std::vector<T> &values) {
    lowbit::Memory memory(static_cast<int64_t>(values.size() * sizeof(T)));
    std::memcpy(memory.data(), values.data(), values.size() * sizeof(T));
    return memory;
}

} // namespace

int main() {
    lowbit::Matmul mm(experts_files, "experts");
    std::vector<uint8_t> codes(ROWS * K);
    std::vector<float> scales(ROWS * GROUPS, 1.0f / 64);
    for (size_t i = 0; i < codes.size(); i++) codes[i] = static_cast<uint8_t>(i * 2654435761u >> 28 & 15);
    lowbit::Weight weight = mm.pack({lowbit::given("codes", codes), lowbit::given("scales", scales)});

    int64_t slots = 2 * TOKENS;
    Routing routing(lowbit_expert_tile(mm.get(), slots));
    lowbit::Memory x = aligned(std::vector<uint16_t>(TOKENS * K, 0x3c00)), y(slots * HIDDEN * 2);
    lowbit::Memory rows = aligned(routing.rows), tiles = aligned(routing.tiles);
    lowbit::Workspace workspace(mm, slots);
    const void *inputs[] = {rows.data(), tiles.data()};
    lowbit_call call = {};
    call.size = sizeof call, call.x = x.data(), call.weight = weight.operands(), call.y = y.data();
    call.m = slots, call.x_rows = TOKENS, call.inputs = inputs;
    call.workspace = workspace.data(), call.workspace_bytes = workspace.bytes();
    mm.run(call);

    lowbit::Memory dense = mm.dequantize(weight); // [ROWS, K]: of each expert the gate's rows, and those they multiply
    auto *w = static_cast<const uint16_t *>(dense.data()), *result = static_cast<const uint16_t *>(y.data());
    double worst = 0, largest = 0;
    for (int32_t i = 1; i <= routing.tiles[0]; i++) {
        const int32_t *tile = &routing.tiles[static_cast<size_t>(3 * i)];
        for (int64_t slot = tile[1]; slot < tile[2]; slot++)
            for (int64_t h = 0; h < HIDDEN; h++) {
                const uint16_t *gate = w + (tile[0] * 2 * HIDDEN + h) * K;
                double g = sum_of(gate), expected = g / (1 + std::exp(-g)) * sum_of(gate + HIDDEN * K);
                worst = std::fmax(worst, std::fabs(value(result[slot * HIDDEN + h]) - expected));
                largest = std::fmax(largest, std::fabs(expected));
            }
    }
    std::printf("%lld slots of %lld experts: largest error, relative to the largest value: %.1e\n", (long long)slots,
                (long long)EXPERTS, worst / largest);
    return worst / largest < 2e-3 ? 0 : 1;
}
