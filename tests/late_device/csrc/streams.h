// Streams of the late device: each is a thread with a queue. See the note at the top of `device.cpp`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

namespace late {

constexpr int kDevices = 2;
constexpr int kStreams = 33;  // of each device: the default one, and as many others as CUDA's pool has

// The first error of a kernel. The host sees it when it next waits, as on a real device.
struct Fault {
  std::mutex mutex;
  std::string text;

  void note(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex);
    if (text.empty()) text = what;
  }
  void raise() {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(text.empty(), "a kernel of the late device failed: ", std::exchange(text, ""));
  }
};
inline Fault& fault() {
  static Fault* one = new Fault();
  return *one;
}

inline std::atomic<uint64_t> num_submitted{0};  // on all streams

class Stream {
 public:
  Stream(int device, int id) : device(device), id(id), random_(id) {
    std::thread([this] { work(); }).detach();
  }

  // Queue work. What counts as an operator or a copy is late; bookkeeping is not.
  uint64_t submit(std::function<void()> run, bool is_late) {
    ++num_submitted;
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({std::move(run), is_late});
    changed_.notify_all();
    return ++submitted_;
  }
  uint64_t submitted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return submitted_;
  }
  bool is_done(uint64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_ >= ticket;
  }
  // A held stream runs only what somebody wants.
  void want(uint64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (wanted_ < ticket) wanted_ = ticket;
    changed_.notify_all();
  }
  void finish(uint64_t ticket) {
    want(ticket);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return completed_ >= ticket; });
  }
  // Each operator waits for `fixed` microseconds and up to `random` more.
  void set_lag(int64_t fixed, int64_t random, uint64_t seed) {
    std::lock_guard<std::mutex> lock(mutex_);
    fixed_ = fixed, random_limit_ = random;
    random_.seed(seed * kStreams + id);
  }
  void set_held(bool held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }

  const int device, id;

 private:
  struct Item {
    std::function<void()> run;
    bool is_late;
  };

  void work() {
    for (;;) {
      Item item;
      int64_t lag = 0;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty() && (!held_ || completed_ < wanted_); });
        item = std::move(queue_.front());
        queue_.pop_front();
        if (item.is_late) lag = fixed_ + (random_limit_ ? int64_t(random_() % uint64_t(random_limit_ + 1)) : 0);
      }
      if (lag) std::this_thread::sleep_for(std::chrono::microseconds(lag));
      try {
        item.run();
        item.run = nullptr;
      } catch (const std::exception& error) {
        fault().note(error.what());
      }
      std::lock_guard<std::mutex> lock(mutex_);
      ++completed_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  uint64_t submitted_ = 0, completed_ = 0, wanted_ = 0;
  bool held_ = false;
  int64_t fixed_ = 0, random_limit_ = 0;
  std::mt19937_64 random_;
};

// Never destroyed: their threads may outlive everything else.
inline Stream& stream(int device, int id) {
  static std::mutex mutex;
  static Stream* all[kDevices][kStreams] = {};
  std::lock_guard<std::mutex> lock(mutex);
  Stream*& one = all[device][id];
  if (!one) one = new Stream(device, id);
  return *one;
}

// What a thread computes on.
inline thread_local int current_device = 0;
inline thread_local int current_ids[kDevices] = {};
inline Stream& current(int device) {
  return stream(device, current_ids[device]);
}

// A mark in a stream.
struct Event {
  Stream* on = nullptr;
  uint64_t ticket = 0;
  std::atomic<int> polls{0};
  std::atomic<uint64_t> seen{0};
  std::atomic<double> seconds{0};

  bool is_done() {
    if (!on || on->is_done(ticket)) return true;
    // Whoever asks again and again while nothing is queued waits by asking.
    if (seen.exchange(num_submitted) != num_submitted) polls = 0;
    if (++polls > 20) on->want(ticket);
    return false;
  }
  void finish() {
    if (on) on->finish(ticket);
  }
};

// Order what is queued on a stream from now on after a mark in another.
inline void order(Stream& later, Stream& earlier, uint64_t ticket) {
  if (&later == &earlier) return;
  later.submit([&earlier, ticket] { earlier.finish(ticket); }, false);
}

inline void synchronise(int device) {
  for (int id = 0; id < kStreams; ++id) stream(device, id).finish(stream(device, id).submitted());
  fault().raise();
}

}  // namespace late
