// What libcuda.so.1 has besides, of all that TVM's CUDA runtime for CUDA 13 calls: launches with attributes.
#include "device.h"

using namespace software_cuda;

// NVIDIA documents the fields, which have been the same since CUDA 12.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  void* attributes;
  unsigned attribute_count;
};

// Attributes change how thread blocks are placed and ordered. TVM gives some to kernels that ask for them, and none of
// those that this project compiles does.
API CUresult cuLaunchKernelEx(const LaunchConfig* how, CUfunction function, void** parameters, void**) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (how->attribute_count) return CUDA_ERROR_NOT_SUPPORTED;
  return launch(reinterpret_cast<Kernel*>(function), how->grid, how->block, parameters);
}

API CUresult cuTensorMapEncodeTiled() { return CUDA_ERROR_NOT_SUPPORTED; }
