// Memory is handed out by the operating system page by page, when it is first written, and on a virtual machine that can
// take milliseconds for two megabytes: as long as it takes to compute what is stored there. So a thread of its own touches
// the front of a fresh KV cache, which is where blocks are taken from first, while nobody computes.
//
// It holds a lock while it touches a piece, so whoever wants memory back waits for one piece. A step that begins meanwhile
// waits for nobody: it shares the cores with what is left of one piece.

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
constexpr int64_t PAGE = 4096;  // or more: then some are touched twice
constexpr auto QUIET = std::chrono::milliseconds(200);  // since the last step's kernel

std::atomic<int64_t> last_use{0};

int64_t now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

struct Range {
    char* begin;
    int64_t size, touched;
};

class PageToucher {
  public:
    void add(char* begin, int64_t size, int64_t most) {
        const Asking hold(*this);
        ranges_.push_back({begin, size, 0});
        left_ = most;
        if (!started_) started_ = start();
        wake_.notify_one();
    }

    void remove(const char* begin) {
        const Asking hold(*this);
        ranges_.remove_if([&](const Range& range) { return range.begin == begin; });
    }

    // Returns when no memory will be touched any more.
    void stop() {
        const Asking hold(*this);
        ranges_.clear();
    }

    int64_t touched(const char* begin) {
        const Asking hold(*this);
        for (const Range& range : ranges_)
            if (range.begin == begin) return range.touched;
        return -1;
    }

  private:
    // The lock of somebody from outside, who goes first.
    class Asking {
      public:
        explicit Asking(PageToucher& of) : of_(of) {
            of_.asking_.fetch_add(1);
            of_.lock_.lock();
        }
        ~Asking() {
            of_.lock_.unlock();
            of_.asking_.fetch_sub(1);
        }

      private:
        PageToucher& of_;
    };

    // Whether there is a thread to be had; without one, whoever uses memory first claims it.
    bool start() {
        try {
            std::thread([this] { work(); }).detach();
            return true;
        } catch (const std::system_error&) {
            return false;
        }
    }

    // The range of which least has been touched; null where all has been, or enough.
    Range* next() {
        Range* found = nullptr;
        for (Range& range : ranges_)
            if (range.touched < range.size && (!found || range.touched < found->touched)) found = &range;
        return left_ > 0 ? found : nullptr;
    }

    void work() {
        for (;;) {
            while (asking_.load()) std::this_thread::yield();
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
            for (int64_t at = range.touched; at < end; at += PAGE) write_again(range.begin + at);
            left_ -= end - range.touched;
            range.touched = end;
        }
    }

    // Stores what is there, unless somebody stores something else meanwhile: then the page is there, too.
    static void write_again(char* at) {
        char found = __atomic_load_n(at, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(at, &found, found, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }

    std::atomic<int> asking_{0};
    std::mutex lock_;
    std::condition_variable wake_;
    std::list<Range> ranges_;
    int64_t left_ = 0;
    bool started_ = false;
};

// Never destroyed: its thread outlives whatever else ends with the process. A child that was forked has the memory but
// not the thread, and perhaps a lock that nobody holds; it begins anew.
PageToucher& toucher() {
    static PageToucher* made = new PageToucher;
#if defined(__unix__)
    static pid_t owner = getpid();
    if (owner != getpid()) made = new PageToucher, owner = getpid();
#endif
    return *made;
}

}  // namespace

namespace mvllm {

void note_use() { last_use.store(now(), std::memory_order_relaxed); }

}  // namespace mvllm

extern "C" {

// Touches `size` bytes from `begin` on when there is time for it, no more than `most` bytes of all that was given
// here from now on. They must stay until they are taken back.
void mvllm_cpu_touch_later(void* begin, int64_t size, int64_t most) {
    mvllm::note_use();  // who allocates may be about to compute
    toucher().add(static_cast<char*>(begin), size, most);
}

// Takes memory back that `mvllm_cpu_touch_later` was given.
void mvllm_cpu_touch_no_more(const void* begin) { toucher().remove(static_cast<const char*>(begin)); }

// Takes all memory back.
void mvllm_cpu_touch_stop() { toucher().stop(); }

// How many bytes of what was given have been touched; -1 of what was not given.
int64_t mvllm_cpu_touched(const void* begin) { return toucher().touched(static_cast<const char*>(begin)); }

}  // extern "C"
