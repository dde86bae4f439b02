// The memory of the devices: allocations of the host's, which are kept apart from the rest of it.
//
// New memory is full of 0xff bytes (NaN in floating point), so that a kernel that reads what nobody wrote shows. A copy
// or a kernel that touches what is not the device's is refused and reported on standard error.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace software_cuda {
namespace {

constexpr size_t kAlignment = 256;
// Bytes behind each allocation that nobody may write.
constexpr size_t kGuard = 256;
constexpr int kNewByte = 0xff;
constexpr int kDirections = 4;

enum class Kind { kDevice, kPinned, kRegistered };

struct Block {
  size_t size;
  Kind kind;
  int device;
  // Whether kernels of any device may use memory of the host.
  bool is_mapped = true;
};

struct Copies {
  long count, bytes;
};

struct Memory {
  std::mutex lock;
  std::map<uintptr_t, Block> blocks;
  std::map<int, size_t> allocated;
  Copies copies[kDirections] = {};
};

Memory& memory() {
  static auto& all = *new Memory;
  return all;
}

size_t rounded_up(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

// Returns the block in which these bytes lie, null if there is none. The caller holds the lock.
const Block* block_around(const void* at, size_t size) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  auto after = memory().blocks.upper_bound(address);
  if (after == memory().blocks.begin()) return nullptr;
  const auto& [begin, block] = *--after;
  return address - begin < block.size && size <= block.size - (address - begin) ? &block : nullptr;
}

// Returns whether a block has any of these bytes. The caller holds the lock.
bool is_block_within(const void* at, size_t size) {
  // The only block that can reach into this range begins before its end, after all others that do.
  const auto begin = reinterpret_cast<uintptr_t>(at);
  auto after = memory().blocks.lower_bound(begin + size);
  return after != memory().blocks.begin() && (--after)->first + after->second.size > begin;
}

bool is_guard_whole(const void* at, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(at);
  for (size_t i = size; i < rounded_up(size) + kGuard; ++i)
    if (bytes[i] != kNewByte) return false;
  return true;
}

CUresult refuse(const char* what, const void* at, size_t size) {
  fprintf(stderr, "software CUDA: %s: %zu bytes at %p\n", what, size, at);
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

size_t memory_bytes() {
  const char* value = getenv("SOFTWARE_CUDA_MEMORY_BYTES");
  return value && *value ? strtoull(value, nullptr, 10) : size_t{8} << 30;
}

CUresult free_bytes(size_t* bytes) {
  if (const CUresult error = device_error()) return error;
  std::lock_guard<std::mutex> guard(memory().lock);
  const size_t used = memory().allocated[current_device()], all = memory_bytes();
  *bytes = used < all ? all - used : 0;
  return CUDA_SUCCESS;
}

CUresult allocate(void** at, size_t size) {
  if (const CUresult error = device_error()) return error;
  *at = nullptr;
  if (size == 0) return CUDA_SUCCESS;
  if (is_due(Fault::kFailAllocation)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(memory().lock);
  size_t& used = memory().allocated[current_device()];
  if (used > memory_bytes() || size > memory_bytes() - used) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = aligned_alloc(kAlignment, rounded_up(size) + kGuard);
  if (!*at) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(*at, kNewByte, rounded_up(size) + kGuard);
  memory().blocks[reinterpret_cast<uintptr_t>(*at)] = {size, Kind::kDevice, current_device()};
  used += size;
  return CUDA_SUCCESS;
}

CUresult release(void* at) {
  if (const CUresult error = device_error()) return error;
  if (!at) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(at));
  if (found == memory().blocks.end() || found->second.kind != Kind::kDevice)
    return refuse("freed, but not allocated", at, 0);
  const Block block = found->second;
  memory().blocks.erase(found);
  memory().allocated[block.device] -= block.size;
  const bool whole = is_guard_whole(at, block.size);
  if (!whole) refuse("something was written behind the end of an allocation", at, block.size);
  free(at);
  return whole ? CUDA_SUCCESS : lose_device(CUDA_ERROR_ILLEGAL_ADDRESS);
}

CUresult allocate_on_host(void** at, size_t size) {
  if (const CUresult error = device_error()) return error;
  std::lock_guard<std::mutex> guard(memory().lock);
  *at = aligned_alloc(kAlignment, rounded_up(size ? size : 1));
  if (!*at) return CUDA_ERROR_OUT_OF_MEMORY;
  memory().blocks[reinterpret_cast<uintptr_t>(*at)] = {size, Kind::kPinned, current_device()};
  return CUDA_SUCCESS;
}

CUresult release_on_host(void* at) {
  if (const CUresult error = device_error()) return error;
  if (!at) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(at));
  if (found == memory().blocks.end() || found->second.kind != Kind::kPinned)
    return refuse("freed, but no pinned allocation", at, 0);
  memory().blocks.erase(found);
  free(at);
  return CUDA_SUCCESS;
}

CUresult register_on_host(void* at, size_t size, bool is_mapped) {
  if (const CUresult error = device_error()) return error;
  int supported = 0;
  attribute_of(current_device(), CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, &supported);
  if (!supported) return CUDA_ERROR_NOT_SUPPORTED;
  if (!at || size == 0 || size > UINTPTR_MAX - reinterpret_cast<uintptr_t>(at)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(memory().lock);
  if (is_block_within(at, size)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  memory().blocks[reinterpret_cast<uintptr_t>(at)] = {size, Kind::kRegistered, current_device(), is_mapped};
  return CUDA_SUCCESS;
}

CUresult unregister_on_host(void* at) {
  if (const CUresult error = device_error()) return error;
  if (!at) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(at));
  if (found == memory().blocks.end() || found->second.kind != Kind::kRegistered)
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  memory().blocks.erase(found);
  return CUDA_SUCCESS;
}

CUresult address_on_device(void** on_device, void* on_host) {
  if (const CUresult error = device_error()) return error;
  std::lock_guard<std::mutex> guard(memory().lock);
  const Block* block = block_around(on_host, 1);
  if (!block || block->kind == Kind::kDevice || !block->is_mapped) return CUDA_ERROR_INVALID_VALUE;
  *on_device = on_host;
  return CUDA_SUCCESS;
}

CUresult copy(void* to, const void* from, size_t size, int direction) {
  if (const CUresult error = device_error()) return error;
  if (direction < 0 || direction > kDirections) return CUDA_ERROR_INVALID_VALUE;
  if (size == 0) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(memory().lock);
  const Block *target = block_around(to, size), *source = block_around(from, size);
  const bool to_device = target && target->kind == Kind::kDevice, from_device = source && source->kind == Kind::kDevice;
  // Bit 0 of a direction says that it ends on the device, bit 1 that it starts there; 4 is found out by the pointers.
  const int actual = to_device + 2 * from_device;
  if (direction != kDirections && direction != actual) {
    const bool is_target = (direction ^ actual) & 1;
    const bool expected = is_target ? direction & 1 : direction & 2;
    const char* why = expected ? "a copy reaches beyond an allocation" : "a copy takes device memory for the host's";
    return refuse(why, is_target ? to : from, size);
  }
  if ((!target && is_block_within(to, size)) || (!source && is_block_within(from, size)))
    return refuse("a copy takes memory of which only a part is registered", target ? from : to, size);
  memmove(to, from, size);
  memory().copies[actual].count += 1;
  memory().copies[actual].bytes += size;
  return CUDA_SUCCESS;
}

bool is_on_device(const void* at) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const Block* block = block_around(at, 1);
  if (block && (block->kind == Kind::kDevice ? block->device == current_device() : block->is_mapped)) return true;
  refuse("a kernel was given an address outside of the device's memory", at, 1);
  return false;
}

}  // namespace software_cuda

// For tests: how much memory is in use, what of the host's is registered, and what was copied. Direction is a cudaMemcpyKind.

using software_cuda::memory;

API long software_cuda_allocated() {
  std::lock_guard<std::mutex> guard(memory().lock);
  long bytes = 0;
  for (const auto& [device, used] : memory().allocated) bytes += used;
  return bytes;
}

// Returns how many ranges are registered and, in `bytes`, how many bytes they have in all.
API long software_cuda_registered(long* bytes) {
  std::lock_guard<std::mutex> guard(memory().lock);
  long ranges = *bytes = 0;
  for (const auto& [begin, block] : memory().blocks) {
    if (block.kind != software_cuda::Kind::kRegistered) continue;
    ++ranges;
    *bytes += block.size;
  }
  return ranges;
}

API long software_cuda_copies(int direction) {
  std::lock_guard<std::mutex> guard(memory().lock);
  return memory().copies[direction].count;
}

API long software_cuda_copied_bytes(int direction) {
  std::lock_guard<std::mutex> guard(memory().lock);
  return memory().copies[direction].bytes;
}
