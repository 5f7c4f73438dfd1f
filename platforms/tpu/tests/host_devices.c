/* XLA's CPU device in the form of a TPU's library: the functions of REAL_LIBRARY, one of them replaced.
 *
 * Before torch_tpu runs an executable, it queries the memory kind of each output. The CPU device's plugin does not
 * implement this function. There is only one memory, which this replacement returns.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_c_api.h"

static const PJRT_Api *real;

static PJRT_Error *output_memory_kinds(PJRT_Executable_OutputMemoryKinds_Args *args) {
    static const char kind[] = "device";
    PJRT_Executable_NumOutputs_Args asked = {0};
    asked.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE;
    asked.executable = args->executable;
    PJRT_Error *error = real->PJRT_Executable_NumOutputs(&asked);
    if (error) return error;
    /* The caller uses them as long as the executable and has no function to free them, so they are never freed. */
    const char **kinds = malloc(sizeof(char *) * (asked.num_outputs + 1));
    size_t *sizes = malloc(sizeof(size_t) * (asked.num_outputs + 1));
    for (size_t i = 0; i < asked.num_outputs; i++) {
        kinds[i] = kind;
        sizes[i] = strlen(kind);
    }
    args->num_outputs = asked.num_outputs;
    args->memory_kinds = kinds;
    args->memory_kind_sizes = sizes;
    return NULL;
}

const PJRT_Api *GetPjrtApi(void) {
    static PJRT_Api *changed;
    if (changed) return changed;
    void *library = dlopen(REAL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    const PJRT_Api *(*get)(void) = library ? (const PJRT_Api *(*)(void))dlsym(library, "GetPjrtApi") : NULL;
    if (!get) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    real = get();
    size_t size = real->struct_size > sizeof(PJRT_Api) ? real->struct_size : sizeof(PJRT_Api);
    changed = calloc(1, size);
    memcpy(changed, real, real->struct_size);
    changed->PJRT_Executable_OutputMemoryKinds = output_memory_kinds;
    return changed;
}
