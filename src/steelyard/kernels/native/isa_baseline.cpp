// The kernels, compiled for one instruction set; CMakeLists.txt holds the flags.
#define STEELYARD_ISA baseline
#define VECTOR_BYTES 16
#include "kernels.inl"
