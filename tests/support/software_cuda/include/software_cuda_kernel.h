/* CUDA as kernels see it, for g++: every module is compiled below this file (kernels.cc).
 *
 * A kernel becomes an inline function, which run() calls for each thread of each block. No header of the C++ library
 * is included: reading it would take longer than most kernels do. What TVM's code generator for CUDA writes is here,
 * and no more. */
#pragma once

#include <math.h>
#include <stddef.h>

#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 720

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

/* The scalar types are those of CUDA: char is signed on every host, since kernels.cc says so to the compiler. */
#define SOFTWARE_CUDA_VECTORS(type, name)                                                                    \
  struct name##1 {                                                                                           \
    type x;                                                                                                  \
  };                                                                                                         \
  struct alignas(2 * sizeof(type)) name##2 {                                                                 \
    type x, y;                                                                                               \
  };                                                                                                         \
  struct name##3 {                                                                                           \
    type x, y, z;                                                                                            \
  };                                                                                                         \
  struct alignas(sizeof(type) > 4 ? 16 : 4 * sizeof(type)) name##4 {                                         \
    type x, y, z, w;                                                                                         \
  };                                                                                                         \
  inline name##1 make_##name##1(type x) { return {x}; }                                                      \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                           \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
SOFTWARE_CUDA_VECTORS(signed char, char)
SOFTWARE_CUDA_VECTORS(unsigned char, uchar)
SOFTWARE_CUDA_VECTORS(short, short)
SOFTWARE_CUDA_VECTORS(unsigned short, ushort)
SOFTWARE_CUDA_VECTORS(int, int)
SOFTWARE_CUDA_VECTORS(unsigned, uint)
SOFTWARE_CUDA_VECTORS(long long, longlong)
SOFTWARE_CUDA_VECTORS(unsigned long long, ulonglong)
SOFTWARE_CUDA_VECTORS(float, float)
SOFTWARE_CUDA_VECTORS(double, double)
#undef SOFTWARE_CUDA_VECTORS

/* Which thread runs. Kernels run one at a time, and a thread that waits takes its index along. */
static uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace software_cuda {

/* Mirrors the struct in kernels.cc. */
struct Launch {
  unsigned grid[3], block[3];
  void** arguments;
  bool (*is_on_device)(const void* at);
  void (*run_fibers)(unsigned count, void (*thread)(unsigned index, void* context), void* context);
  void (*wait_for_warp)();
  void (*wait_for_block)();
};
static const Launch* launched;
/* The threads of the block that runs are fibers. */
static bool has_fibers;

inline unsigned index_in_block() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

inline void wait(void (*how)()) {
  if (!has_fibers) return;
  const uint3 self = threadIdx;
  how();
  threadIdx = self;
}

/* Returns the value that another thread of the warp gave; each thread of the warp calls this. */
template <class T>
T shuffled(T value, unsigned source) {
  alignas(16) static char given[1024][16];
  static_assert(sizeof(T) <= 16, "a shuffle moves 16 bytes at most");
  *(T*)given[index_in_block()] = value;
  wait(launched->wait_for_warp);
  value = *(T*)given[source];
  wait(launched->wait_for_warp);
  return value;
}

template <int... numbers>
struct Numbers {};

template <class... Parameters, int... numbers>
inline void call(void (*kernel)(Parameters...), void** arguments, Numbers<numbers...>) {
  kernel(*(Parameters*)arguments[numbers]...);
}

template <class T>
bool is_valid(const T&) {
  return true;
}
template <class T>
bool is_valid(T* const& at) {
  return !at || launched->is_on_device((const void*)at);
}
template <class... Parameters, int... numbers>
bool are_valid(void (*)(Parameters...), void** arguments, Numbers<numbers...>) {
  return (true && ... && is_valid(*(Parameters*)arguments[numbers]));
}

/* Runs a kernel; returns false without running it where an argument points to memory that is not the device's.
 * The threads of a block are fibers where they wait for each other; else they run one after the other in a loop. */
template <auto kernel, bool waits, class... Parameters>
bool run(const Launch& launch, void (*)(Parameters...)) {
  constexpr Numbers<__integer_pack(sizeof...(Parameters))...> all;
  launched = &launch;
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  blockDim = {launch.block[0], launch.block[1], launch.block[2]};
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  has_fibers = waits && threads > 1;
  if (!are_valid(kernel, launch.arguments, all)) return false;
  const auto thread = [](unsigned index, void* arguments) {
    threadIdx = {index % blockDim.x, index / blockDim.x % blockDim.y, index / blockDim.x / blockDim.y};
    call(kernel, (void**)arguments, Numbers<__integer_pack(sizeof...(Parameters))...>());
  };
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        if (waits && has_fibers) {
          launch.run_fibers(threads, thread, launch.arguments);
        } else {
          for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
            for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
              for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) call(kernel, launch.arguments, all);
        }
  return true;
}

}  // namespace software_cuda

/* Makes a kernel callable by kernels.cc; `waits` says whether its threads wait for each other. */
#define SOFTWARE_CUDA_KERNEL(name, waits)                                                             \
  extern "C" __attribute__((visibility("default"))) bool software_cuda_run_##name(                    \
      const software_cuda::Launch* launch) {                                                          \
    return software_cuda::run<&name, waits>(*launch, &name);                                          \
  }

/* Synchronisation. */
inline void __syncthreads() { software_cuda::wait(software_cuda::launched->wait_for_block); }
inline void __syncwarp(unsigned = ~0u) { software_cuda::wait(software_cuda::launched->wait_for_warp); }
inline unsigned __activemask() { return ~0u; }
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const unsigned self = software_cuda::index_in_block(), first = self / width * width;
  return software_cuda::shuffled(value, first + lane % width);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
  const unsigned self = software_cuda::index_in_block(), first = self / width * width;
  return software_cuda::shuffled(value, self >= first + by ? self - by : self);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
  const unsigned self = software_cuda::index_in_block(), first = self / width * width;
  return software_cuda::shuffled(value, self + by < first + width ? self + by : self);
}
/* Threads change only where they wait, so this is atomic. */
template <class T, class V>
T atomicAdd(T* at, V value) {
  const T old = *at;
  *at += value;
  return old;
}

/* Arithmetic. A NaN beside a number gives the number, as on a device. */
#undef isnan
#undef isinf
template <class T>
bool isnan(T value) {
  return __builtin_isnan(value);
}
template <class T>
bool isinf(T value) {
  return __builtin_isinf(value);
}
template <class A, class B>
inline auto max(A a, B b) {
  const decltype(a + b) left = a, right = b;
  return left > right || right != right ? left : right;
}
template <class A, class B>
inline auto min(A a, B b) {
  const decltype(a + b) left = a, right = b;
  return left < right || right != right ? left : right;
}
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __fdividef(a, b) ((a) / (b))
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
inline int __clzll(unsigned long long value) { return value ? __builtin_clzll(value) : 64; }

/* The sum of products of four bytes, signed or not by the type of each side. */
template <class A, class B>
inline int software_cuda_dot(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += (int)(A)(a >> 8 * i) * (int)(B)(b >> 8 * i);
  return sum;
}
inline int __dp4a(int a, int b, int sum) { return software_cuda_dot<signed char, signed char>(a, b, sum); }
inline int __dp4a(unsigned a, int b, int sum) { return software_cuda_dot<unsigned char, signed char>(a, b, sum); }
inline int __dp4a(int a, unsigned b, int sum) { return software_cuda_dot<signed char, unsigned char>(a, b, sum); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  return software_cuda_dot<unsigned char, unsigned char>(a, b, sum);
}

/* TVM 0.27 writes `__shared__ alignas(64) float`, where CUDA's compiler takes it, and g++ only this. */
#define alignas(n) __attribute__((aligned(n)))
