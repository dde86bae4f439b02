// CUDA source from the TVM 0.19.0 of PyPI, whose library holds the code generator, but neither the headers that
// compiling it needs nor a function that calls it.
//
// So its class is declared here by hand: the symbols are those of libtvm.so, and the object gets more room than it
// needs. That holds for one version of TVM, to which `cuda_compiler.py` pins it; a kernel is generated as a check.
// What a build needs besides (types and launch parameters of the kernels) Python reads, and hands over as JSON.
#include <dmlc/json.h>
#include <tvm/runtime/container/array.h>
#include <tvm/runtime/module.h>
#include <tvm/runtime/registry.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>

#include "runtime/meta_data.h"

namespace tvm {

class GlobalVar : public runtime::ObjectRef {
 public:
  explicit GlobalVar(runtime::ObjectRef given) : ObjectRef(given) {}
};

namespace tir {
class PrimFunc : public runtime::ObjectRef {
 public:
  explicit PrimFunc(runtime::ObjectRef given) : ObjectRef(given) {}
};
}  // namespace tir

namespace codegen {

class __attribute__((visibility("default"))) CodeGenC {
 public:
  void DeclareFunction(const GlobalVar& name, const tir::PrimFunc& function);
  void AddFunction(const GlobalVar& name, const tir::PrimFunc& function);
};

class __attribute__((visibility("default"))) CodeGenCUDA {
 public:
  CodeGenCUDA();
  ~CodeGenCUDA();
  void Init(bool ssa);
  std::string Finish();
  CodeGenC* base() { return reinterpret_cast<CodeGenC*>(this); }

 private:
  alignas(64) char room_[1 << 16];
};

__attribute__((visibility("default"))) runtime::Module DeviceSourceModuleCreate(
    std::string data, std::string format, std::unordered_map<std::string, runtime::FunctionInfo> functions,
    std::string type_key, std::function<std::string(const std::string&)> source_of);

using runtime::Array;
using runtime::ObjectRef;
using runtime::String;

TVM_REGISTER_GLOBAL("tvm_pipeline.cuda.source").set_body_typed([](Array<ObjectRef> names, Array<ObjectRef> functions) {
  auto generator = std::make_unique<CodeGenCUDA>();
  generator->Init(false);
  for (size_t i = 0; i < names.size(); ++i) {
    generator->base()->DeclareFunction(GlobalVar(names[i]), tir::PrimFunc(functions[i]));
  }
  for (size_t i = 0; i < names.size(); ++i) {
    generator->base()->AddFunction(GlobalVar(names[i]), tir::PrimFunc(functions[i]));
  }
  return String(generator->Finish());
});

// A module of compiled kernels that can be saved, whatever runs here; loading it makes one that runs.
TVM_REGISTER_GLOBAL("tvm_pipeline.cuda.module")
    .set_body([](runtime::TVMArgs args, runtime::TVMRetValue* rv) {
      std::string format = args[0], data = args[1], described = args[2], source = args[3];
      std::istringstream stream(described);
      dmlc::JSONReader reader(&stream);
      std::unordered_map<std::string, runtime::FunctionInfo> functions;
      reader.Read(&functions);
      auto get = [=](const std::string& asked) { return asked == format ? data : source; };
      *rv = DeviceSourceModuleCreate(data, format, functions, "cuda", get);
    });

}  // namespace codegen
}  // namespace tvm
