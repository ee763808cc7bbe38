// The same weight in C++20: several threads share a handle and a weight, each with a workspace of its own; and one call
// is done by several threads.
#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include <lowbit.hpp>
#include <u4.h>

namespace {

constexpr int64_t N = 96, K = 256, GROUPS = 4, M = 96;

void in_threads(void (*work)(void *), void *argument, int threads, void *) {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(work, argument);
    work(argument);
    for (std::thread &each : others) each.join();
}

std::vector<uint16_t> multiply(const lowbit::Matmul &mm, const lowbit::Weight &weight, const lowbit::Memory &x,
                               int64_t m) {
    lowbit::Memory y(m * N * 2);
    lowbit::Workspace workspace(mm, m);
    std::span<uint16_t> out(static_cast<uint16_t *>(y.data()), static_cast<size_t>(m * N));
    mm.multiply(std::span<const uint16_t>(static_cast<const uint16_t *>(x.data()), static_cast<size_t>(m * K)), weight,
                out, workspace);
    return {out.begin(), out.end()};
}

} // namespace

int main() {
    std::vector<uint8_t> codes(N * K);
    std::vector<float> scales(N * GROUPS, 0.125f);
    std::vector<int32_t> zeros(N * GROUPS, 8);
    for (size_t i = 0; i < codes.size(); i++) codes[i] = static_cast<uint8_t>(i * 2654435761u >> 28 & 15);
    lowbit::Memory x(M * K * 2);
    std::fill_n(static_cast<uint16_t *>(x.data()), M * K, uint16_t{0x3c00});

    lowbit::Matmul mm(u4_files, "u4");
    lowbit::Weight weight =
        mm.pack({lowbit::given("codes", codes), lowbit::given("scales", scales), lowbit::given("zeros", zeros)});
    std::vector<uint16_t> expected = multiply(mm, weight, x, M), found[4];

    std::vector<std::thread> callers;
    for (auto &each : found) callers.emplace_back([&] { each = multiply(mm, weight, x, M); });
    for (std::thread &each : callers) each.join();
    bool equal = std::all_of(std::begin(found), std::end(found), [&](auto &each) { return each == expected; });

    lowbit::check(lowbit_use_threads(mm.get(), 3, in_threads, nullptr));
    equal = equal && multiply(mm, weight, x, M) == expected;
    std::printf("four callers and a team of three give %s\n", equal ? "the same" : "something else");

    try {
        mm.pack({lowbit::given("codes", codes)});
        return 2;
    } catch (const lowbit::Error &error) { std::printf("without scales: %s\n", error.what()); }
    return equal ? 0 : 1;
}
