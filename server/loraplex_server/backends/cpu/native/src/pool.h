// Threads that share out the chunks of one job after the other.
//
// A step is some hundred short jobs, so workers wait for the next one spinning, and only for a moment: then they sleep.
// Chunks are taken one by one, so that a thread whose core is busy with something else holds up one chunk, not the job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lp {

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(chunk, thread) for every chunk in 0..num_chunks, on this thread too; returns when all are done. One job at a
  // time: callers take turns.
  template <class Body>
  void run(int num_chunks, const Body& body) {
    if (num_chunks <= 0) return;
    if (num_chunks == 1 || workers_.empty() || is_inherited()) {
      for (int chunk = 0; chunk < num_chunks; chunk++) body(chunk, 0);
      return;
    }
    share([](const void* job, int chunk, int thread) { (*static_cast<const Body*>(job))(chunk, thread); }, &body,
          num_chunks);
  }

  std::unique_lock<std::mutex> take_turn() {
    return is_inherited() ? std::unique_lock<std::mutex>() : std::unique_lock<std::mutex>(turn_);
  }

 private:
  using Function = void (*)(const void*, int chunk, int thread);

  // In a process that was forked from the pool's: its threads are not there, and its locks may be held by them for ever.
  bool is_inherited() const { return num_forks_ != num_forks().load(std::memory_order_relaxed); }
  static std::atomic<int>& num_forks();

  void share(Function function, const void* job, int num_chunks);
  bool take_one(int thread);
  void work(int thread);

  // The job's number of chunks in the upper half, the next chunk in the lower: one word, so that a thread that takes a chunk
  // knows which job it is of. What describes a job does not change while a chunk of it is out.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> num_done_{0};
  Function function_ = nullptr;
  const void* job_ = nullptr;

  std::atomic<int> num_asleep_{0};
  std::atomic<bool> ends_{false};
  std::mutex sleep_;
  std::condition_variable wake_;
  std::mutex turn_;
  const int num_forks_;  // before it was made
  std::vector<std::thread> workers_;
};

}  // namespace lp
