// What Python sees of the compiled host code.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "node.h"
#include "steps.h"

namespace pyg_tiga {

// Results of inputs that fit, else None.
py::object run(const Steps& steps, uintptr_t stream, const py::args& given) {
  HANDLE_TH_ERRORS
  auto inputs = unpacked(given);
  if (!steps.fits(inputs)) return py::none();
  std::vector<at::Tensor> found;
  {
    py::gil_scoped_release others;
    found = steps.run(reinterpret_cast<void*>(stream), std::move(inputs));
  }
  py::tuple results(found.size());
  for (size_t i = 0; i < found.size(); ++i) results[i] = packed(found[i]);
  return results;
  END_HANDLE_TH_ERRORS_PYBIND
}

std::shared_ptr<Formula> make_formula(std::shared_ptr<Steps> forward, Reads reads,
                                      py::object otherwise, std::string name) {
  auto made = std::make_shared<Formula>();
  made->forward = std::move(forward);
  made->reads = std::move(reads);
  made->otherwise = hold(std::move(otherwise));
  made->name = std::move(name);
  return made;
}

}  // namespace pyg_tiga

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using pyg_tiga::Formula;
  using pyg_tiga::Steps;
  namespace py = pybind11;
  py::class_<Steps, std::shared_ptr<Steps>>(module, "Steps")
      // `launch` replaces the driver's function, for tests.
      .def(py::init<size_t, uintptr_t>(), py::arg("inputs"), py::arg("launch") = 0)
      .def("empty", &Steps::empty)
      .def("linear", &Steps::linear)
      .def("mm", &Steps::mm)
      .def("addmm_", &Steps::addmm_)
      .def("turned", &Steps::turned)
      .def("sum_rows", &Steps::sum_rows)
      .def("part", &Steps::part)
      .def("column", &Steps::column)
      .def("cast", &Steps::cast)
      .def("plus", &Steps::plus)
      .def("release", &Steps::release)
      .def("free", &Steps::free)
      .def("kernel", &Steps::kernel)
      .def("finish", &Steps::finish)
      .def("run", &pyg_tiga::run);
  py::class_<Formula, std::shared_ptr<Formula>>(module, "Formula")
      .def(py::init(&pyg_tiga::make_formula))
      .def("__call__", &pyg_tiga::call);
}
