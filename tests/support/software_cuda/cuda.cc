// libcuda.so.1 of the software device: CUDA's driver API, as far as TVM's CUDA runtime and detection call it.
//
// Nothing in the product knows this device: it is found, compiled for and run by the same calls as a real one.
//
// Modelled:
// - Kernels, from the CUDA source that TVM writes: g++ compiles it, the threads of a block are fibers where they wait
//   for each other and a loop where they do not, blocks run one after the other. "PTX" is the source itself below a
//   line that names the architecture, and so is a "cubin"; the device is one of compute capability 7.2
//   (SOFTWARE_CUDA_CAPABILITY=72), and refuses code for a later one and a cubin for another generation. A driver that
//   is older than nvrtc (SOFTWARE_CUDA_DRIVER_VERSION) says so, and takes PTX all the same.
// - Several devices (SOFTWARE_CUDA_DEVICES), each with memory of its own (SOFTWARE_CUDA_MEMORY_BYTES). New memory is
//   full of 0xff bytes. A copy beyond an allocation, a kernel with a host's pointer, a write behind the end of an
//   allocation and a second cudaFree are refused and reported on standard error.
// - Memory of the host that is registered, by the byte: kernels find it at the same address, if it was registered as
//   mapped (NVIDIA's devices with unified addresses map all of it; those without do not). A copy of a range of which
//   only a part is registered is refused. Two registered ranges may lie in one page, which no document promises.
// - A context for each thread: a thread that never called cudaSetDevice or cuCtxSetCurrent cannot launch.
// - Errors that lose a device: after a kernel has failed, everything that reaches the device returns the same error,
//   cudaFree, too. On a real one this lasts until the process ends, here until a test calls software_cuda_reset.
// - Faults on request: software_cuda_fault, or SOFTWARE_CUDA_FAULT=what:n in a process of its own.
//
// Not modelled:
// - Time. Speed means nothing, and all is done when a call returns: a stream is a handle without a queue, and an event
//   has happened when cudaEventRecord returns, at the time of the host's clock; both belong to one device. A kernel's
//   error is returned by its launch and not by a later call.
// - Races: threads run in order, and change only where they wait. Limits of registers and shared memory. Dynamic shared
//   memory, tensor cores, inline PTX, textures, device globals, and what else TVM's schedules for networks do not use.
// - Options of nvrtc but the architecture; kernels always find the device's own headers.
#include <cstdint>
#include <cstdio>

#include "device.h"

using namespace software_cuda;

namespace {

constexpr CUresult kWithoutInit = CUDA_ERROR_NOT_INITIALIZED;

bool is_device(int device) { return device >= 0 && device < device_count(); }

// A context is the number of its device, plus one: null is no context.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1); }
int device_of(CUcontext context) { return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1; }

}  // namespace

API CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  initialize();
  return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int* version) {
  *version = driver_version();
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = name_of(error);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = describe(error);
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuDeviceGetCount(int* count) {
  if (!is_initialized()) return kWithoutInit;
  *count = device_count();
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!is_initialized()) return kWithoutInit;
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  if (!is_initialized()) return kWithoutInit;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, size, "software CUDA");
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return is_initialized() ? attribute_of(device, attribute, value) : kWithoutInit;
}

API CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  if (!is_initialized()) return kWithoutInit;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = memory_bytes();
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!is_initialized()) return kWithoutInit;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = context_of(device);
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// How threads wait does not matter where all is done when a call returns.
API CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned) {
  if (!is_initialized()) return kWithoutInit;
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  if (!is_initialized()) return kWithoutInit;
  set_current_device(device_of(context));
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
  if (!is_initialized()) return kWithoutInit;
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize() { return device_error(); }

API CUresult cuMemAlloc(CUdeviceptr* at, size_t size) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  return allocate(reinterpret_cast<void**>(at), size);
}

API CUresult cuMemFree(CUdeviceptr at) { return release(reinterpret_cast<void*>(at)); }

API CUresult cuMemGetInfo(size_t* free, size_t* total) {
  *total = memory_bytes();
  return free_bytes(free);
}

API CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  return copy(reinterpret_cast<void*>(to), from, size, 1);
}

API CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  return copy(to, reinterpret_cast<const void*>(from), size, 2);
}

// Only for the state of barriers across blocks, which no module here has.
API CUresult cuMemsetD32(CUdeviceptr, unsigned, size_t) { return CUDA_ERROR_INVALID_VALUE; }
API CUresult cuModuleGetGlobal(CUdeviceptr*, size_t*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return load(static_cast<const char*>(image), reinterpret_cast<Module**>(module));
}

API CUresult cuModuleUnload(CUmodule module) {
  if (const CUresult error = device_error()) return error;
  unload(reinterpret_cast<Module*>(module));
  return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if (const CUresult error = device_error()) return error;
  *function = reinterpret_cast<CUfunction>(kernel_of(reinterpret_cast<Module*>(module), name));
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return device_error(); }

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned, CUstream, void** parameters, void**) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  return launch(reinterpret_cast<Kernel*>(function), {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, parameters);
}
