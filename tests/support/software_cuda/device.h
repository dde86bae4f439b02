// What the three libraries share: the devices, their memory, compiled kernels, and the faults that a test asks for.
// libcuda.so.1 holds it all; libcudart.so.12 and libnvrtc.so.12 are linked against it. A CUresult serves both APIs,
// since an error has the same number in each.
#pragma once

#include <string>

#include "cuda.h"

#define API extern "C" __attribute__((visibility("default")))

namespace software_cuda __attribute__((visibility("default"))) {

// devices.cc

int driver_version();
int device_count();
CUresult attribute_of(int device, int attribute, int* value);
const char* name_of(CUresult error);
const char* describe(CUresult error);

// The device of this thread; -1 while it has none, as a thread that has no context.
int current_device();
void set_current_device(int device);

// cuInit was called, or any function of the runtime that needs it.
bool is_initialized();
void initialize();

// Everything that reaches the current device begins with this: it waits while a kernel hangs there, and returns the
// error that has lost the device.
CUresult device_error();
CUresult lose_device(CUresult error);

enum class Fault { kNone, kFailLaunch, kHangLaunch, kCrashLaunch, kFailAllocation };
// Returns whether a fault that a test asked for is due now. Each call counts.
bool is_due(Fault fault);
// A kernel that hangs calls the first and, once a test has released it and it has run, the second: what waits behind it
// comes after it.
void hang();
void end_hang();

// memory.cc

size_t memory_bytes();
CUresult free_bytes(size_t* bytes);
CUresult allocate(void** at, size_t size);
CUresult release(void* at);
CUresult allocate_on_host(void** at, size_t size);
CUresult release_on_host(void* at);
// Kernels may use what is registered, until it is no more, where it is mapped.
CUresult register_on_host(void* at, size_t size, bool is_mapped);
CUresult unregister_on_host(void* at);
// Gives where kernels find a byte of pinned or registered memory: at the same address.
CUresult address_on_device(void** on_device, void* on_host);
// Direction is a cudaMemcpyKind.
CUresult copy(void* to, const void* from, size_t size, int direction);
// Returns whether a kernel may read the byte here: in an allocation of the current device, or in memory
// of the host that is pinned or registered.
bool is_on_device(const void* at);

// kernels.cc

struct Module;
struct Kernel;
// Compiles CUDA source for the host, or finds it compiled. Returns the library, "" where the compiler refused it; `log`
// then has its messages.
std::string compile(const std::string& source, std::string* log);
CUresult load(const std::string& image, Module** module);
void unload(Module* module);
Kernel* kernel_of(Module* module, const char* name);
CUresult launch(Kernel* kernel, const unsigned (&grid)[3], const unsigned (&block)[3], void** arguments);
// The first line of code for an architecture, "compute_72" or "sm_72", as nvrtc gives it; the source follows. That of a
// real architecture begins as an ELF file, as a cubin does.
std::string heading(const std::string& architecture);

}  // namespace software_cuda
