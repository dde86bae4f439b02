// libcudart.so.12 of the software device: CUDA's runtime API, as far as TVM's CUDA runtime calls it. See cuda.cc.
#include <time.h>

#include <cstdio>

#include "cuda_runtime.h"
#include "device.h"

using namespace software_cuda;

struct CUevent_st {
  timespec at;
};
struct CUstream_st {
  int device;
};

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local unsigned device_flags = 0;

cudaError_t ended(CUresult result) {
  if (result != CUDA_SUCCESS) last_error = static_cast<cudaError_t>(result);
  return static_cast<cudaError_t>(result);
}

// The runtime initialises the driver by itself.
CUresult begin() {
  if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  initialize();
  return CUDA_SUCCESS;
}

// And takes the first device where a thread has chosen none.
CUresult begin_on_device() {
  if (const CUresult error = begin()) return error;
  if (current_device() < 0) set_current_device(0);
  return device_error();
}

}  // namespace

API const char* cudaGetErrorString(cudaError_t error) {
  const char* text = describe(static_cast<CUresult>(error));
  return text ? text : "unrecognized error code";
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  const bool lost = current_device() >= 0 && device_error() == static_cast<CUresult>(error);
  if (!lost) last_error = cudaSuccess;
  return error;
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return ended(begin());
}

API cudaError_t cudaGetDevice(int* device) {
  *device = current_device() < 0 ? 0 : current_device();
  return ended(begin());
}

API cudaError_t cudaSetDevice(int device) {
  if (const CUresult error = begin()) return ended(error);
  if (device < 0 || device >= device_count()) return ended(CUDA_ERROR_INVALID_DEVICE);
  set_current_device(device);
  return ended(device_error());
}

API cudaError_t cudaSetDeviceFlags(unsigned flags) {
  device_flags = flags;
  return ended(begin());
}

API cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = device_flags;
  return ended(begin());
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const CUresult error = begin()) return ended(error);
  return ended(attribute_of(device, attribute, value));
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const CUresult error = begin()) return ended(error);
  if (device < 0 || device >= device_count()) return ended(CUDA_ERROR_INVALID_DEVICE);
  // Not the fields behind these: their places, and the size of the whole, differ from version to version.
  snprintf(properties->name, sizeof properties->name, "software CUDA");
  properties->totalGlobalMem = memory_bytes();
  properties->sharedMemPerBlock = 49152;
  properties->regsPerBlock = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() { return ended(begin_on_device()); }

API cudaError_t cudaMalloc(void** at, size_t size) {
  const CUresult error = begin_on_device();
  return ended(error ? error : allocate(at, size));
}

API cudaError_t cudaFree(void* at) {
  const CUresult error = begin_on_device();
  return ended(error ? error : release(at));
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const CUresult error = begin_on_device();
  *total = memory_bytes();
  return ended(error ? error : free_bytes(free));
}

API cudaError_t cudaHostAlloc(void** at, size_t size, unsigned) {
  const CUresult error = begin_on_device();
  return ended(error ? error : allocate_on_host(at, size));
}

API cudaError_t cudaMallocHost(void** at, size_t size) { return cudaHostAlloc(at, size, 0); }

API cudaError_t cudaFreeHost(void* at) {
  const CUresult error = begin_on_device();
  return ended(error ? error : release_on_host(at));
}

API cudaError_t cudaHostRegister(void* at, size_t size, unsigned) {
  const CUresult error = begin_on_device();
  return ended(error ? error : register_on_host(at, size));
}

API cudaError_t cudaHostUnregister(void* at) {
  const CUresult error = begin_on_device();
  return ended(error ? error : unregister_on_host(at));
}

API cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned) {
  if (const CUresult error = begin_on_device()) return ended(error);
  *on_device = on_host;
  return ended(is_on_device(on_host) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  const CUresult error = begin_on_device();
  return ended(error ? error : copy(to, from, size, kind));
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, size, kind);
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
  return cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice);
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (const CUresult error = begin_on_device()) return ended(error);
  *stream = new CUstream_st{current_device()};
  return cudaSuccess;
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return ended(begin_on_device());
}

API cudaError_t cudaStreamSynchronize(cudaStream_t) { return ended(begin_on_device()); }

API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return ended(begin_on_device()); }

API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  if (const CUresult error = begin_on_device()) return ended(error);
  *event = new CUevent_st{};
  return cudaSuccess;
}

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return ended(begin_on_device());
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  clock_gettime(CLOCK_MONOTONIC, &event->at);
  return ended(begin_on_device());
}

API cudaError_t cudaEventSynchronize(cudaEvent_t) { return ended(begin_on_device()); }

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = (end->at.tv_sec - start->at.tv_sec) * 1e3f + (end->at.tv_nsec - start->at.tv_nsec) * 1e-6f;
  return ended(begin_on_device());
}
