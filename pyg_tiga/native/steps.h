// What a layer does at every call, step by step, without an interpreter between the
// steps: allocations, dense products by PyTorch, and launches of compiled kernels.

#pragma once

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pyg_tiga {

constexpr size_t kMostParameters = 128;
constexpr uint64_t kAlignment = 16;  // Bytes; compiled kernels rely on it.
constexpr int kInvalidValue = 1;     // Of the driver's status codes.

// cuLaunchKernel and cuFuncGetParamInfo of the CUDA driver.
using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, unsigned, void*, void**, void**);
using Describe = int (*)(void*, size_t, size_t*, size_t*);

inline void* symbol(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  return driver == nullptr ? nullptr : dlsym(driver, name);
}

inline uint64_t address(const at::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data_ptr());
}

struct Call {
  std::vector<at::Tensor> slots;
  void* stream;
};

struct Pointer {
  size_t parameter;
  size_t slot;
  uint64_t offset;  // bytes
};

struct Kernel {
  Launch launch;
  void* function;
  std::array<unsigned, 3> grid;
  unsigned threads;
  unsigned shared;                  // bytes
  std::vector<uint64_t> constants;  // One word for each parameter.
  std::vector<Pointer> pointers;

  void operator()(Call& call) const {
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
    // On the stack: other threads may be in the middle of the same step.
    std::array<uint64_t, kMostParameters> words;
    std::array<void*, kMostParameters> parameters;
    for (size_t i = 0; i < constants.size(); ++i) {
      words[i] = constants[i];
      parameters[i] = &words[i];
    }
    for (const auto& pointer : pointers)
      words[pointer.parameter] = address(call.slots[pointer.slot]) + pointer.offset;
    int status = launch(function, grid[0], grid[1], grid[2], threads, 1, 1, shared,
                        call.stream, parameters.data(), nullptr);
    TORCH_CHECK(status == 0, "CUDA refused to launch a kernel (status ", status, ")");
  }
};

class Steps {
 public:
  // `launch` replaces the driver's function, for tests; 0 for the driver's.
  explicit Steps(size_t inputs, uintptr_t launch) : inputs_(inputs), size_(inputs) {
    launch_ = reinterpret_cast<Launch>(launch);
    if (launch_ == nullptr) launch_ = reinterpret_cast<Launch>(symbol("cuLaunchKernel"));
  }

  size_t empty(size_t like, std::optional<std::vector<int64_t>> shape,
               std::optional<at::ScalarType> dtype) {
    return add([=](Call& call, size_t out) {
      const auto& given = call.slots[like];
      auto options = dtype ? given.options().dtype(*dtype) : given.options();
      call.slots[out] = shape ? at::empty(*shape, options) : at::empty_like(given, options);
    });
  }

  size_t linear(size_t x, size_t weight, std::optional<size_t> bias) {
    return add([=](Call& call, size_t out) {
      std::optional<at::Tensor> added;
      if (bias) added = call.slots[*bias];
      call.slots[out] = at::linear(call.slots[x], call.slots[weight], added);
    });
  }

  size_t mm(size_t a, size_t b) {
    return add([=](Call& call, size_t out) {
      call.slots[out] = at::mm(call.slots[a], call.slots[b]);
    });
  }

  size_t addmm_(size_t self, size_t a, size_t b) {
    return add([=](Call& call, size_t out) {
      call.slots[out] = call.slots[self].addmm_(call.slots[a], call.slots[b]);
    });
  }

  size_t turned(size_t x) {
    return add([=](Call& call, size_t out) { call.slots[out] = call.slots[x].t(); });
  }

  size_t sum_rows(size_t x) {
    return add([=](Call& call, size_t out) { call.slots[out] = call.slots[x].sum(0); });
  }

  size_t part(size_t x, int64_t index, std::vector<int64_t> shape) {
    return add([=](Call& call, size_t out) {
      call.slots[out] = call.slots[x].select(0, index).view(shape);
    });
  }

  size_t column(size_t x, int64_t index) {
    return add([=](Call& call, size_t out) {
      call.slots[out] = call.slots[x].select(1, index);
    });
  }

  size_t cast(size_t x, at::ScalarType dtype) {
    return add([=](Call& call, size_t out) { call.slots[out] = call.slots[x].to(dtype); });
  }

  size_t plus(size_t a, size_t b) {
    return add([=](Call& call, size_t out) {
      call.slots[out] = call.slots[a] + call.slots[b];
    });
  }

  // Frees what nothing needs any longer, where Python would.
  void release(size_t slot) {
    if (slot >= inputs_) free(slot);
  }

  // Frees an input, too.
  void free(size_t slot) {
    if (finished_) return;
    steps_.push_back([=](Call& call) { call.slots[slot] = at::Tensor(); });
  }

  // Why a kernel cannot be launched here, or nothing once it is among the steps.
  std::optional<std::string> kernel(
      uintptr_t function, std::array<unsigned, 3> grid, unsigned threads, unsigned shared,
      std::vector<uint64_t> constants, std::vector<size_t> sizes,
      std::vector<std::array<uint64_t, 3>> pointers, bool described) {
    if (launch_ == nullptr) return "the CUDA driver is not there";
    if (constants.size() > kMostParameters) return "a kernel has too many parameters";
    auto* found = reinterpret_cast<void*>(function);
    if (described && !knows(found, sizes)) return "Triton passes parameters another way";
    Kernel made{launch_, found, grid, threads, shared, std::move(constants), {}};
    for (const auto& [parameter, slot, offset] : pointers) {
      made.pointers.push_back({parameter, slot, offset});
      if (slot < inputs_) aligned_.push_back(slot);
    }
    steps_.push_back(std::move(made));
    return std::nullopt;
  }

  // Slots that a call gives back, None where there is none, and which inputs it needs.
  void finish(std::vector<std::optional<size_t>> results, std::vector<bool> needed) {
    results_ = std::move(results);
    needed_ = std::move(needed);
    finished_ = true;
  }

  // Whether the inputs are as at recording: the same ones are there, and those that
  // kernels read are aligned as they expect.
  bool fits(const std::vector<at::Tensor>& inputs) const {
    TORCH_CHECK(inputs.size() == inputs_, "expected ", inputs_, " tensors");
    for (size_t i = 0; i < inputs_; ++i)
      if (inputs[i].defined() != needed_[i]) return false;
    for (size_t slot : aligned_)
      if (address(inputs[slot]) % kAlignment) return false;
    return true;
  }

  // The results of inputs that fit. What nobody else holds of them is freed on the way.
  std::vector<at::Tensor> run(void* stream, std::vector<at::Tensor> inputs) const {
    Call call{std::move(inputs), stream};
    call.slots.resize(size_);
    for (const auto& step : steps_) step(call);
    std::vector<at::Tensor> found(results_.size());
    for (size_t i = 0; i < results_.size(); ++i)
      if (results_[i]) found[i] = call.slots[*results_[i]];
    return found;
  }

 private:
  template <typename Make>
  size_t add(Make make) {
    size_t out = size_++;
    steps_.push_back([make, out](Call& call) { make(call, out); });
    return out;
  }

  // Whether the driver knows the kernel's parameters by these sizes in bytes.
  static bool knows(void* function, const std::vector<size_t>& sizes) {
    static auto describe = reinterpret_cast<Describe>(symbol("cuFuncGetParamInfo"));
    if (describe == nullptr) return false;
    size_t offset = 0, size = 0;
    for (size_t i = 0; i < sizes.size(); ++i)
      if (describe(function, i, &offset, &size) != 0 || size != sizes[i]) return false;
    return describe(function, sizes.size(), &offset, &size) == kInvalidValue;
  }

  size_t inputs_, size_;
  bool finished_ = false;
  Launch launch_;
  std::vector<std::function<void(Call&)>> steps_;
  std::vector<size_t> aligned_;
  std::vector<std::optional<size_t>> results_;
  std::vector<bool> needed_;
};

}  // namespace pyg_tiga
