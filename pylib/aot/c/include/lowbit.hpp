/* lowbit.hpp: lowbit.h for C++20, with resources that free themselves and errors that are exceptions.
 *
 *     lowbit::Matmul mm("folder", "name", LOWBIT_CPU);
 *     lowbit::Weight w = mm.pack({lowbit::given("codes", codes), lowbit::given("scales", scales)});
 *     lowbit::Workspace workspace(mm, m);
 *     mm.multiply(std::span<const uint16_t>(x), w, std::span<uint16_t>(y), workspace);
 *
 * On a GPU pass addresses: mm.run(call) takes the lowbit_call of lowbit.h.
 */
#ifndef LOWBIT_HPP
#define LOWBIT_HPP

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lowbit.h"

namespace lowbit {

/* What a call of the C interface found wrong; `code` is a lowbit_code. */
struct Error : std::runtime_error {
    int code;
    explicit Error(int code) : std::runtime_error(lowbit_error_text()), code(code) {}
    Error(int code, const std::string &text) : std::runtime_error(text), code(code) {}
};

inline void check(int code) {
    if (code) throw Error(code);
}

/* Memory of the host, aligned as kernels need it, all zeros. */
class Memory {
  public:
    explicit Memory(int64_t bytes)
        : bytes_(bytes), data_(std::aligned_alloc(64, static_cast<size_t>((bytes + 127) / 64 * 64))) {
        if (!data_) throw std::bad_alloc();
        std::fill_n(static_cast<char *>(data_.get()), bytes, '\0');
    }
    void *data() const { return data_.get(); }
    int64_t bytes() const { return bytes_; }

  private:
    struct Free {
        void operator()(void *p) const { std::free(p); }
    };
    int64_t bytes_;
    std::unique_ptr<void, Free> data_;
};

/* The tensors of a packed weight, on the host. */
class Weight {
  public:
    explicit Weight(const std::vector<int64_t> &bytes) {
        for (int64_t each : bytes) tensors_.emplace_back(each), addresses_.push_back(tensors_.back().data());
    }
    void *const *data() const { return addresses_.data(); }
    const void *const *operands() const { return addresses_.data(); }
    std::span<const Memory> tensors() const { return tensors_; }

  private:
    std::vector<Memory> tensors_;
    std::vector<void *> addresses_;
};

template <typename T> constexpr lowbit_type type_of();
template <> constexpr lowbit_type type_of<uint8_t>() { return LOWBIT_U8; }
template <> constexpr lowbit_type type_of<int8_t>() { return LOWBIT_I8; }
template <> constexpr lowbit_type type_of<int32_t>() { return LOWBIT_I32; }
template <> constexpr lowbit_type type_of<float>() { return LOWBIT_F32; }

/* A tensor for `Matmul::pack`: any contiguous range of uint8_t, int8_t, int32_t or float. */
template <typename Range> lowbit_given given(const char *name, const Range &range) {
    std::span values(range);
    using Value = std::remove_const_t<typename decltype(values)::element_type>;
    return {name, type_of<Value>(), values.data(), static_cast<int64_t>(values.size())};
}

class Matmul;

/* The workspace of calls of up to m rows that follow each other, on the device of a matmul that outlives it. */
class Workspace {
  public:
    Workspace(const Matmul &mm, int64_t m);
    Workspace(Workspace &&other) noexcept
        : handle_(other.handle_), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
    Workspace &operator=(Workspace &&) = delete;
    ~Workspace() { lowbit_free(handle_, data_); }
    void *data() const { return data_; }
    int64_t bytes() const { return bytes_; }

  private:
    const lowbit_matmul *handle_;
    void *data_ = nullptr;
    int64_t bytes_;
};

/* A handle. Any number of threads may use it at once. */
class Matmul {
  public:
    explicit Matmul(const std::string &folder, const char *name = nullptr, int device = LOWBIT_CPU) {
        lowbit_matmul *opened = nullptr;
        check(lowbit_open(folder.c_str(), name, device, &opened));
        handle_.reset(opened);
    }
    explicit Matmul(const lowbit_file *files, const char *name = nullptr, int device = LOWBIT_CPU) {
        lowbit_matmul *opened = nullptr;
        check(lowbit_open_files(files, name, device, &opened));
        handle_.reset(opened);
    }

    lowbit_matmul *get() const { return handle_.get(); }
    int64_t n() const { return lowbit_n(get()); }
    int64_t k() const { return lowbit_k(get()); }
    int64_t outputs() const { return lowbit_outputs(get()); }
    std::string target() const { return lowbit_target(get()); }
    bool supports(int64_t m) const { return lowbit_supports(get(), m) == LOWBIT_OK; }
    int64_t workspace_bytes(int64_t m) const {
        int64_t bytes = lowbit_workspace_bytes(get(), m);
        if (bytes < 0) throw Error(LOWBIT_BAD_ARGUMENT);
        return bytes;
    }

    /* Packs a weight; see lowbit_given. */
    Weight pack(std::span<const lowbit_given> given) const {
        int count = static_cast<int>(given.size());
        Weight packed(bytes([&] { return lowbit_outlier_bytes(get(), given.data(), count); }));
        check(lowbit_pack(get(), given.data(), count, packed.data()));
        return packed;
    }
    Weight pack(std::initializer_list<lowbit_given> given) const {
        return pack(std::span(given.begin(), given.size()));
    }

    Weight load(const std::string &path) const {
        std::vector<int64_t> bytes(static_cast<size_t>(lowbit_tensors(get())));
        check(lowbit_saved_bytes(get(), path.c_str(), bytes.data()));
        Weight loaded(bytes);
        check(lowbit_load(get(), path.c_str(), loaded.data()));
        return loaded;
    }
    void save(const std::string &path, const Weight &weight) const {
        check(lowbit_save(get(), path.c_str(), weight.operands()));
    }

    /* The weight [n, k] in the act type, on a CPU. */
    Memory dequantize(const Weight &weight) const {
        Memory dense(n() * k() * 2), workspace(std::max<int64_t>(lowbit_dequantize_bytes(get()), 0));
        check(lowbit_dequantize(get(), weight.operands(), dense.data(), workspace.data(), nullptr));
        return dense;
    }

    void run(const lowbit_call &call) const { check(lowbit_run(get(), &call)); }

    /* y [m, outputs] of x [m, k] on a CPU. Numbers of 16 bits are given as uint16_t, or as any type of their size. */
    template <typename X, typename Y>
    void multiply(std::span<const X> x, const Weight &weight, std::span<Y> y, const Workspace &workspace) const {
        int64_t m = static_cast<int64_t>(x.size()) / k();
        if (static_cast<int64_t>(x.size()) != m * k() || static_cast<int64_t>(y.size()) != m * outputs())
            throw Error(LOWBIT_BAD_ARGUMENT, "x must be [m, k] and y [m, outputs]");
        lowbit_call call = {};
        call.size = sizeof call, call.x = x.data(), call.weight = weight.operands(), call.y = y.data(), call.m = m;
        call.workspace = workspace.data(), call.workspace_bytes = workspace.bytes();
        run(call);
    }

  private:
    struct Close {
        void operator()(lowbit_matmul *h) const { lowbit_close(h); }
    };
    template <typename Outliers> std::vector<int64_t> bytes(Outliers outliers) const {
        std::vector<int64_t> found;
        for (int i = 0; i < lowbit_tensors(get()); i++) {
            bool sparse = std::string("outliers") == lowbit_tensor_name(get(), i);
            found.push_back(sparse ? outliers() : lowbit_tensor_bytes(get(), i));
            if (found.back() < 0) throw Error(LOWBIT_BAD_WEIGHT);
        }
        return found;
    }

    std::unique_ptr<lowbit_matmul, Close> handle_;
};

inline Workspace::Workspace(const Matmul &mm, int64_t m) : handle_(mm.get()), bytes_(mm.workspace_bytes(m)) {
    check(lowbit_allocate(handle_, bytes_, &data_));
}

} // namespace lowbit
#endif
