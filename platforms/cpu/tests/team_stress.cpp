// Many small divided calls, compared with what they should have computed: from several threads at once, with pieces that
// divide work themselves, with more threads than cores, and in a forked process. Built with the address sanitizer or the
// thread sanitizer by test_thread_team.py. Also the decisions about the number of threads, for scripted calls.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include "team_size_controller.h"
#include "thread_placement.h"
#include "thread_team.h"

using namespace mvllm;

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("failed: %s\n", what);
    std::fflush(stdout);
    std::_Exit(1);
}

// Every part is executed once, whatever the numbers of threads and pieces are, however they are claimed, and whoever
// sleeps meanwhile.
void many_calls(int rounds) {
    static const char memory[1000] = {};
    std::vector<int> counts;
    for (int i = 0; i < rounds; ++i) {
        const int threads = 2 + i % 4, pieces = 1 + i % 7;
        counts.assign(size_t(threads * pieces), 0);
        const auto work = [&](Part part) {
            counts[size_t(part.index)] += 1 + int(part.count != threads * pieces);
            if (i % 20 == 0 && part.index == (i % 40 ? part.count - 1 : 0)) usleep(300);
            int inner = 0;
            if (i % 5 == 0) divide_range(4, 10, [&](int64_t begin, int64_t end) { inner += int(end - begin); });
            if (i % 5 == 0 && inner != 10) counts[size_t(part.index)] = -100;
        };
        const auto range = [](const void* memory, int64_t, int64_t) { return Range{static_cast<const char*>(memory), 1000}; };
        run_pieces(threads, pieces, [](const void* w, Part part) { (*static_cast<const decltype(work)*>(w))(part); }, &work,
                   i % 2 ? Ahead{range, memory} : Ahead{nullptr, nullptr});
        for (int count : counts) require(count == 1, "every part once");
    }
}

// What the controller decides about a machine of two cores. A call takes a millisecond.
void decisions() {
    TeamSizeController controller;
    int64_t time = 0;
    auto compute = [&](int milliseconds, double waiting, double alone = 0) {
        int64_t least = 2, most = 1;
        for (int i = 0; i < milliseconds; ++i, time += 1'000'000) {
            const int64_t active = controller.active(2);
            least = std::min(least, active), most = std::max(most, active);
            controller.record(time, time + 1'000'000, active == 1 ? 0 : int64_t(waiting * 1e6), int64_t(alone * 1e6));
        }
        return std::pair<int64_t, int64_t>(least, most);
    };
    require(compute(1000, 0.3, 1.2).first == 2, "a thread that gains more than its waits cost stays");
    require(compute(25, 0.3, 0.9).second == 2 && controller.active(2) == 1, "one that costs more is taken out");
    compute(1100, 0.0);
    require(compute(1000, 0.05).first == 2, "small waits change nothing");
    compute(25, 0.5);
    require(controller.active(2) == 1, "large waits take a thread out");
    require(compute(70, 0.5).second == 1, "it stays out for a while");
    require(compute(100, 0.5).second == 2, "then it is tried again");
    compute(5000, 0.5);
    int64_t with_two = 0;
    for (int i = 0; i < 5000; ++i) {
        with_two += controller.active(2) == 2;
        compute(1, 0.5);
    }
    require(with_two < 250, "attempts become rare while they fail");
    compute(1100, 0.0);
    require(compute(1000, 0.0).first == 2, "all threads take part again when the waits are over");
}

// A thread on the CPU of the caller leaves it before its next piece.
void threads_leave_the_callers_cpu() {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) || CPU_COUNT(&allowed) < 2) return;
    divide_pieces(2, 2, [](Part) {});  // starts the other thread, which may run on all CPUs
    const int cpu = sched_getcpu();
    CPU_ZERO(&one);
    CPU_SET(size_t(cpu), &one);
    const pid_t caller = gettid();
    sched_setaffinity(0, sizeof(one), &one);
    std::atomic<int> left{0};
    for (int i = 0; i < 500 && !left.load(); ++i) {
        bool was_moved = false;
        divide_pieces(2, 16, [&](Part) {
            if (gettid() == caller) {
                usleep(500);
            } else if (!was_moved) {
                was_moved = true;
                sched_setaffinity(0, sizeof(one), &one);
                sched_setaffinity(0, sizeof(allowed), &allowed);
            } else if (sched_getcpu() != cpu) {
                left = 1;
            }
        });
    }
    sched_setaffinity(0, sizeof(allowed), &allowed);
    require(left.load(), "a thread leaves the caller's CPU");
}

// Two of the CPUs of a mask with two or more.
std::pair<size_t, size_t> two_cpus(const cpu_set_t& allowed) {
    size_t first = 0;
    while (!CPU_ISSET(first, &allowed)) ++first;
    size_t second = first + 1;
    while (!CPU_ISSET(second, &allowed)) ++second;
    return {first, second};
}

cpu_set_t only(size_t cpu) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(cpu, &mask);
    return mask;
}

// A thread that shares its CPU with other programs finishes its piece on the CPU of the waiting caller. That CPU is not
// idle, so the system does not move the thread: without the caller it comes there in about 2 of 60 calls.
void preempted_threads_come_to_the_caller() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) || CPU_COUNT(&allowed) < 2) return;
    const auto [first, second] = two_cpus(allowed);
    const cpu_set_t here = only(first), there = only(second);
    divide_pieces(2, 2, [](Part) {});
    std::atomic<bool> stop{false};
    std::vector<std::thread> programs;
    for (const cpu_set_t* mask : {&here, &there, &there})
        programs.emplace_back([&stop, mask] {
            sched_setaffinity(0, sizeof(*mask), mask);
            while (!stop.load()) continue;
        });
    sched_setaffinity(0, sizeof(here), &here);
    const pid_t caller = gettid();
    std::atomic<int> came{0};
    for (int i = 0; i < 120 && came.load() < 20; ++i) {
        std::atomic<bool> begun{false};
        divide_pieces(2, 2, [&](Part) {
            if (gettid() == caller) {
                for (int wait = 0; !begun.load() && wait < 1000; ++wait) usleep(100);
                return;
            }
            sched_setaffinity(0, sizeof(there), &there);
            sched_setaffinity(0, sizeof(allowed), &allowed);
            begun = true;
            const ThreadHandle own;
            const int64_t end = own.running_time() + 3'000'000;
            while (own.running_time() < end && sched_getcpu() != int(first)) continue;
            came += sched_getcpu() == int(first);
        });
    }
    stop = true;
    for (std::thread& program : programs) program.join();
    sched_setaffinity(0, sizeof(allowed), &allowed);
    require(came.load() >= 20, "a preempted thread comes to the CPU of the waiting caller");
}

// A thread is moved to and from a CPU of its mask, to no other, and keeps its mask.
void threads_are_moved_within_their_masks() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) || CPU_COUNT(&allowed) < 2) return;
    const auto [first, second] = two_cpus(allowed);
    const cpu_set_t one = only(second);
    std::atomic<const ThreadHandle*> handle{nullptr};
    std::atomic<pid_t> id{0};
    std::atomic<int> cpu{-1};
    std::atomic<bool> stop{false};
    std::thread thread([&] {
        const ThreadHandle own;
        id = gettid();
        handle = &own;
        while (!stop.load()) cpu = sched_getcpu();
    });
    while (!handle.load() || cpu.load() < 0) usleep(100);
    const auto comes_to = [&](size_t wanted) {
        for (int i = 0; i < 1000 && cpu.load() != int(wanted); ++i) usleep(1000);
        return cpu.load() == int(wanted);
    };
    const auto has_mask = [&](const cpu_set_t& expected) {
        cpu_set_t mask;
        return sched_getaffinity(id.load(), sizeof(mask), &mask) == 0 && CPU_EQUAL(&mask, &expected);
    };
    // The system may also move the thread: some of the attempts have to succeed.
    int there = 0;
    for (int i = 0; i < 20; ++i) {
        const size_t cpu = i % 2 ? first : second;
        handle.load()->move_to(int(cpu));
        there += comes_to(cpu);
        handle.load()->move_away_from(int(cpu));
    }
    require(there >= 10, "a thread is moved to the wanted CPU");
    require(has_mask(allowed), "a moved thread keeps its mask");
    require(handle.load()->running_time() > 0, "the running time of a thread is known");
    sched_setaffinity(id.load(), sizeof(one), &one);
    require(comes_to(second), "a thread follows its mask");
    handle.load()->move_to(int(first));
    handle.load()->move_away_from(int(second));
    require(has_mask(one) && cpu.load() == int(second), "a thread stays within its mask");
    stop = true;
    thread.join();
}

}  // namespace

int main() {
    decisions();
    threads_are_moved_within_their_masks();
    preempted_threads_come_to_the_caller();
    threads_leave_the_callers_cpu();
    many_calls(2000);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back([] { many_calls(500); });
    for (std::thread& caller : callers) caller.join();
    const pid_t child = fork();
    if (child == 0) {
        many_calls(100);
        std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "calls in a forked process");
    std::printf("done\n");
}
