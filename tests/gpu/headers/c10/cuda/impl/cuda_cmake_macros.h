// torch generates this file when it is built with CUDA; wheels without CUDA lack it. Only for checking that the glue
// compiles.
#pragma once

#define C10_CUDA_BUILD_SHARED_LIBS
