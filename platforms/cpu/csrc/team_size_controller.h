// Adapts the number of threads of a team to the load of the machine.
//
// If other programs use the cores, the system may preempt a thread in the middle of a piece; the other threads then wait for
// up to a time slice. The team measures how long the calling thread waits for claimed pieces, beyond the usual
// difference between threads. If this is a large share of the computing time, fewer threads take part for a while. Then
// more threads are tried again, at intervals that double while the attempts fail.
//
// A thread that is often preempted may still contribute more than its waits cost. For compute-bound calls, the time with
// fewer threads is estimated as the time of all pieces at the caller's speed, divided by the number of threads; the team
// shrinks only if the estimate is less than the measured time. For memory-bound calls fewer threads are nearly as fast, so
// only the share of waits counts.

#pragma once

#include <algorithm>
#include <cstdint>

namespace mvllm {

constexpr int64_t WINDOW_NS = 20'000'000;      // computing time between two decisions about the number of threads
constexpr int64_t SHORTEST_HOLD_NS = 100'000'000, LONGEST_HOLD_NS = 1'000'000'000;  // time before more threads are tried
constexpr double MOST_WAITING = 0.25;          // share of the computing time; one thread takes 1.2 to 1.8 times as long as two

// Computes the number of threads that take part in calls.
class TeamSizeController {
  public:
    // How many of `threads` threads take part in a call.
    int64_t active(int64_t threads) {
        if (threads > threads_) {
            active_ += threads - threads_;
            threads_ = threads;
        }
        return std::min(active_, threads);
    }

    // Records the time of a call, and the time that the calling thread waited beyond the usual. `alone`: estimated time of
    // the calling thread alone if the call is compute-bound; 0 if it may be memory-bound.
    void record(int64_t begin, int64_t end, int64_t waited, int64_t alone = 0) {
        const int64_t step = std::max<int64_t>(1, threads_ / 8), fewer = std::max<int64_t>(1, active_ - step);
        computed_ += end - begin;
        waited_ += waited;
        with_fewer_ += alone ? alone / fewer : end - begin - waited;
        if (computed_ < WINDOW_NS) return;
        const bool stalled = double(waited_) > MOST_WAITING * double(computed_) && computed_ > with_fewer_;
        computed_ = waited_ = with_fewer_ = 0;
        if (stalled && active_ > 1) {
            active_ = fewer;
            hold_ = trying_ ? std::min(2 * hold_, LONGEST_HOLD_NS) : SHORTEST_HOLD_NS;
            hold_until_ = end + hold_;
            trying_ = false;
        } else if (active_ < threads_ && end >= hold_until_) {
            active_ = std::min(threads_, active_ + step);
            trying_ = true;
        } else if (!stalled && active_ == threads_) {
            trying_ = false;
        }
    }

  private:
    int64_t threads_ = 0, active_ = 0;
    int64_t computed_ = 0, waited_ = 0;
    int64_t with_fewer_ = 0;  // estimated computing time with fewer threads
    int64_t hold_ = SHORTEST_HOLD_NS, hold_until_ = 0;
    bool trying_ = false;  // whether more threads take part as a trial
};

}  // namespace mvllm
