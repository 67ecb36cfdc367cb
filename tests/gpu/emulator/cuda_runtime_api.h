// The few names of the CUDA runtime that the launchers mention, for the emulator.
#pragma once

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorUnknown = 999 };
using cudaStream_t = void*;
