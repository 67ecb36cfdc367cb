// Tasks of a pass, and their way to the threads.
#pragma once

#include <vector>

#include "problem.h"

namespace ruda::cpu {

// Each stage needs all of the one before it; the tasks of a stage need nothing of each other. Experts with the most
// rows come first, so that what is left at the end is small.
using Stage = std::vector<Task>;

std::vector<Stage> forward_stages(const Problem& problem, int threads);
std::vector<Stage> backward_stages(const Problem& problem, int threads);

// Bytes of memory that a thread needs for any of the problem's tasks.
long scratch_bytes(const Problem& problem);

}  // namespace ruda::cpu
