// What a layer does at every call, step by step, without an interpreter between the
// steps: allocations, dense products by PyTorch, and launches of compiled kernels.

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

constexpr size_t kMostParameters = 128;
constexpr uint64_t kAlignment = 16;  // Bytes; compiled kernels rely on it.
constexpr int kInvalidValue = 1;     // Of the driver's status codes.

// cuLaunchKernel and cuFuncGetParamInfo of the CUDA driver.
using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, unsigned, void*, void**, void**);
using Describe = int (*)(void*, size_t, size_t*, size_t*);

void* symbol(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  return driver == nullptr ? nullptr : dlsym(driver, name);
}

uint64_t address(const at::Tensor& tensor) {
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

  size_t cast(size_t x, at::ScalarType dtype) {
    return add([=](Call& call, size_t out) { call.slots[out] = call.slots[x].to(dtype); });
  }

  // Frees what nothing needs any longer, where Python would.
  void release(size_t slot) {
    if (finished_ || slot < inputs_) return;
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
    if (described && !fits(found, sizes)) return "Triton passes parameters another way";
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

  // Nothing where other inputs are there than at recording, or where one lies in memory
  // as the kernels do not expect.
  py::object run(uintptr_t stream, const py::args& inputs) const {
    HANDLE_TH_ERRORS
    Call call{std::vector<at::Tensor>(size_), reinterpret_cast<void*>(stream)};
    TORCH_CHECK(inputs.size() == inputs_, "expected ", inputs_, " tensors");
    for (size_t i = 0; i < inputs_; ++i) {
      PyObject* given = PyTuple_GET_ITEM(inputs.ptr(), i);
      if ((given != Py_None) != needed_[i]) return py::none();
      if (needed_[i]) call.slots[i] = THPVariable_Unpack(given);
    }
    for (size_t slot : aligned_)
      if (address(call.slots[slot]) % kAlignment) return py::none();
    {
      py::gil_scoped_release others;
      for (const auto& step : steps_) step(call);
    }
    py::tuple found(results_.size());
    for (size_t i = 0; i < results_.size(); ++i)
      found[i] = results_[i] ? py::cast(call.slots[*results_[i]]) : py::none();
    return found;
    END_HANDLE_TH_ERRORS_PYBIND
  }

 private:
  template <typename Make>
  size_t add(Make make) {
    size_t out = size_++;
    steps_.push_back([make, out](Call& call) { make(call, out); });
    return out;
  }

  // Whether the driver knows the kernel's parameters by these sizes in bytes.
  static bool fits(void* function, const std::vector<size_t>& sizes) {
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

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Steps>(module, "Steps")
      .def(py::init<size_t, uintptr_t>(), py::arg("inputs"), py::arg("launch") = 0)
      .def("empty", &Steps::empty)
      .def("linear", &Steps::linear)
      .def("mm", &Steps::mm)
      .def("addmm_", &Steps::addmm_)
      .def("turned", &Steps::turned)
      .def("sum_rows", &Steps::sum_rows)
      .def("part", &Steps::part)
      .def("cast", &Steps::cast)
      .def("release", &Steps::release)
      .def("kernel", &Steps::kernel)
      .def("finish", &Steps::finish)
      .def("run", &Steps::run);
}
