// libnvrtc.so.12 of the software device: CUDA's runtime compiler. Its "PTX" and its "cubin" are the source, below a
// line that names the architecture. It compiles nonetheless, so that errors show where a real one shows them, and what
// is loaded later is compiled already. See cuda.cc.
#include "nvrtc.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device.h"

struct _nvrtcProgram {
  std::string source, log, ptx, cubin;
};

namespace {

// Those of CUDA 12.9.
constexpr int kArchitectures[] = {50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121};

// Returns whether this is "compute_72" or "sm_72", with a number that the compiler knows.
bool is_known(const std::string& architecture) {
  const auto number = architecture.find('_');
  const std::string kind = architecture.substr(0, number);
  if (number == std::string::npos || (kind != "compute" && kind != "sm")) return false;
  const int wanted = atoi(architecture.c_str() + number + 1);
  return std::find(std::begin(kArchitectures), std::end(kArchitectures), wanted) != std::end(kArchitectures);
}

nvrtcResult size_of(const std::string& text, size_t* size) {
  *size = text.size() + 1;
  return NVRTC_SUCCESS;
}

nvrtcResult give(const std::string& text, char* to) {
  memcpy(to, text.c_str(), text.size() + 1);
  return NVRTC_SUCCESS;
}

}  // namespace

API const char* nvrtcGetErrorString(nvrtcResult result) {
  switch (result) {
    case NVRTC_SUCCESS:
      return "NVRTC_SUCCESS";
    case NVRTC_ERROR_INVALID_INPUT:
      return "NVRTC_ERROR_INVALID_INPUT";
    case NVRTC_ERROR_INVALID_PROGRAM:
      return "NVRTC_ERROR_INVALID_PROGRAM";
    case NVRTC_ERROR_INVALID_OPTION:
      return "NVRTC_ERROR_INVALID_OPTION";
    case NVRTC_ERROR_COMPILATION:
      return "NVRTC_ERROR_COMPILATION";
  }
  return "NVRTC_ERROR unknown";
}

API nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = CUDA_VERSION / 1000;
  *minor = CUDA_VERSION % 1000 / 10;
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = std::size(kArchitectures);
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetSupportedArchs(int* architectures) {
  std::copy(std::begin(kArchitectures), std::end(kArchitectures), architectures);
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char*, int, const char* const*,
                                   const char* const*) {
  if (!source) return NVRTC_ERROR_INVALID_INPUT;
  *program = new _nvrtcProgram{source, "", "", ""};
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int option_count, const char* const* options) {
  if (!program) return NVRTC_ERROR_INVALID_PROGRAM;
  std::string architecture = "compute_52";
  for (int i = 0; i < option_count; ++i) {
    const std::string option = options[i];
    for (const std::string name : {"--gpu-architecture=", "-arch="})
      if (option.compare(0, name.size(), name) == 0) architecture = option.substr(name.size());
  }
  if (!is_known(architecture)) {
    program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
    return NVRTC_ERROR_INVALID_OPTION;
  }
  const bool is_virtual = architecture[0] == 'c';
  const std::string number = architecture.substr(architecture.find('_') + 1);
  program->log.clear();
  if (software_cuda::compile(program->source, &program->log).empty()) return NVRTC_ERROR_COMPILATION;
  program->ptx = software_cuda::heading("compute_" + number) + program->source;
  if (!is_virtual) program->cubin = software_cuda::heading("sm_" + number) + program->source;
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* size) { return size_of(program->ptx, size); }
API nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* ptx) { return give(program->ptx, ptx); }

// Code for a virtual architecture has no cubin: its size is 0.
API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* size) {
  *size = program->cubin.size();
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
  memcpy(cubin, program->cubin.data(), program->cubin.size());
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* size) { return size_of(program->log, size); }
API nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) { return give(program->log, log); }

API nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}
