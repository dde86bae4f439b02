// libcudart.so.12 of the software device: CUDA's runtime API, as far as TVM's CUDA runtime calls it. See cuda.cc.
#include <time.h>

#include <cstdio>
#include <mutex>
#include <set>

#include "cuda_runtime.h"
#include "device.h"

using namespace software_cuda;

// All that was given to a stream is done when the call returns, and an event has happened as soon as it is recorded.
struct CUevent_st {
  int device;
  bool has_time;
  bool is_recorded = false;
  timespec at = {};
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

struct Handles {
  std::mutex lock;
  std::set<CUevent> events;
  std::set<CUstream> streams;
  long recorded = 0;
};

Handles& handles() {
  static auto& all = *new Handles;
  return all;
}

// Returns the device of a stream: 0, and 1 and 2 (cudaStreamLegacy, cudaStreamPerThread), are those that each device
// has. -1 where there is no such stream. The caller holds the lock.
int device_of(cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(stream) <= 2) return current_device();
  return handles().streams.count(stream) ? stream->device : -1;
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
  *version = driver_version();
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

API cudaError_t cudaHostRegister(void* at, size_t size, unsigned flags) {
  if (const CUresult error = begin_on_device()) return ended(error);
  if (flags & ~(cudaHostRegisterPortable | cudaHostRegisterMapped)) return ended(CUDA_ERROR_INVALID_VALUE);
  return ended(register_on_host(at, size, flags & cudaHostRegisterMapped));
}

API cudaError_t cudaHostUnregister(void* at) {
  const CUresult error = begin_on_device();
  return ended(error ? error : unregister_on_host(at));
}

API cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned flags) {
  if (const CUresult error = begin_on_device()) return ended(error);
  return ended(flags ? CUDA_ERROR_INVALID_VALUE : address_on_device(on_device, on_host));
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  const CUresult error = begin_on_device();
  return ended(error ? error : copy(to, from, size, kind));
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  if (const CUresult error = begin_on_device()) return ended(error);
  {
    std::lock_guard<std::mutex> guard(handles().lock);
    if (device_of(stream) < 0) return ended(CUDA_ERROR_INVALID_HANDLE);
  }
  return ended(copy(to, from, size, kind));
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (const CUresult error = begin_on_device()) return ended(error);
  if (!stream || flags & ~cudaStreamNonBlocking) return ended(CUDA_ERROR_INVALID_VALUE);
  std::lock_guard<std::mutex> guard(handles().lock);
  handles().streams.insert(*stream = new CUstream_st{current_device()});
  return cudaSuccess;
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(handles().lock);
  if (!handles().streams.erase(stream)) return ended(CUDA_ERROR_INVALID_HANDLE);
  delete stream;
  return ended(begin_on_device());
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const CUresult error = begin_on_device()) return ended(error);
  std::lock_guard<std::mutex> guard(handles().lock);
  return ended(device_of(stream) < 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const CUresult error = begin_on_device()) return ended(error);
  std::lock_guard<std::mutex> guard(handles().lock);
  return ended(device_of(stream) < 0 || !handles().events.count(event) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS);
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const CUresult error = begin_on_device()) return ended(error);
  if (!event || flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) return ended(CUDA_ERROR_INVALID_VALUE);
  std::lock_guard<std::mutex> guard(handles().lock);
  handles().events.insert(*event = new CUevent_st{current_device(), !(flags & cudaEventDisableTiming)});
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::lock_guard<std::mutex> guard(handles().lock);
  if (!handles().events.erase(event)) return ended(CUDA_ERROR_INVALID_HANDLE);
  delete event;
  return ended(begin_on_device());
}

// An event is recorded in a stream of its own device.
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const CUresult error = begin_on_device()) return ended(error);
  std::lock_guard<std::mutex> guard(handles().lock);
  if (!handles().events.count(event) || device_of(stream) != event->device) return ended(CUDA_ERROR_INVALID_HANDLE);
  clock_gettime(CLOCK_MONOTONIC, &event->at);
  event->is_recorded = true;
  ++handles().recorded;
  return cudaSuccess;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const CUresult error = begin_on_device()) return ended(error);
  std::lock_guard<std::mutex> guard(handles().lock);
  return ended(handles().events.count(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (const CUresult error = begin_on_device()) return ended(error);
  if (!milliseconds) return ended(CUDA_ERROR_INVALID_VALUE);
  std::lock_guard<std::mutex> guard(handles().lock);
  for (const cudaEvent_t event : {start, end})
    if (!handles().events.count(event) || !event->is_recorded || !event->has_time)
      return ended(CUDA_ERROR_INVALID_HANDLE);
  *milliseconds = (end->at.tv_sec - start->at.tv_sec) * 1e3f + (end->at.tv_nsec - start->at.tv_nsec) * 1e-6f;
  return cudaSuccess;
}

// For tests: how often an event was recorded, and in `alive` how many events and streams there are.
API long software_cuda_recorded(long* alive) {
  std::lock_guard<std::mutex> guard(handles().lock);
  *alive = handles().events.size() + handles().streams.size();
  return handles().recorded;
}
