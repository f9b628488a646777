// Threads that share out the chunks of one job after the other.
//
// A step is some hundred short jobs, so workers wait for the next one spinning, and only for a moment: then they sleep.
// Of a job's chunks each thread has a share of its own, one piece: it finds what it wrote and prefetched in its own caches,
// and meets the other threads when it is done and not for each chunk. Cores need not have a cache in common: between two of
// AMD's core complexes a line takes six times as long as within one. Then it takes chunks from the ends of the others'
// shares, so that a thread whose core is busy with something else holds up one chunk, not the job.
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
  explicit Pool(int num_threads);  // throws std::exception where there are no more threads or no memory
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(shares_.size()); }

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

  // First chunk of a thread's share, and of the threads behind it.
  int first_of(int thread, int num_chunks) const { return static_cast<int>(int64_t(thread) * num_chunks / num_threads()); }

  // The thread whose share a chunk is in. It takes the chunk, if nobody else had nothing to do before.
  int owner(int chunk, int num_chunks) const {
    return num_chunks == 1 ? 0 : static_cast<int>((int64_t(chunk + 1) * num_threads() - 1) / num_chunks);
  }

  // The chunk that a thread is likely to take after this one, -1: none.
  int follower(int chunk, int thread, int num_chunks) const {
    const int share = owner(chunk, num_chunks);
    if (share != thread) return chunk > first_of(share, num_chunks) ? chunk - 1 : -1;
    return chunk + 1 < first_of(share + 1, num_chunks) ? chunk + 1 : -1;
  }

  std::unique_lock<std::mutex> take_turn() {
    return is_inherited() ? std::unique_lock<std::mutex>() : std::unique_lock<std::mutex>(turn_);
  }

 private:
  using Function = void (*)(const void*, int chunk, int thread);

  // What nobody has taken of a thread's share: the first chunk in the lower half, the end in the upper. Its own thread takes
  // the first, others take the last. In a line of its own, and in the one that CPUs fetch with it.
  struct alignas(128) Share {
    std::atomic<uint64_t> chunks{0};
  };

  // In a process that was forked from the pool's: its threads are not there, and its locks may be held by them for ever.
  bool is_inherited() const { return num_forks_ != num_forks().load(std::memory_order_relaxed); }
  static std::atomic<int>& num_forks();

  static int take(Share& share, bool is_own);
  void share(Function function, const void* job, int num_chunks);
  int take_all(int thread);
  void work(int thread);
  void end();  // and wait for the threads

  // What describes a job does not change while a chunk of it is out, and is there before its shares are.
  Function function_ = nullptr;
  const void* job_ = nullptr;
  std::vector<Share> shares_;
  alignas(128) std::atomic<int> num_done_{0};       // chunks, without those that their threads have not counted yet
  alignas(128) std::atomic<uint32_t> num_jobs_{0};  // that have been shared out
  std::atomic<bool> ends_{false};
  std::atomic<int> num_asleep_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
  std::mutex turn_;
  const int num_forks_;  // before it was made
  std::vector<std::thread> workers_;
};

}  // namespace lp
