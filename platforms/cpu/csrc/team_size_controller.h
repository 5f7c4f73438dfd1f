// How many threads of a team take part in calls.
//
// If other programs use the cores, a thread that stopped within a piece holds up the others for a time
// slice of the system. The team measures that: the time that the calling thread waits for claimed pieces, beyond the usual
// difference between threads. If it is a large share of the computing time, fewer threads take part for a while; then more
// are tried again, after intervals that double while the attempts fail.

#pragma once

#include <algorithm>
#include <cstdint>

namespace mvllm {

constexpr int64_t WINDOW_NS = 20'000'000;      // computing time between two decisions about the number of threads
constexpr int64_t SHORTEST_HOLD_NS = 100'000'000, LONGEST_HOLD_NS = 1'000'000'000;  // before more threads are tried
constexpr double MOST_WAITING = 0.15;          // share of the computing time

// Decides how many threads take part.
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

    // Records a call: its time, and how long the calling thread waited beyond what is usual.
    void record(int64_t begin, int64_t end, int64_t waited) {
        computed_ += end - begin;
        waited_ += waited;
        if (computed_ < WINDOW_NS) return;
        const bool stalled = double(waited_) > MOST_WAITING * double(computed_);
        computed_ = waited_ = 0;
        const int64_t step = std::max<int64_t>(1, threads_ / 8);
        if (stalled && active_ > 1) {
            active_ = std::max<int64_t>(1, active_ - step);
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
    int64_t hold_ = SHORTEST_HOLD_NS, hold_until_ = 0;
    bool trying_ = false;  // whether more threads take part to see how it goes
};

}  // namespace mvllm
