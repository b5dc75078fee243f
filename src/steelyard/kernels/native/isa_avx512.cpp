// The kernels, compiled for one instruction set; CMakeLists.txt holds the flags.
#if defined(__x86_64__)
#define STEELYARD_ISA avx512
#define VECTOR_BYTES 64
#include "kernels.inl"
#endif
