// The CPU that a thread runs on, and how another thread moves it. Outside of Linux, threads are not moved.
//
// A thread is moved by its affinity mask, which is restored at once: the mask decides only where it continues. A thread
// runs on CPUs of its mask only, so masks that a program sets are respected.

#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace mvllm {

// The CPU that this thread runs on; -1 if unknown.
inline int current_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// The thread that creates the handle, for other threads of its process. Valid while that thread exists.
class ThreadHandle {
  public:
#if defined(__linux__)
    ThreadHandle() : id_(pid_t(syscall(SYS_gettid))) { has_clock_ = pthread_getcpuclockid(pthread_self(), &clock_) == 0; }

    // Nanoseconds that the thread has been running; -1 if unknown.
    int64_t running_time() const {
        timespec time;
        if (!has_clock_ || clock_gettime(clock_, &time) != 0) return -1;
        return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
    }

    // Moves the thread to a CPU.
    void move_to(int cpu) const { move(cpu, true); }

    // Moves the thread to another CPU if it runs or waits on this one.
    void move_away_from(int cpu) const { move(cpu, false); }

  private:
    void move(int cpu, bool there) const {
        // One at a time: a second one would read the mask of the first as the thread's own, and restore that.
        if (is_moving_.exchange(true, std::memory_order_acquire)) return;
        move_alone(cpu, there);
        is_moving_.store(false, std::memory_order_release);
    }

    void move_alone(int cpu, bool there) const {
        cpu_set_t allowed, chosen;
        if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(id_, sizeof(allowed), &allowed) != 0) return;
        if (!CPU_ISSET(size_t(cpu), &allowed)) return;
        CPU_ZERO(&chosen);
        CPU_SET(size_t(cpu), &chosen);
        if (!there) CPU_XOR(&chosen, &allowed, &chosen);
        if (CPU_COUNT(&chosen) > 0 && sched_setaffinity(id_, sizeof(chosen), &chosen) == 0)
            sched_setaffinity(id_, sizeof(allowed), &allowed);
    }

    pid_t id_;
    clockid_t clock_{};
    bool has_clock_;
    mutable std::atomic<bool> is_moving_{false};
#else
    int64_t running_time() const { return -1; }
    void move_to(int) const {}
    void move_away_from(int) const {}
#endif
};

}  // namespace mvllm
