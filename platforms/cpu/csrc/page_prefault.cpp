// A background thread that writes to the pages of a fresh KV cache while no kernel runs.
//
// The operating system allocates a page when it is first written, and on a virtual machine that can take milliseconds
// for two megabytes: as long as computing what is stored there. The thread touches the front of the cache, from which
// blocks are allocated first.
//
// The thread holds a lock while it touches a piece (PIECE bytes), so a caller that cancels waits for one piece at most.
// A step that starts meanwhile does not wait; it shares the cores with the rest of one piece.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__)
#include <unistd.h>
#endif

#include "team.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t PIECE = 2 << 20;
constexpr int64_t PAGE = 4096;  // on systems with larger pages, each is touched several times
constexpr auto QUIET = std::chrono::milliseconds(200);  // time without a kernel before the thread works

std::atomic<int64_t> last_use{0};

int64_t now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

struct Range {
    char* begin;
    int64_t size, touched;
};

class PagePrefaulter {
  public:
    void add(char* begin, int64_t size, int64_t max_bytes) {
        const PriorityLock hold(*this);
        ranges_.push_back({begin, size, 0});
        left_ = max_bytes;
        if (!started_) started_ = start();
        wake_.notify_one();
    }

    void remove(const char* begin) {
        const PriorityLock hold(*this);
        ranges_.remove_if([&](const Range& range) { return range.begin == begin; });
    }

    // After it returns, no memory is touched.
    void stop() {
        const PriorityLock hold(*this);
        ranges_.clear();
    }

    int64_t touched(const char* begin) {
        const PriorityLock hold(*this);
        for (const Range& range : ranges_)
            if (range.begin == begin) return range.touched;
        return -1;
    }

  private:
    // Holds the lock; the background thread yields to callers that wait for it.
    class PriorityLock {
      public:
        explicit PriorityLock(PagePrefaulter& owner) : owner_(owner) {
            owner_.num_waiting_.fetch_add(1);
            owner_.lock_.lock();
        }
        ~PriorityLock() {
            owner_.lock_.unlock();
            owner_.num_waiting_.fetch_sub(1);
        }

      private:
        PagePrefaulter& owner_;
    };

    // Starts the thread. False if the system has no thread for it; then pages are allocated at first use.
    bool start() {
        try {
            std::thread([this] { work(); }).detach();
            return true;
        } catch (const std::system_error&) {
            return false;
        }
    }

    // The range with the fewest touched bytes; null if all ranges are touched or `left_` is used up.
    Range* next() {
        Range* found = nullptr;
        for (Range& range : ranges_)
            if (range.touched < range.size && (!found || range.touched < found->touched)) found = &range;
        return left_ > 0 ? found : nullptr;
    }

    void work() {
        for (;;) {
            while (num_waiting_.load()) std::this_thread::yield();
            std::unique_lock<std::mutex> hold(lock_);
            wake_.wait(hold, [&] { return next() != nullptr; });
            const auto quiet = std::chrono::nanoseconds(now() - last_use.load(std::memory_order_relaxed));
            if (quiet < QUIET) {
                hold.unlock();
                std::this_thread::sleep_for(QUIET - quiet);
                continue;
            }
            Range& range = *next();
            const int64_t end = range.size - range.touched < PIECE ? range.size : range.touched + PIECE;
            for (int64_t at = range.touched; at < end; at += PAGE) touch(range.begin + at);
            left_ -= end - range.touched;
            range.touched = end;
        }
    }

    // Writes back the byte's value, unless another thread writes it meanwhile, which allocates the page as well.
    static void touch(char* at) {
        char found = __atomic_load_n(at, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(at, &found, found, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }

    std::atomic<int> num_waiting_{0};
    std::mutex lock_;
    std::condition_variable wake_;
    std::list<Range> ranges_;
    int64_t left_ = 0;
    bool started_ = false;
};

// Never destroyed, because its thread runs until the process exits. A forked child has a copy of the memory, but
// neither the thread nor an owner of the lock; it creates a new object.
PagePrefaulter& prefaulter() {
    static PagePrefaulter* made = new PagePrefaulter;
#if defined(__unix__)
    static pid_t owner = getpid();
    if (owner != getpid()) made = new PagePrefaulter, owner = getpid();
#endif
    return *made;
}

}  // namespace

namespace mvllm {

void record_kernel_use() { last_use.store(now(), std::memory_order_relaxed); }

}  // namespace mvllm

extern "C" {

// Touches `size` bytes from `begin` on in the background, and at most `max_bytes` of all ranges from now on. The memory
// must stay allocated until mvllm_cpu_prefault_cancel is called.
void mvllm_cpu_prefault(void* begin, int64_t size, int64_t max_bytes) {
    mvllm::record_kernel_use();  // a program that allocates may be about to compute
    prefaulter().add(static_cast<char*>(begin), size, max_bytes);
}

// Cancels the range that starts at `begin`.
void mvllm_cpu_prefault_cancel(const void* begin) { prefaulter().remove(static_cast<const char*>(begin)); }

// Cancels all ranges.
void mvllm_cpu_prefault_stop() { prefaulter().stop(); }

// Number of touched bytes of the range that starts at `begin`; -1 if there is no such range.
int64_t mvllm_cpu_prefaulted_bytes(const void* begin) { return prefaulter().touched(static_cast<const char*>(begin)); }

}  // extern "C"
