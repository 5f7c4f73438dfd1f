// Detection of instruction sets that are not in the x86 list of dispatch.cpp.

#pragma once

#include "kernels.h"

namespace mvllm {

// The instruction set that overrides the choice of dispatch.cpp, or null. `asked`: requested name (MVLLM_CPU_ISA), or null.
const Isa* other_isa(const char* asked);

}  // namespace mvllm
