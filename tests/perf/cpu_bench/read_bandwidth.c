/* How fast all threads together read memory that no cache holds: read_bandwidth MIB THREADS REPEATS -> GB/s, the best
   of the repeats. Each thread sums its own part of one buffer, 512 bytes at a time into eight sums. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t lanes __attribute__((vector_size(64)));

struct part {
    const lanes *begin;
    size_t count;
    int repeats;
    double *starts, *ends; /* of each repeat */
    uint64_t sum;
};

static pthread_barrier_t together;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *read_part(void *argument) {
    struct part *part = argument;
    for (int repeat = 0; repeat < part->repeats; repeat++) {
        lanes sums[8];
        memset(sums, 0, sizeof sums);
        pthread_barrier_wait(&together);
        part->starts[repeat] = now();
        for (size_t i = 0; i + 8 <= part->count; i += 8)
            for (int k = 0; k < 8; k++) sums[k] += part->begin[i + k];
        part->ends[repeat] = now();
        for (int k = 0; k < 8; k++)
            for (int lane = 0; lane < 8; lane++) part->sum += sums[k][lane];
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    size_t bytes = strtoull(argv[1], NULL, 10) << 20;
    int threads = atoi(argv[2]), repeats = atoi(argv[3]);
    void *buffer;
    if (threads < 1 || repeats < 1 || posix_memalign(&buffer, 4096, bytes)) return 2;
    memset(buffer, 1, bytes);
    pthread_barrier_init(&together, NULL, threads);
    struct part *parts = calloc(threads, sizeof *parts);
    pthread_t *ids = calloc(threads, sizeof *ids);
    size_t each = bytes / sizeof(lanes) / threads / 8 * 8;
    for (int i = 0; i < threads; i++) {
        parts[i] = (struct part){(const lanes *)buffer + i * each, each, repeats, NULL, NULL, 0};
        parts[i].starts = calloc(repeats, sizeof(double));
        parts[i].ends = calloc(repeats, sizeof(double));
        if (pthread_create(&ids[i], NULL, read_part, &parts[i])) return 2;
    }
    uint64_t sum = 0;
    for (int i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        sum += parts[i].sum;
    }
    double best = 1e9;
    for (int repeat = 0; repeat < repeats; repeat++) {
        double start = 1e18, end = 0;
        for (int i = 0; i < threads; i++) {
            if (parts[i].starts[repeat] < start) start = parts[i].starts[repeat];
            if (parts[i].ends[repeat] > end) end = parts[i].ends[repeat];
        }
        if (end - start < best) best = end - start;
    }
    if (sum == 42) puts("unlikely"); /* so that nothing is left out */
    printf("%.2f\n", (double)each * threads * sizeof(lanes) / best / 1e9);
    return 0;
}
