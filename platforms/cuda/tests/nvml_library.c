/* A replacement of the driver's libnvidia-ml.so.1: the functions that mvllm_cuda calls, with NVML's signatures and
 * error codes.
 *
 * The file named by NVML_STAND_IN describes the machine, one line per item, fields separated by '|':
 *
 *     init|CODE                                          what nvmlInit_v2 returns; 0 without this line
 *     driver|570.10|12080                                driver version, CUDA version
 *     device|NAME|UUID|TOTAL|FREE|MAJOR.MINOR            bytes; TOTAL of 0: the device reports no memory
 *     lost                                               a device that does not answer
 *     mig|NAME|UUID|TOTAL|INSTANCE|COMPUTE               a compute instance of the device before; an empty NAME is an
 *                                                        unused index
 *     process|PID|BYTES                                  a process on the device before
 *     nvlink|UUID|UUID                                   two devices that NVLink connects
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 16, NOT_SUPPORTED = 3, UNINITIALIZED = 1, NOT_FOUND = 6, GPU_IS_LOST = 15, ARGUMENT = 2, SMALL = 7 };

typedef struct {
    char name[96], uuid[96];
    unsigned long long total, free;
    int major, minor, lost, is_mig, num_mig, num_processes;
    unsigned instance, compute;
    int mig[MOST]; /* numbers in `things`; -1: an unused index */
    unsigned pids[MOST];
    unsigned long long used[MOST];
} Thing;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute;
} Process;

static Thing things[64];
static int num_things, devices[MOST], num_devices, is_open, init_code, cuda_version;
static char driver[96], links[MOST][2][96];
static int num_links;

static char *field(char **at) {
    char *start = *at ? *at : "";
    char *bar = *at ? strchr(*at, '|') : NULL;
    if (bar) *bar = 0;
    *at = bar ? bar + 1 : NULL;
    return start;
}

int nvmlInit_v2(void) {
    char line[512], *path = getenv("NVML_STAND_IN");
    FILE *file = path ? fopen(path, "r") : NULL;
    num_things = num_devices = init_code = num_links = 0;
    memset(things, 0, sizeof things);
    while (file && fgets(line, sizeof line, file)) {
        char *at = line, *kind;
        line[strcspn(line, "\n")] = 0;
        kind = field(&at);
        Thing *last = num_devices ? &things[devices[num_devices - 1]] : NULL;
        if (!strcmp(kind, "init")) init_code = atoi(field(&at));
        if (!strcmp(kind, "driver")) {
            snprintf(driver, sizeof driver, "%s", field(&at));
            cuda_version = atoi(field(&at));
        }
        if (!strcmp(kind, "device") || !strcmp(kind, "lost")) {
            Thing *new = &things[num_things];
            devices[num_devices++] = num_things++;
            new->lost = !strcmp(kind, "lost");
            snprintf(new->name, 96, "%s", field(&at));
            snprintf(new->uuid, 96, "%s", field(&at));
            new->total = strtoull(field(&at), 0, 10);
            new->free = strtoull(field(&at), 0, 10);
            sscanf(field(&at), "%d.%d", &new->major, &new->minor);
        }
        if (!strcmp(kind, "mig") && last) {
            Thing *new = &things[num_things];
            snprintf(new->name, 96, "%s", field(&at));
            snprintf(new->uuid, 96, "%s", field(&at));
            new->total = strtoull(field(&at), 0, 10);
            new->instance = atoi(field(&at));
            new->compute = atoi(field(&at));
            new->is_mig = 1;
            last->mig[last->num_mig++] = new->name[0] ? num_things : -1;
            num_things++;
        }
        if (!strcmp(kind, "nvlink")) {
            snprintf(links[num_links][0], 96, "%s", field(&at));
            snprintf(links[num_links++][1], 96, "%s", field(&at));
        }
        if (!strcmp(kind, "process") && last) {
            last->pids[last->num_processes] = atoi(field(&at));
            last->used[last->num_processes++] = strtoull(field(&at), 0, 10);
        }
    }
    if (file) fclose(file);
    is_open = init_code == 0;
    return init_code;
}

int nvmlShutdown(void) {
    is_open = 0;
    return 0;
}

const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == 18 ? "Driver/library version mismatch"
         : code == GPU_IS_LOST ? "GPU is lost" : code == UNINITIALIZED ? "Uninitialized" : "Error";
}

static int text(const char *from, char *to, unsigned length) {
    if (!is_open) return UNINITIALIZED;
    if (strlen(from) >= length) return SMALL;
    strcpy(to, from);
    return 0;
}

int nvmlSystemGetDriverVersion(char *to, unsigned length) { return text(driver, to, length); }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { return is_open ? (*to = cuda_version, 0) : UNINITIALIZED; }
int nvmlDeviceGetCount_v2(unsigned *to) { return is_open ? (*to = num_devices, 0) : UNINITIALIZED; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Thing **to) {
    if (!is_open) return UNINITIALIZED;
    if ((int)index >= num_devices) return ARGUMENT;
    *to = &things[devices[index]];
    return (*to)->lost ? GPU_IS_LOST : 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Thing **to) {
    for (int i = 0; i < num_things; i++)
        if (!strcmp(things[i].uuid, uuid)) return (*to = &things[i], 0);
    return NOT_FOUND;
}

int nvmlDeviceGetP2PStatus(Thing *one, Thing *other, int capability, int *status) {
    if (!is_open) return UNINITIALIZED;
    if (capability != 2) return ARGUMENT; /* NVML_P2P_CAPS_INDEX_NVLINK */
    *status = 5;                          /* NVML_P2P_STATUS_NOT_SUPPORTED */
    for (int i = 0; i < num_links; i++)
        for (int side = 0; side < 2; side++)
            if (!strcmp(links[i][side], one->uuid) && !strcmp(links[i][!side], other->uuid)) *status = 0;
    return 0;
}

int nvmlDeviceGetName(Thing *it, char *to, unsigned length) { return text(it->name, to, length); }
int nvmlDeviceGetUUID(Thing *it, char *to, unsigned length) { return text(it->uuid, to, length); }
int nvmlDeviceGetCudaComputeCapability(Thing *it, int *major, int *minor) {
    *major = it->major, *minor = it->minor;
    return 0;
}

int nvmlDeviceGetMemoryInfo(Thing *it, Memory *to) {
    if (!it->total) return NOT_SUPPORTED;
    to->total = it->total, to->free = it->free, to->used = it->total - it->free;
    return 0;
}

int nvmlDeviceGetMigMode(Thing *it, unsigned *current, unsigned *pending) {
    if (it->major < 8) return NOT_SUPPORTED;
    *current = *pending = it->num_mig > 0;
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(Thing *it, unsigned *to) { return *to = it->num_mig, 0; }

int nvmlDeviceGetMigDeviceHandleByIndex(Thing *it, unsigned index, Thing **to) {
    if (it->mig[index] < 0) return NOT_FOUND;
    return *to = &things[it->mig[index]], 0;
}

int nvmlDeviceGetGpuInstanceId(Thing *it, unsigned *to) { return it->is_mig ? (*to = it->instance, 0) : NOT_SUPPORTED; }
int nvmlDeviceGetComputeInstanceId(Thing *it, unsigned *to) {
    return it->is_mig ? (*to = it->compute, 0) : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Thing *it, unsigned *count, Process *to) {
    if ((int)*count < it->num_processes) return SMALL;
    *count = it->num_processes;
    for (int i = 0; i < it->num_processes; i++) {
        memset(&to[i], 0, sizeof to[i]);
        to[i].pid = it->pids[i], to[i].used = it->used[i];
    }
    return 0;
}
