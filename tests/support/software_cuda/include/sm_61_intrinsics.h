/* Kernels for int8 include this; the software device declares __dp4a for all kernels. */
#pragma once
