#include "pool.h"

#include <pthread.h>

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

bool has_chunks(uint64_t ticket) { return (ticket & 0xffffffffu) < (ticket >> 32); }

}  // namespace

std::atomic<int>& Pool::num_forks() {
  static std::atomic<int> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
  static_cast<void>(registered);
  return count;
}

Pool::Pool(int num_threads) : num_forks_(num_forks().load()) {
  for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    ends_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool Pool::take_one(int thread) {
  if (!has_chunks(ticket_.load(std::memory_order_acquire))) return false;
  const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
  if (!has_chunks(ticket)) return false;
  function_(job_, static_cast<int>(ticket & 0xffffffffu), thread);
  num_done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Pool::share(Function function, const void* job, int num_chunks) {
  function_ = function;
  job_ = job;
  num_done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(num_chunks) << 32);
  if (num_asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  while (take_one(0)) {
  }
  int spins = 0;
  while (num_done_.load(std::memory_order_acquire) < num_chunks) {
    pause();
    // The thread with the last chunk may need this very core.
    if (++spins % kSpins == 0) std::this_thread::yield();
  }
}

void Pool::work(int thread) {
  int spins = 0;
  while (!ends_.load(std::memory_order_relaxed)) {
    if (take_one(thread)) {
      spins = 0;
      continue;
    }
    pause();
    if (++spins < kSpins) continue;
    std::unique_lock<std::mutex> lock(sleep_);
    num_asleep_.fetch_add(1);
    // As wake_.wait(lock) does it; that function's own symbol is of libstdc++ 12, and older systems lack it.
    while (!ends_.load() && !has_chunks(ticket_.load())) pthread_cond_wait(wake_.native_handle(), sleep_.native_handle());
    num_asleep_.fetch_sub(1);
    spins = 0;
  }
}

}  // namespace lp
