// Instruction sets that are not one more of the x86 ladder in dispatch.cpp.

#pragma once

#include "kernels.h"

namespace mvllm {

// The one that runs in place of what dispatch.cpp would choose, or null. `asked` is what MVLLM_CPU_ISA names, or null.
const Isa* other_isa(const char* asked);

}  // namespace mvllm
