/* What kernels take from CUDA's cuda_fp16.h. The compiler's own type does the arithmetic: it rounds after each
 * operation, as a device does. */
#pragma once

using half = _Float16;
using __half = _Float16;
struct alignas(4) half2 {
  half x, y;
};
using __half2 = half2;

inline half2 make_half2(half x, half y) { return {x, y}; }
inline half __float2half(float value) { return value; }
inline half __float2half_rn(float value) { return value; }
inline float __half2float(half value) { return value; }
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }
inline half __habs(half value) { return fabsf(value); }
inline half hrint(half value) { return rintf(value); }
inline half hceil(half value) { return ceilf(value); }
inline half hfloor(half value) { return floorf(value); }
inline half htrunc(half value) { return truncf(value); }
inline half hexp(half value) { return expf(value); }
inline half hexp2(half value) { return exp2f(value); }
inline half hlog(half value) { return logf(value); }
inline half hlog2(half value) { return log2f(value); }
inline half hlog10(half value) { return log10f(value); }
inline half hsqrt(half value) { return sqrtf(value); }
inline half hsin(half value) { return sinf(value); }
inline half hcos(half value) { return cosf(value); }
