// Implementation of thread_team.h: waiting, claiming of pieces, and the number of threads that take part.
//
// Every calling thread has its own team, as in OpenMP, so engines in one process do not share threads.
//
// Waiting. A thread spins for some microseconds, as long as most waits take, and then sleeps. On a busy machine the sleep
// frees the core, and the system moves a thread there that waits for another core.
//
// Placement. If another program uses a CPU, the system preempts a thread there for some milliseconds, possibly in the middle
// of a piece. The other threads move it (thread_placement.h):
//
//   - A worker has unfinished pieces and does not run: the waiting caller moves it to its own CPU and sleeps. The worker
//     finishes there at once and wakes the caller.
//   - The caller does not run: a worker that waits for the next job moves it to its own CPU and sleeps.
//   - A worker may be waiting for the caller's CPU: it leaves that CPU, or the caller moves it away. Otherwise both would
//     share one CPU while another program has the other one, and the system does not soon rebalance that.
//
// A thread does not run if its CPU clock does not advance.
//
// Cache lines. Transferring a line from the thread that writes it to one that reads it takes some 50 to 100 ns, and a decode
// step has some hundred calls. So a call transfers few lines: one to each thread, with the job and the thread's unclaimed
// pieces, which the thread polls for jobs; one back, which counts finished pieces; and the lines of other threads' shares
// when a thread searches for more pieces. All other lines change rarely or are used by the caller only.

#include "thread_team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "team_size_controller.h"
#include "thread_placement.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#endif

// Of torch's OpenMP runtime, which the process has loaded under a name that depends on torch's build. The library is not
// linked to a runtime, since a second one would have threads of its own; without one these are null.
extern "C" {
int omp_in_parallel() __attribute__((weak));
int omp_get_max_threads() __attribute__((weak));
}

namespace mvllm {
namespace {

constexpr int64_t MAX_THREADS = 512;
constexpr int64_t NEIGHBOURS = 4;              // threads whose pieces a thread claims in a full team, itself included
constexpr int64_t PREFETCH_BYTES = 128 << 10;  // bytes that a waiting thread prefetches into its L2 cache
constexpr int64_t SPIN_NS = 50'000;            // time that a waiting thread spins before it sleeps
constexpr int64_t LONG_PIECE_NS = 100'000;     // longer pieces of calls without `ahead` count as compute-bound
constexpr int64_t STANDSTILL_NS = 100'000;     // after this time, a sleeping thread checks whether the awaited thread runs
constexpr int64_t ABSENCE_NS = 500'000;        // time between checks for threads that wait for the caller's CPU
constexpr int64_t USUAL_WAIT_NS = 20'000;      // wait of the calling thread on an idle machine, besides two pieces

int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Lets one thread sleep until another one wakes it.
class Sleeper {
  public:
    // Sleeps unless `ready()` holds, for `limit` nanoseconds at most if it is not 0. May return early.
    template <class Ready>
    void sleep(const Ready& ready, int64_t limit = 0) {
        asleep_.store(1, std::memory_order_seq_cst);
        if (ready()) {
            asleep_.store(0, std::memory_order_relaxed);
            return;
        }
#if defined(__linux__)
        const timespec relative{0, long(limit)};
        syscall(SYS_futex, &asleep_, FUTEX_WAIT_PRIVATE, 1, limit ? &relative : nullptr, nullptr, 0);
#else
        std::unique_lock<std::mutex> hold(lock_);
        const auto woken = [&] { return asleep_.load() == 0; };
        if (limit) changed_.wait_for(hold, std::chrono::nanoseconds(limit), woken);
        else changed_.wait(hold, woken);
#endif
        asleep_.store(0, std::memory_order_relaxed);
    }

    // Called after the values that `ready` reads have been stored (seq_cst).
    void wake() {
        if (!asleep_.load(std::memory_order_seq_cst) || !asleep_.exchange(0)) return;
#if defined(__linux__)
        syscall(SYS_futex, &asleep_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
#else
        const std::lock_guard<std::mutex> hold(lock_);
        changed_.notify_one();
#endif
    }

    bool is_asleep() const { return asleep_.load(std::memory_order_relaxed) != 0; }

  private:
    alignas(LINE) std::atomic<uint32_t> asleep_{0};
#if !defined(__linux__)
    std::mutex lock_;
    std::condition_variable changed_;
#endif
};

// Prefetches the next lines of `range`.
void prefetch_some(Range& range) {
    for (int i = 0; i < 4 && range.size > 0; ++i, range.begin += LINE, range.size -= LINE)
        __builtin_prefetch(range.begin, 0, 2);
}

// Spins until `done()` holds; false after `limit` nanoseconds.
template <class Done>
bool spin(const Done& done, int64_t limit, Range& prefetch) {
    if (done()) return true;
    const int64_t begin = now_ns();
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            if (prefetch.size > 0) prefetch_some(prefetch);
            else relax();
        }
    } while (now_ns() - begin < limit);
    return false;
}

bool adapts() {
    static const bool value = [] {
        const char* asked = std::getenv("MVLLM_CPU_ADAPTIVE_THREADS");
        return !asked || std::strcmp(asked, "0") != 0;
    }();
    return value;
}

std::atomic<int> threads_in_use{0};  // by the team that computed last; 0 before the first call

thread_local bool in_piece = false;

struct Job {
    void (*function)(const void* work, Part part);
    const void* work;
    int64_t threads, pieces;
    Ahead ahead;
};

class Team {
  public:
    ~Team() {
        stop_.store(true, std::memory_order_seq_cst);
        for (auto& worker : workers_) worker->sleeper.wake();
        for (auto& worker : workers_) worker->thread.join();
    }

    void run(const Job& job) {
        const int64_t threads = std::min(job.threads, available(job.threads));
        const int64_t active = adapts() ? controller_.active(threads) : threads;
        store_if_changed(threads_in_use, int(active));
        const int64_t begin = now_ns(), total = job.threads * job.pieces;
        if (active == 1) {
            for (int64_t i = 0; i < total; ++i) call(job, Part{i, total, i == 0});
            if (threads > 1 && adapts()) controller_.record(begin, now_ns(), 0);
            return;
        }
        const bool cpu_changed = store_if_changed(caller_cpu_, current_cpu());
        post(job, active);
        Range prefetch{nullptr, 0};
        const int64_t mine = execute(0, job.threads, prefetch).pieces;
        expected_ += total - mine;
        auto finished = [&] { return completed_.load(std::memory_order_seq_cst) == expected_; };
        const int64_t claimed = now_ns();
        int64_t end = claimed;
        if (!finished()) {
            await(finished, active, prefetch);
            end = now_ns();
        }
        if (!adapts()) return;
        move_absent_workers(end, active, cpu_changed);
        const int64_t piece = (claimed - begin) / std::max<int64_t>(1, mine);
        const int64_t alone = !job.ahead.range && piece >= LONG_PIECE_NS ? piece * total : 0;
        controller_.record(begin, end, std::max<int64_t>(0, end - claimed - USUAL_WAIT_NS - 2 * piece), alone);
    }

  private:
    struct Worker {
        Sleeper sleeper;
        std::thread thread;
        // Number of the worker's last job << 1 | whether it executes pieces. The caller reads it only when it waits.
        alignas(LINE) std::atomic<uint64_t> state{0};
        std::unique_ptr<const ThreadHandle> handle;  // written before the first state

        // Used by the caller only.
        alignas(LINE) uint64_t last_state = 0;
        int64_t last_running_time = -1;
        bool is_moved_here = false;  // to the caller's CPU

        bool executes() const { return state.load(std::memory_order_acquire) & 1; }
    };

    // Waits until all pieces of the job are done.
    template <class Finished>
    void await(const Finished& finished, int64_t active, Range& prefetch) {
        if (spin(finished, SPIN_NS / 2, prefetch)) return;
        if (adapts()) note_running_times(active);
        if (spin(finished, SPIN_NS / 2, prefetch)) return;
        do {
            awaited_.store(expected_, std::memory_order_seq_cst);
            if (adapts()) move_preempted_workers(active);
            caller_.sleep(finished, adapts() ? STANDSTILL_NS : 0);
        } while (!finished());
        for (int64_t i = 1; i < active; ++i) {
            Worker& worker = *workers_[size_t(i - 1)];
            if (worker.is_moved_here) worker.handle->move_away_from(current_cpu());
            worker.is_moved_here = false;
        }
    }

    void note_running_times(int64_t active) {
        for (int64_t i = 1; i < active; ++i) {
            Worker& worker = *workers_[size_t(i - 1)];
            worker.last_running_time = worker.executes() ? worker.handle->running_time() : -1;
        }
    }

    // Moves threads that have unfinished pieces and have not run since the last check to this CPU.
    void move_preempted_workers(int64_t active) {
        for (int64_t i = 1; i < active; ++i) {
            Worker& worker = *workers_[size_t(i - 1)];
            const int64_t time = worker.executes() ? worker.handle->running_time() : -1;
            if (time >= 0 && time == worker.last_running_time) {
                worker.handle->move_to(current_cpu());
                worker.is_moved_here = true;
            }
            worker.last_running_time = time;
        }
    }

    // Moves threads away from this CPU if they may be waiting for it: they have not begun this job, and either this thread
    // has just come to this CPU, or they have not begun any job for some time.
    void move_absent_workers(int64_t now, int64_t active, bool cpu_changed) {
        if (now < next_check_ && !cpu_changed) return;
        next_check_ = now + ABSENCE_NS;
        for (int64_t i = 1; i < active; ++i) {
            Worker& worker = *workers_[size_t(i - 1)];
            const uint64_t state = worker.state.load(std::memory_order_acquire);
            const bool is_absent = uint32_t(state >> 1) != generation_ && (cpu_changed || state == worker.last_state);
            if (state && is_absent && !worker.sleeper.is_asleep()) worker.handle->move_away_from(current_cpu());
            worker.last_state = state;
        }
    }

    // Flag of jobs in which the owner of a share claims half of its remaining pieces at once. A claim waits for all earlier
    // memory accesses, which is expensive in recorded calls: they are memory-bound, with short pieces. In other calls a
    // preempted thread should hold one piece only.
    static constexpr uint64_t IN_HALVES = uint64_t(1) << 31;

    static int64_t left_of(uint64_t unclaimed) { return int64_t(unclaimed & (IN_HALVES - 1)); }

    // One thread's share of a job. `job` is read only after a piece has been claimed, so while the job runs.
    struct alignas(LINE) Share {
        std::atomic<uint64_t> unclaimed{0};  // number of the job << 32 | IN_HALVES or 0 | pieces that nobody has claimed
        Job job{};                           // the same in all shares
    };
    static_assert(sizeof(Share) == LINE, "one line for each thread");

    static void call(const Job& job, Part part) {
        in_piece = true;
        job.function(job.work, part);
        in_piece = false;
    }

    // Starts missing threads; returns the number of threads, including the caller.
    int64_t available(int64_t wanted) {
        while (int64_t(workers_.size()) + 1 < wanted) {
            auto worker = std::make_unique<Worker>();
            const int64_t number = int64_t(workers_.size()) + 1;
            try {
#if defined(__unix__) || defined(__APPLE__)
                sigset_t all, before;  // the program's own threads handle signals
                sigfillset(&all);
                pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
                worker->thread = std::thread([this, number, own = worker.get()] { work(number, *own); });
#if defined(__unix__) || defined(__APPLE__)
                pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
            } catch (const std::system_error&) {
#if defined(__unix__) || defined(__APPLE__)
                sigset_t none;
                sigemptyset(&none);
                pthread_sigmask(SIG_SETMASK, &none, nullptr);
#endif
                break;  // the system has no more threads; the existing ones do the work
            }
            workers_.push_back(std::move(worker));
        }
        return int64_t(workers_.size()) + 1;
    }

    template <class Value>
    static bool store_if_changed(std::atomic<Value>& to, Value value) {
        const bool changed = to.load(std::memory_order_relaxed) != value;
        if (changed) to.store(value, std::memory_order_relaxed);
        return changed;
    }

    void post(const Job& job, int64_t active) {
        store_if_changed(active_, active);
        store_if_changed(owners_, std::max(owners_.load(std::memory_order_relaxed), job.threads));
        const uint64_t how = job.ahead.range ? IN_HALVES : 0;
        const uint64_t unclaimed = uint64_t(++generation_) << 32 | how | uint64_t(job.pieces);
        for (int64_t i = job.threads - 1; i >= 0; --i) {
            shares_[i].job = job;
            shares_[i].unclaimed.store(unclaimed, std::memory_order_release);
        }
        // The fence ensures that a thread that goes to sleep sees its share, or the caller sees that the thread sleeps.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) == 0) return;
        for (int64_t i = 1; i < active; ++i) workers_[size_t(i - 1)]->sleeper.wake();
    }

    struct Pieces {
        int64_t first, count;
    };

    // Claims pieces of a share. They belong to the current job: a job ends only when all its pieces are done, and its data
    // are written before its pieces can be claimed.
    static Pieces claim(Share& share, bool own) {
        std::atomic<uint64_t>& unclaimed = share.unclaimed;
        uint64_t value = unclaimed.load(std::memory_order_relaxed);
        while (const int64_t left = left_of(value)) {
            const int64_t count = own && value & IN_HALVES ? (left + 1) / 2 : 1;
            if (unclaimed.compare_exchange_weak(value, value - uint64_t(count), std::memory_order_acquire,
                                                std::memory_order_relaxed))
                return {share.job.pieces - left, count};
        }
        return {0, 0};
    }

    // Whether this worker runs on the caller's CPU while the caller is ready to run.
    bool displaces_caller() const {
        const int cpu = caller_cpu_.load(std::memory_order_relaxed);
        return cpu >= 0 && current_cpu() == cpu && !caller_.is_asleep();
    }

    struct Executed {
        int64_t pieces;
        bool displaces_caller;  // the worker stopped before all pieces were claimed
    };

    // Executes pieces, first of the thread's own share, then of other shares.
    Executed execute(int64_t thread, int64_t owners, Range& prefetch) {
        const bool full = active_.load(std::memory_order_relaxed) >= owners;
        const int64_t searched = thread == 0 || !full ? owners : std::min(owners, NEIGHBOURS);
        int64_t done = 0;
        bool displaces = false;
        const Job* job = nullptr;
        for (int64_t i = 0; i < searched && !displaces; ++i) {
            const int64_t owner = (thread + i) % owners;
            Share& share = shares_[owner];
            while (!displaces) {
                const Pieces claimed = claim(share, i == 0);
                if (!claimed.count) break;
                job = &share.job;
                const int64_t begin = owner * job->pieces + claimed.first;
                for (int64_t piece = begin; piece < begin + claimed.count; ++piece, ++done)
                    call(*job, Part{piece, job->threads * job->pieces, done == 0});
                displaces = thread != 0 && displaces_caller();
            }
        }
        if (!done) return {0, false};
        if (job->ahead.range) {
            prefetch = job->ahead.range(job->ahead.work, thread, job->threads);
            prefetch.size = std::min(prefetch.size, PREFETCH_BYTES);
        }
        if (thread == 0) return {done, false};  // only the caller waits for its own pieces
        const int64_t completed = completed_.fetch_add(done, std::memory_order_seq_cst) + done;
        if (completed == awaited_.load(std::memory_order_seq_cst)) {
            caller_.wake();
            displaces = displaces_caller();
        }
        return {done, displaces};
    }

    // Moves the caller to this CPU if it has not run since `before`, once in each job. The caller may also be waiting for
    // something else; then it does not change its CPU.
    void move_preempted_caller(uint32_t job, int64_t before) {
        if (caller_.is_asleep() || before < 0 || caller_handle_.running_time() != before) return;
        if (caller_moved_in_.exchange(job, std::memory_order_relaxed) != job) caller_handle_.move_to(current_cpu());
    }

    void work(int64_t thread, Worker& own) {
#if defined(__linux__)
        pthread_setname_np(pthread_self(), "mvllm-kernels");
#endif
        own.handle = std::make_unique<ThreadHandle>();
        std::atomic<uint64_t>& unclaimed = shares_[thread].unclaimed;
        uint32_t seen = 0;
        Range prefetch{nullptr, 0};
        auto changed = [&] {
            const bool posted = uint32_t(unclaimed.load(std::memory_order_seq_cst) >> 32) != seen;
            return posted || stop_.load(std::memory_order_seq_cst);
        };
        while (!stop_.load(std::memory_order_relaxed)) {
            const bool takes_part = thread < active_.load(std::memory_order_relaxed);
            if (!changed() && !(takes_part && spin(changed, SPIN_NS, prefetch))) {
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                if (takes_part && adapts()) {
                    const int64_t before = caller_handle_.running_time();
                    own.sleeper.sleep(changed, STANDSTILL_NS);
                    if (!changed()) move_preempted_caller(seen, before);
                }
                own.sleeper.sleep(changed);
                sleeping_.fetch_sub(1, std::memory_order_relaxed);
                continue;
            }
            seen = uint32_t(unclaimed.load(std::memory_order_acquire) >> 32);
            prefetch = {nullptr, 0};
            bool displaces = displaces_caller();
            while (thread < active_.load(std::memory_order_relaxed)) {
                if (displaces) own.handle->move_away_from(caller_cpu_.load(std::memory_order_relaxed));
                own.state.store(uint64_t(seen) << 1 | 1, std::memory_order_release);
                displaces = execute(thread, owners_.load(std::memory_order_relaxed), prefetch).displaces_caller;
                own.state.store(uint64_t(seen) << 1, std::memory_order_release);
                if (!displaces) break;
            }
        }
    }

    // Rarely written.
    alignas(LINE) std::atomic<int64_t> active_{1}, owners_{0};
    std::atomic<int64_t> awaited_{-1};  // the value of `completed_` that the caller sleeps for
    std::atomic<int> caller_cpu_{-1};
    std::atomic<bool> stop_{false};
    const std::unique_ptr<Share[]> shares_{new Share[size_t(MAX_THREADS)]};

    alignas(LINE) std::atomic<int64_t> completed_{0};  // pieces of all jobs, except those of the caller
    alignas(LINE) std::atomic<int64_t> sleeping_{0};
    Sleeper caller_;

    std::atomic<uint32_t> caller_moved_in_{0};  // the last job in which a worker has moved the caller
    const ThreadHandle caller_handle_;

    // Used by the caller only.
    alignas(LINE) uint32_t generation_ = 0;
    int64_t next_check_ = 0;  // for absent workers
    int64_t expected_ = 0;  // value of `completed_` at the end of the job
    std::vector<std::unique_ptr<Worker>> workers_;
    TeamSizeController controller_;
};

std::atomic<int> forks{0};

// The team of a calling thread. A forked child has none of its threads, so it creates a new team.
struct TeamOfThread {
    Team* team = nullptr;
    int made_after = 0;

    Team& get() {
        static const bool registered = [] {
#if defined(__unix__) || defined(__APPLE__)
            pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
#endif
            return true;
        }();
        (void)registered;
        if (!team || made_after != forks.load(std::memory_order_relaxed)) {
            team = new Team;  // a team from before a fork is not deleted: its threads cannot be joined
            made_after = forks.load(std::memory_order_relaxed);
        }
        return *team;
    }

    ~TeamOfThread() {
        if (team && made_after == forks.load()) delete team;
    }
};

thread_local TeamOfThread own_team;

}  // namespace

int team_size() {
    if (in_piece || (omp_in_parallel && omp_in_parallel())) return 1;
    const int64_t threads = omp_get_max_threads ? omp_get_max_threads() : std::thread::hardware_concurrency();
    return int(std::clamp<int64_t>(threads, 1, MAX_THREADS));
}

void run_pieces(int64_t threads, int64_t pieces, void (*function)(const void* work, Part part), const void* work, Ahead ahead) {
    if (threads <= 1 || in_piece) {
        for (int64_t i = 0, count = threads * pieces; i < count; ++i) function(work, Part{i, count, i == 0});
        return;
    }
    own_team.get().run(Job{function, work, std::min(threads, MAX_THREADS), pieces, ahead});
}

}  // namespace mvllm

extern "C" {

// Number of threads that took part in the last divided call; 0 before the first one.
int mvllm_cpu_threads_in_use() { return mvllm::threads_in_use.load(std::memory_order_relaxed); }

// Whether the number of threads adapts to the load of the machine.
int mvllm_cpu_threads_adapt() { return mvllm::adapts(); }

}  // extern "C"
