// What slices need of OpenCL beyond TVM's own runtime: arrays within another array, compiled programs as bytes, and
// what a device says of itself. It is compiled together with TVM's runtime, or alone against a TVM that has OpenCL.
#include <tvm/runtime/module.h>
#include <tvm/runtime/registry.h>

#include <algorithm>
#include <memory>
#include <string>

#include "opencl_common.h"

namespace tvm {
namespace runtime {
namespace {

// The executor of TVM 0.19 compares the alignment of this descriptor, not that of the data, with 64 bytes.
struct alignas(64) PartDescriptor : cl::BufferDescriptor {};

void FreePart(Object* object) {
  auto* container = static_cast<NDArray::Container*>(object);
  auto* part = static_cast<PartDescriptor*>(container->dl_tensor.data);
  // As TVM does before it frees a buffer: some platforms do not keep a buffer for the commands in the queue.
  clFinish(cl::OpenCLWorkspace::Global()->GetQueue(container->dl_tensor.device));
  clReleaseMemObject(part->buffer);
  delete part;
  delete static_cast<NDArray*>(container->manager_ctx);
  delete container;
}

// An array that begins `offset` bytes into another one and keeps it alive. TVM's own view has a byte offset, which
// compiled kernels refuse.
NDArray Part(NDArray whole, int64_t offset, ShapeTuple shape, DataType dtype) {
  size_t bytes = (dtype.bits() * dtype.lanes() + 7) / 8;
  for (int64_t extent : shape) bytes *= static_cast<size_t>(extent);
  cl_buffer_region region{static_cast<size_t>(offset), std::max<size_t>(bytes, 1)};
  cl_int error;
  cl_mem buffer = clCreateSubBuffer(static_cast<cl::BufferDescriptor*>(whole->data)->buffer, CL_MEM_READ_WRITE,
                                    CL_BUFFER_CREATE_TYPE_REGION, &region, &error);
  OPENCL_CHECK_ERROR(error);
  auto part = std::make_unique<PartDescriptor>();
  part->layout = cl::BufferDescriptor::MemoryLayout::kBuffer1D;
  part->buffer = buffer;
  auto* container = new NDArray::Container(part.release(), shape, dtype, whole->device);
  container->manager_ctx = new NDArray(whole);
  container->SetDeleter(FreePart);
  return NDArray(GetObjectPtr<Object>(container));
}

TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.part").set_body_typed(Part);

// Memory of the host that a device with the same memory uses in place. The host has it while it is mapped.
struct HostDescriptor : PartDescriptor {
  Device device;
  void* address;
  size_t bytes;
  bool is_mapped = false;
};

cl_command_queue QueueOf(HostDescriptor* memory) { return cl::OpenCLWorkspace::Global()->GetQueue(memory->device); }

// Waits for the commands before it.
void GiveToHost(HostDescriptor* memory) {
  if (memory->is_mapped) return;
  cl_int error;
  void* at = clEnqueueMapBuffer(QueueOf(memory), memory->buffer, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, memory->bytes,
                                0, nullptr, nullptr, &error);
  OPENCL_CHECK_ERROR(error);
  memory->is_mapped = true;
  ICHECK_EQ(at, memory->address) << "the driver maps memory of the host elsewhere";
}

void GiveToDevice(HostDescriptor* memory) {
  if (!memory->is_mapped) return;
  OPENCL_CALL(clEnqueueUnmapMemObject(QueueOf(memory), memory->buffer, memory->address, 0, nullptr, nullptr));
  memory->is_mapped = false;
}

void FreeHosted(Object* object) {
  auto* container = static_cast<NDArray::Container*>(object);
  auto* memory = static_cast<HostDescriptor*>(container->dl_tensor.data);
  cl_command_queue queue = QueueOf(memory);
  if (memory->is_mapped) clEnqueueUnmapMemObject(queue, memory->buffer, memory->address, 0, nullptr, nullptr);
  clFinish(queue);
  clReleaseMemObject(memory->buffer);
  delete memory;
  delete container;
}

// An array of bytes in memory of the host, from `address` on, which its caller keeps. The host has it at first.
TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.in_place").set_body_typed([](int id, void* address, int64_t bytes) {
  Device device{kDLOpenCL, id};
  auto* workspace = cl::OpenCLWorkspace::Global();
  cl_int error;
  cl_mem buffer = clCreateBuffer(workspace->contexts[workspace->device_to_platform[workspace->GetCLDeviceID(id)]],
                                 CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, bytes, address, &error);
  OPENCL_CHECK_ERROR(error);
  auto* memory = new HostDescriptor;
  memory->layout = cl::BufferDescriptor::MemoryLayout::kBuffer1D;
  memory->buffer = buffer;
  memory->device = device;
  memory->address = address;
  memory->bytes = bytes;
  auto* container = new NDArray::Container(memory, ShapeTuple({bytes}), DataType::UInt(8), device);
  container->SetDeleter(FreeHosted);
  NDArray array(GetObjectPtr<Object>(container));
  GiveToHost(memory);
  return array;
});

HostDescriptor* Hosted(const NDArray& array) { return static_cast<HostDescriptor*>(array->data); }

TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.give_to_device").set_body_typed([](NDArray array) {
  GiveToDevice(Hosted(array));
});

TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.give_to_host").set_body_typed([](NDArray array) { GiveToHost(Hosted(array)); });

// Bytes to whose multiples the offset of a part must be aligned.
TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.alignment").set_body_typed([](int device) {
  cl_uint bits = 0;
  OPENCL_CALL(clGetDeviceInfo(cl::OpenCLWorkspace::Global()->GetCLDeviceID(device), CL_DEVICE_MEM_BASE_ADDR_ALIGN,
                              sizeof(bits), &bits, nullptr));
  return static_cast<int64_t>(bits / 8);
});

// TVM compiles and keeps programs for the current device of the thread.
void MakeCurrent(int device) {
  Device current{kDLOpenCL, device};
  cl::OpenCLWorkspace::Global()->SetDevice(current);
}

// The compiled programs of a module, as bytes, since Python gets a string of C++ up to its first zero. What is not
// compiled yet is compiled. Empty where the device shares its context with others: TVM then asks for the size of one
// program, is told several, and reads neither.
TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.programs").set_body([](TVMArgs args, TVMRetValue* rv) {
  Module module = args[0];
  int device = args[1];
  auto* workspace = cl::OpenCLWorkspace::Global();
  cl_device_id id = workspace->GetCLDeviceID(device);
  cl_uint devices = 0;
  OPENCL_CALL(clGetContextInfo(workspace->contexts[workspace->device_to_platform[id]], CL_CONTEXT_NUM_DEVICES,
                               sizeof(devices), &devices, nullptr));
  std::string programs;
  if (devices == 1) {
    MakeCurrent(device);
    programs = module.GetFunction("opencl.GetPreCompiledPrograms")().operator std::string();
  }
  TVMByteArray bytes{programs.data(), programs.size()};
  *rv = bytes;
});

TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.use_programs").set_body([](TVMArgs args, TVMRetValue*) {
  Module module = args[0];
  MakeCurrent(args[1]);
  std::string programs = args[2];
  TVMByteArray bytes{programs.data(), programs.size()};  // a string would end at its first zero here, too
  module.GetFunction("opencl.SetPreCompiledPrograms")(bytes);
});

// What a device says of itself, a line each: name, vendor, extensions, kind ("gpu", "cpu" or "other"), and whether
// its memory is the host's ("unified" or "own").
TVM_REGISTER_GLOBAL("tvm_pipeline.opencl.told").set_body_typed([](int device) {
  cl_device_id id = cl::OpenCLWorkspace::Global()->GetCLDeviceID(device);
  std::string told;
  for (cl_device_info what : {CL_DEVICE_NAME, CL_DEVICE_VENDOR, CL_DEVICE_EXTENSIONS}) {
    size_t size = 0;
    OPENCL_CALL(clGetDeviceInfo(id, what, 0, nullptr, &size));
    std::string text(size, 0);
    OPENCL_CALL(clGetDeviceInfo(id, what, size, &text[0], nullptr));
    told += std::string(text.c_str()) + "\n";
  }
  cl_device_type type = 0;
  cl_bool unified = 0;
  OPENCL_CALL(clGetDeviceInfo(id, CL_DEVICE_TYPE, sizeof(type), &type, nullptr));
  OPENCL_CALL(clGetDeviceInfo(id, CL_DEVICE_HOST_UNIFIED_MEMORY, sizeof(unified), &unified, nullptr));
  const char* kind = type & CL_DEVICE_TYPE_GPU ? "gpu" : type & CL_DEVICE_TYPE_CPU ? "cpu" : "other";
  return String(told + kind + "\n" + (unified ? "unified" : "own"));
});

}  // namespace
}  // namespace runtime
}  // namespace tvm
