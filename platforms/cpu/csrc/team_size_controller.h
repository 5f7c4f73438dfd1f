// How many threads of a team take part in calls.
//
// If other programs use the cores, a thread that stopped within a piece holds up the others for a time
// slice of the system. The team measures that: the time that the calling thread waits for claimed pieces, beyond the usual
// difference between threads. If it is a large share of the computing time, fewer threads take part for a while; then more
// are tried again, after intervals that double while the attempts fail.
//
// A thread that stops often may still do more than its waits cost. For calls that compute, fewer threads would need the
// time of all pieces at the caller's pace, divided among them; they take over only if that is less than the calls took.
// Calls that read memory are different: fewer threads read nearly as fast, so there the share of waits decides alone.

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

    // Records a call: its time, and how long the calling thread waited beyond what is usual. `alone`: what the calling
    // thread alone would have taken, if computing bounds the call; 0 if memory may.
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
    int64_t with_fewer_ = 0;  // what fewer threads would have taken
    int64_t hold_ = SHORTEST_HOLD_NS, hold_until_ = 0;
    bool trying_ = false;  // whether more threads take part to see how it goes
};

}  // namespace mvllm
