// What libcudart.so.13 has besides, of all that TVM's CUDA runtime for CUDA 13 calls. Its `cudaGetDeviceProperties` is
// another function than that of before, with another structure.
#include "device.h"

using namespace software_cuda;

API const char* cudaGetErrorName(CUresult error) { return name_of(error); }

extern "C" CUresult cudaStreamCreateWithFlags(CUstream* stream, unsigned flags);
API CUresult cudaStreamCreate(CUstream* stream) { return cudaStreamCreateWithFlags(stream, 0); }

API CUresult cudaGetDeviceProperties() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cudaGraphDestroy() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cudaGraphExecDestroy() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cudaGraphInstantiate() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cudaGraphLaunch() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cudaStreamBeginCapture() { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cudaStreamEndCapture() { return CUDA_ERROR_NOT_SUPPORTED; }
