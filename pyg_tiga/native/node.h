// A layer that runs in recorded steps as one node of autograd's graph: neither its
// forward nor its backward enters the interpreter.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "steps.h"

namespace pyg_tiga {

namespace py = pybind11;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// PyTorch changed how nodes are counted; an edge says how it does.
using NodePtr = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;
constexpr bool kShared = std::is_same_v<NodePtr, std::shared_ptr<Node>>;

// A Python object that any thread may let go of.
using Held = std::shared_ptr<PyObject>;

inline Held hold(py::object object) {
  return Held(object.release().ptr(), [](PyObject* held) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(held);
  });
}

inline std::vector<at::Tensor> unpacked(const py::args& given) {
  std::vector<at::Tensor> found(given.size());
  for (size_t i = 0; i < found.size(); ++i) {
    PyObject* one = PyTuple_GET_ITEM(given.ptr(), i);
    if (one != Py_None) found[i] = THPVariable_Unpack(one);
  }
  return found;
}

inline py::object packed(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

// What a tensor is besides what every one is: a plain one is its backend's alone.
inline c10::DispatchKeySet kind(const at::Tensor& tensor) {
  return tensor.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
         c10::autocast_dispatch_keyset;
}

// Whether kernels may read all of them as they lie in memory.
inline bool are_plain(const std::vector<at::Tensor>& tensors) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  const auto wanted = kind(tensors[0]);
  for (const auto& tensor : tensors)
    if (tensor.defined() && kind(tensor) != wanted) return false;
  return wanted == c10::DispatchKeySet(c10::DispatchKey::CUDA) ||
         wanted == c10::DispatchKeySet(c10::DispatchKey::CPU);
}

inline bool have_tangents(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors)
    if (torch::autograd::isFwGradDefined(tensor)) return true;
  return false;
}

// What steps of a backward are recorded for: a stream that waited for the graph, the
// gradient's strides, the gradients that are wanted, and what is kept.
using Key = std::tuple<c10::StreamId, std::vector<int64_t>, std::vector<bool>,
                       std::vector<bool>>;

// What gradients of an input read, as places among the inputs and all results but the
// first.
using Reads = std::vector<std::vector<size_t>>;

// A formula: its forward's steps, and for each kind of call its backward's.
//
// The forward's first result is given back. Of the others and the inputs, of which the
// first have gradients that `reads` tells of, those are kept for the backward that wanted
// gradients read. The backward's steps take the gradient, the inputs and the results;
// what is not kept is not there, but where gradients are to be differentiated again, or
// carry a tangent, an anchor stands for such an input if it has a gradient itself. Calls
// for which there are none are `otherwise(owner, tensors, grad, needs, edited, usual)`: it
// gives the gradients, and steps for the next such call or None. `edited` says that the
// result was kept and is not as it was, `usual` that steps may be of use.
struct Formula {
  std::shared_ptr<Steps> forward;
  Reads reads;
  Held otherwise;
  std::string name;

  std::shared_ptr<Steps> find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = backwards_.find(key);
    return found == backwards_.end() ? nullptr : found->second;
  }

  void add(const Key& key, std::shared_ptr<Steps> steps) {
    std::lock_guard<std::mutex> lock(mutex_);
    backwards_[key] = std::move(steps);
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Steps>> backwards_;
};

class FormulaBackward : public Node {
 public:
  FormulaBackward(std::shared_ptr<Formula> formula, Held owner, c10::Stream stream,
                  void* raw)
      : formula_(std::move(formula)), owner_(std::move(owner)), at_(stream), raw_(raw) {}

  std::string name() const override { return formula_->name; }

  // Keeps what wanted gradients read of the inputs and of all results but the first.
  void keep(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results) {
    const auto& reads = formula_->reads;
    std::vector<bool> is_read(inputs.size() + results.size() - 1);
    for (size_t i = 0; i < reads.size(); ++i)
      if (inputs[i].defined() && inputs[i].requires_grad())
        for (size_t place : reads[i]) is_read.at(place) = true;
    saved_.reserve(is_read.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& input = inputs[i];
      saved_.emplace_back(is_read[i] ? input : at::Tensor(), false);
      if (!is_read[i] && i < reads.size() && input.defined() && input.requires_grad())
        apart_.emplace_back(i, input.sizes().vec(), input.options());
    }
    for (size_t i = 1; i < results.size(); ++i) {
      const auto& result = results[i];
      if (!is_read[inputs.size() + i - 1]) {
        saved_.emplace_back();
        continue;
      }
      if (!result.is_same(results[0])) {
        saved_.emplace_back(result, false);
        continue;
      }
      // Edits of what is given back are no error, they are looked for: an alias does
      // not count them.
      saved_.emplace_back(result.variable_data(), false);
      given_.emplace(torch::autograd::impl::version_counter(result));
      version_ = given_->current_version();
    }
  }

  variable_list apply(variable_list&& grads) override {
    at::Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return variable_list(num_outputs());
    std::vector<at::Tensor> tensors{grad};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& saved : saved_) tensors.push_back(saved.unpack());
      // What nobody else needs is freed on the way.
      if (is_last_) reset();
    }
    std::vector<bool> needs(num_outputs());
    for (size_t i = 0; i < needs.size(); ++i) needs[i] = task_should_compute_output(i);
    const bool edited = given_ && given_->current_version() != version_;
    const c10::impl::VirtualGuardImpl guard(grad.device().type());
    const auto stream = guard.getStream(grad.device());
    // Either way the gradients have to be differentiable.
    const bool again = at::GradMode::is_enabled() || torch::autograd::isFwGradDefined(grad);
    const bool usual = !edited && !again && grad.dim() >= 2 && grad.stride(-1) == 1 &&
                       stream == at_ && are_plain(tensors);
    std::vector<bool> there;
    for (const auto& tensor : tensors) there.push_back(tensor.defined());
    const Key key{stream.id(), grad.strides().vec(), needs, there};
    grad.reset();
    if (usual) {
      const auto steps = formula_->find(key);
      if (steps && steps->fits(tensors)) {
        const c10::DeviceGuard device(tensors[0].device());
        return steps->run(raw_, std::move(tensors));
      }
    }
    if (again) anchor(tensors);
    return otherwise(std::move(tensors), key, edited, usual);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd cannot read ", name(), ", which is compiled already: ",
        "compile the model with torch.compile instead");
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    reset();
  }

  void will_release_variables() override { is_last_ = true; }

 private:
  void reset() {
    for (auto& saved : saved_) saved.reset_data();
  }

  // Puts in place of inputs that are not kept what has their gradients and no data.
  void anchor(std::vector<at::Tensor>& tensors) {
    const at::NoGradGuard no_grad;
    for (const auto& [place, shape, options] : apart_) {
      auto standing = at::zeros({}, options).expand(shape).detach();
      torch::autograd::impl::set_gradient_edge(standing, next_edge(place));
      tensors[place + 1] = standing;
    }
  }

  variable_list otherwise(std::vector<at::Tensor> tensors, const Key& key, bool edited,
                          bool usual) {
    py::gil_scoped_acquire gil;
    try {
      auto grad = packed(tensors[0]);
      py::list rest;
      for (size_t i = 1; i < tensors.size(); ++i) rest.append(packed(tensors[i]));
      tensors.clear();
      const auto& needs = std::get<2>(key);
      auto call = py::reinterpret_borrow<py::object>(formula_->otherwise.get());
      auto owner = py::reinterpret_borrow<py::object>(owner_.get());
      auto answer = call(owner, std::move(rest), std::move(grad), needs, edited, usual)
                        .cast<std::pair<py::tuple, py::object>>();
      if (usual && !answer.second.is_none())
        formula_->add(key, answer.second.cast<std::shared_ptr<Steps>>());
      variable_list found(needs.size());
      for (size_t i = 0; i < found.size(); ++i)
        if (!answer.first[i].is_none()) found[i] = answer.first[i].cast<at::Tensor>();
      return found;
    } catch (py::error_already_set& error) {
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }

  std::shared_ptr<Formula> formula_;
  Held owner_;
  c10::Stream at_;
  void* raw_;
  std::vector<SavedVariable> saved_;
  std::vector<std::tuple<size_t, std::vector<int64_t>, at::TensorOptions>> apart_;
  std::optional<c10::VariableVersion> given_;
  uint32_t version_ = 0;
  bool is_last_ = false;
};

template <typename Made>
auto counted(Made* made) {
  if constexpr (kShared) {
    return std::shared_ptr<Made>(made, [](auto* node) { deleteNode(node); });
  } else {
    return c10::intrusive_ptr<Made>::unsafe_steal_from_new(made);
  }
}

// The formula's result, with its node if one is wanted; None where the inputs are not as its steps expect.
inline py::object call(const std::shared_ptr<Formula>& formula, uintptr_t raw,
                       py::object owner, const py::args& given) {
  HANDLE_TH_ERRORS
  auto inputs = unpacked(given);
  if (!are_plain(inputs) || have_tangents(inputs) || !formula->forward->fits(inputs))
    return py::none();
  auto* address = reinterpret_cast<void*>(raw);
  std::vector<at::Tensor> results;
  {
    py::gil_scoped_release others;
    const at::NoGradGuard no_grad;
    results = formula->forward->run(address, inputs);
  }
  variable_list wanted(inputs.begin(), inputs.begin() + formula->reads.size());
  if (!torch::autograd::compute_requires_grad(wanted)) return packed(results[0]);
  const auto device = inputs[0].device();
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto node = counted(new FormulaBackward(formula, hold(std::move(owner)), stream, address));
  node->set_next_edges(torch::autograd::collect_next_edges(wanted));
  node->keep(inputs, results);
  torch::autograd::set_history(results[0], node);
  return packed(results[0]);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace pyg_tiga
