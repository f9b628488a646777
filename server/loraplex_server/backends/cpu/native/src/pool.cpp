#include "pool.h"

#include <pthread.h>

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lp {
namespace {

// Longer than the gaps within a step, shorter than those between steps.
constexpr int kSpins = 4000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for this thread's stores past the caches. A locked instruction does that too, but a worker that still looks for
// chunks of the job before may find one of the next job without any.
void fence_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

std::atomic<int>& Pool::num_forks() {
  static std::atomic<int> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
  static_cast<void>(registered);
  return count;
}

Pool::Pool(int num_threads) : shares_(static_cast<size_t>(std::max(1, num_threads))), num_forks_(num_forks().load()) {
  try {
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    end();
    throw;
  }
}

Pool::~Pool() { end(); }

void Pool::end() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    ends_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// Returns the chunk, or -1 if there is none.
int Pool::take(Share& share, bool is_own) {
  uint64_t chunks = share.chunks.load(std::memory_order_acquire);
  for (;;) {
    const auto first = static_cast<uint32_t>(chunks), end = static_cast<uint32_t>(chunks >> 32);
    if (first >= end) return -1;
    const uint64_t left = is_own ? chunks + 1 : chunks - (uint64_t{1} << 32);
    if (share.chunks.compare_exchange_weak(chunks, left, std::memory_order_acq_rel, std::memory_order_acquire))
      return static_cast<int>(is_own ? first : end - 1);
  }
}

// Until no chunk is left that somebody could take. Returns how many this thread has done.
int Pool::take_all(int thread) {
  int num_done = 0;
  const int num_shares = static_cast<int>(shares_.size());
  for (int i = 0; i < num_shares; i++) {
    Share& share = shares_[static_cast<size_t>((thread + i) % num_shares)];
    for (int chunk; (chunk = take(share, i == 0)) >= 0; num_done++) function_(job_, chunk, thread);
  }
  return num_done;
}

void Pool::share(Function function, const void* job, int num_chunks) {
  fence_stores();
  function_ = function;
  job_ = job;
  num_done_.store(0, std::memory_order_relaxed);
  for (int thread = 0; thread < num_threads(); thread++)
    shares_[static_cast<size_t>(thread)].chunks.store(
        static_cast<uint64_t>(first_of(thread + 1, num_chunks)) << 32 | static_cast<uint32_t>(first_of(thread, num_chunks)),
        std::memory_order_release);
  num_jobs_.fetch_add(1);
  if (num_asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  const int num_left = num_chunks - take_all(0);
  int spins = 0;
  while (num_done_.load(std::memory_order_acquire) < num_left) {
    pause();
    // The thread with the last chunk may need this very core.
    if (++spins % kSpins == 0) std::this_thread::yield();
  }
}

void Pool::work(int thread) {
  int spins = 0;
  for (uint32_t seen = 0; !ends_.load(std::memory_order_relaxed);) {
    if (const uint32_t num_jobs = num_jobs_.load(std::memory_order_acquire); num_jobs != seen) {
      seen = num_jobs;
      // A chunk of a job counts only now, so the next job, whose chunks may have been taken by the same loop, comes after it.
      if (const int num_done = take_all(thread); num_done > 0) num_done_.fetch_add(num_done, std::memory_order_release);
      spins = 0;
      continue;
    }
    pause();
    if (++spins < kSpins) continue;
    std::unique_lock<std::mutex> lock(sleep_);
    num_asleep_.fetch_add(1);
    // As wake_.wait(lock) does it; that function's own symbol is of libstdc++ 12, and older systems lack it.
    while (!ends_.load() && num_jobs_.load() == seen) pthread_cond_wait(wake_.native_handle(), sleep_.native_handle());
    num_asleep_.fetch_sub(1);
    spins = 0;
  }
}

}  // namespace lp
