// The devices: what they say of themselves, which one a thread uses, and what befalls them in tests.
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace software_cuda {
namespace {

constexpr int kMaxDevices = 16;

enum class Hang { kNone, kHangs, kReleased };

struct Devices {
  std::mutex lock;
  bool initialized = false;
  CUresult error[kMaxDevices] = {};
  Hang hang[kMaxDevices] = {};
  std::condition_variable changed;
  // How many calls until a fault is due; 0 is never.
  std::map<Fault, long> calls_left;
};

// Never destroyed: threads may run until the process has ended.
Devices& devices() {
  static auto& all = *new Devices;
  return all;
}

thread_local int device_of_thread = -1;

int setting(const char* variable, int otherwise) {
  const char* value = getenv(variable);
  return value && *value ? atoi(value) : otherwise;
}

// Returns the fault of this name, or kNone.
Fault fault_of(const std::string& name) {
  if (name == "fail_launch") return Fault::kFailLaunch;
  if (name == "hang_launch") return Fault::kHangLaunch;
  if (name == "crash_launch") return Fault::kCrashLaunch;
  if (name == "fail_allocation") return Fault::kFailAllocation;
  return Fault::kNone;
}

constexpr struct {
  CUresult error;
  const char* name;
  const char* text;
} kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

// SOFTWARE_CUDA_FAULT=crash_launch:3 is for processes of their own, which no test can call.
__attribute__((constructor)) void read_fault() {
  const char* value = getenv("SOFTWARE_CUDA_FAULT");
  if (!value || !*value) return;
  const std::string text = value;
  const auto colon = text.find(':');
  const Fault fault = fault_of(text.substr(0, colon));
  if (colon == std::string::npos || fault == Fault::kNone) {
    fprintf(stderr, "software CUDA: SOFTWARE_CUDA_FAULT=%s is not like fail_launch:1\n", value);
    abort();
  }
  devices().calls_left[fault] = atol(value + colon + 1);
}

}  // namespace

int driver_version() { return setting("SOFTWARE_CUDA_DRIVER_VERSION", CUDA_VERSION); }

int device_count() { return std::min(setting("SOFTWARE_CUDA_DEVICES", 1), kMaxDevices); }

CUresult attribute_of(int device, int attribute, int* value) {
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  static const auto& fixed = *new std::map<int, int>{
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 524288},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
  };
  const auto found = fixed.find(attribute);
  if (attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED)
    *value = setting("SOFTWARE_CUDA_INTEGRATED", 0);
  else if (attribute == CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)
    *value = setting("SOFTWARE_CUDA_HOST_REGISTER", 1);
  else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    *value = setting("SOFTWARE_CUDA_CAPABILITY", 72) / 10;
  else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    *value = setting("SOFTWARE_CUDA_CAPABILITY", 72) % 10;
  else if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)
    *value = device + 1;
  else
    *value = found == fixed.end() ? 0 : found->second;
  return CUDA_SUCCESS;
}

const char* name_of(CUresult error) {
  for (const auto& known : kErrors)
    if (known.error == error) return known.name;
  return nullptr;
}

const char* describe(CUresult error) {
  for (const auto& known : kErrors)
    if (known.error == error) return known.text;
  return nullptr;
}

int current_device() { return device_of_thread; }

void set_current_device(int device) { device_of_thread = device; }

bool is_initialized() {
  std::lock_guard<std::mutex> guard(devices().lock);
  return devices().initialized;
}

void initialize() {
  std::lock_guard<std::mutex> guard(devices().lock);
  devices().initialized = true;
}

CUresult device_error() {
  if (!is_initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (device_of_thread < 0) return CUDA_ERROR_INVALID_CONTEXT;
  Devices& all = devices();
  std::unique_lock<std::mutex> lock(all.lock);
  all.changed.wait(lock, [&] { return all.hang[device_of_thread] == Hang::kNone; });
  return all.error[device_of_thread];
}

CUresult lose_device(CUresult error) {
  std::lock_guard<std::mutex> guard(devices().lock);
  return devices().error[device_of_thread] = error;
}

bool is_due(Fault fault) {
  std::lock_guard<std::mutex> guard(devices().lock);
  long& left = devices().calls_left[fault];
  return left > 0 && --left == 0;
}

void hang() {
  Devices& all = devices();
  std::unique_lock<std::mutex> lock(all.lock);
  all.hang[device_of_thread] = Hang::kHangs;
  all.changed.wait(lock, [&] { return all.hang[device_of_thread] == Hang::kReleased; });
}

void end_hang() {
  std::lock_guard<std::mutex> guard(devices().lock);
  devices().hang[device_of_thread] = Hang::kNone;
  devices().changed.notify_all();
}

}  // namespace software_cuda

// For tests: what is to go wrong at the n-th call from now, and the end of it.

using software_cuda::devices;
using software_cuda::Hang;

API int software_cuda_fault(const char* what, long calls) {
  const software_cuda::Fault fault = software_cuda::fault_of(what);
  if (fault == software_cuda::Fault::kNone || calls < 1) return -1;
  std::lock_guard<std::mutex> guard(devices().lock);
  devices().calls_left[fault] = calls;
  return 0;
}

// Returns whether a kernel hangs now.
API int software_cuda_hangs() {
  std::lock_guard<std::mutex> guard(devices().lock);
  for (const Hang hang : devices().hang)
    if (hang == Hang::kHangs) return 1;
  return 0;
}

// Ends a hang; the kernel then runs.
API void software_cuda_release() {
  std::lock_guard<std::mutex> guard(devices().lock);
  for (Hang& hang : devices().hang)
    if (hang == Hang::kHangs) hang = Hang::kReleased;
  devices().changed.notify_all();
}

// Ends all faults, as if lost devices were switched off and on; only the memory stays.
API void software_cuda_reset() {
  software_cuda_release();
  std::lock_guard<std::mutex> guard(devices().lock);
  memset(devices().error, 0, sizeof devices().error);
  devices().calls_left.clear();
}
