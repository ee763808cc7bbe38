// lowbit::matmul for C++ programs with libtorch: the operator that graphs hold which Python has compiled or exported,
// by the kernels of a library. It uses torch's stable ABI, so it is built once for torch 2.10 and later. lowbit's
// Python package has operators of its own: a process has one or the other.
#define TORCH_TARGET_VERSION 0x020a000000000000 // 2.10
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lowbit.hpp"

extern "C" const lowbit_file LOWBIT_FILES[];

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The matmul that a `kernel` argument describes, opened when a call first asks for it.
const lowbit::Matmul &matmul(const std::string &kernel, int device) {
    static std::map<std::pair<std::string, int>, lowbit::Matmul> opened;
    static std::mutex lock;
    std::lock_guard guard(lock);
    auto found = opened.find({kernel, device});
    if (found == opened.end())
        found = opened.emplace(std::pair(kernel, device), lowbit::Matmul(LOWBIT_FILES, kernel.c_str(), device)).first;
    return found->second;
}

constexpr std::pair<const char *, ScalarType> TYPES[] = {{"f16", ScalarType::Half},
                                                         {"bf16", ScalarType::BFloat16},
                                                         {"f32", ScalarType::Float},
                                                         {"i32", ScalarType::Int},
                                                         {"i64", ScalarType::Long}};

// The type that a description has for "act" or "out", or else another.
ScalarType type_in(const std::string &kernel, const std::string &field, ScalarType otherwise) {
    for (auto [name, type] : TYPES)
        if (kernel.find("\"" + field + "\": \"" + name + "\"") != std::string::npos) return type;
    return otherwise;
}

// Whether a tensor is what a call of m rows reads as tensor i of the weight, or behind these as an input.
bool is_operand(const lowbit::Matmul &mm, int i, const Tensor &given, int64_t m) {
    int input = i - lowbit_tensors(mm.get());
    int64_t bytes = given.numel() * static_cast<int64_t>(given.element_size());
    if (input < 0) return bytes >= lowbit_tensor_bytes(mm.get(), i);
    bool typed = false;
    for (auto [name, type] : TYPES) typed |= name == std::string(lowbit_input_type(mm.get(), input)) && type == given.scalar_type();
    return typed && bytes >= lowbit_input_bytes(mm.get(), input, m);
}

// Throws unless x, the weight and the inputs are what the matmul of a description takes.
void check(const lowbit::Matmul &mm, const Tensor &x, const std::vector<Tensor> &weight, ScalarType act) {
    int operands = lowbit_tensors(mm.get()) + lowbit_inputs(mm.get());
    bool fits = x.dim() && x.size(x.dim() - 1) == mm.k() && x.scalar_type() == act &&
                static_cast<int>(weight.size()) == operands;
    for (int i = 0; fits && i < operands; i++) {
        const Tensor &each = weight[static_cast<size_t>(i)];
        fits = each.is_contiguous() && each.device() == x.device() && is_operand(mm, i, each, x.numel() / mm.k());
    }
    if (!fits)
        throw lowbit::Error(LOWBIT_BAD_ARGUMENT,
                            "lowbit::matmul: x, the weight or an input does not fit the kernel's description");
}

void *stream_of(int device) {
    using Get = int (*)(int32_t, void **);
    static auto get =
        reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream")); // of libtorch_cuda
    void *stream = nullptr;
    if (!get || get(device, &stream)) throw lowbit::Error(LOWBIT_CUDA_FAILED, "torch has no CUDA stream");
    return stream;
}

Tensor multiply(Tensor x, std::vector<Tensor> weight, std::string kernel) {
    bool on_gpu = x.is_cuda();
    const lowbit::Matmul &mm = matmul(kernel, on_gpu ? x.get_device_index() : LOWBIT_CPU);
    ScalarType act = type_in(kernel, "act", ScalarType::Half);
    check(mm, x, weight, act);
    x = torch::stable::contiguous(x);
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = mm.outputs();
    Tensor y = torch::stable::new_empty(x, shape, type_in(kernel, "out", act));
    int64_t m = x.numel() / mm.k(), bytes = mm.workspace_bytes(m);
    Tensor workspace = torch::stable::new_zeros(x, std::vector<int64_t>{bytes}, ScalarType::Byte);
    std::vector<const void *> operands;
    for (const Tensor &each : weight) operands.push_back(each.const_data_ptr());
    lowbit_call call = {};
    call.size = sizeof call, call.x = x.const_data_ptr(), call.weight = operands.data(), call.y = y.mutable_data_ptr();
    call.m = m, call.inputs = operands.data() + lowbit_tensors(mm.get());
    call.workspace = workspace.mutable_data_ptr(), call.workspace_bytes = bytes;
    if (on_gpu) call.stream = stream_of(x.get_device_index());
    mm.run(call);
    return y;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, library) {
    library.def("matmul.packed(Tensor x, Tensor[] weight, str kernel) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, library) { library.impl("matmul.packed", TORCH_BOX(&multiply)); }

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, library) { library.impl("matmul.packed", TORCH_BOX(&multiply)); }
