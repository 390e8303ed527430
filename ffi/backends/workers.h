// Work shared among host threads, without ever blocking one on work that has not begun: the caller
// takes tasks like everybody else, and then waits only for tasks that a running thread has taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace hkv {

// Keeps subnormal numbers while it lives, as CUDA and NumPy do; XLA's threads flush them.
class SubnormalsKept {
 public:
  SubnormalsKept() : saved_(get()) { set(kept(saved_)); }
  ~SubnormalsKept() { set(saved_); }
  SubnormalsKept(const SubnormalsKept&) = delete;
  SubnormalsKept& operator=(const SubnormalsKept&) = delete;

 private:
#if defined(__SSE2__)
  using Mode = uint32_t;
  static Mode get() { return _mm_getcsr(); }
  static void set(Mode mode) { _mm_setcsr(mode); }
  static Mode kept(Mode mode) { return mode & ~uint32_t{0x8040}; }  // flush-to-zero, denormals-are-zero
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static Mode get() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  static Mode kept(Mode mode) { return mode & ~(Mode{1} << 24); }  // FZ
#else
  using Mode = int;
  static Mode get() { return 0; }
  static void set(Mode) {}
  static Mode kept(Mode mode) { return mode; }
#endif
  Mode saved_;
};

// Pool has `num_threads()` and `Schedule(callable)`, as xla::ffi::ThreadPool.
template <class Pool>
class Workers {
 public:
  explicit Workers(Pool& pool) : pool_(pool), threads_(pool.num_threads()) {}

  // task(index) for every index below count, each once, on any thread.
  template <class Task>
  void run(int64_t count, const Task& task) const {
    if (count <= 1 || threads_ <= 1) {
      const SubnormalsKept subnormals;
      for (int64_t index = 0; index < count; ++index) task(index);
      return;
    }
    const auto job = std::make_shared<Job<Task>>(count, task);
    const int64_t helpers = (count < threads_ ? count : threads_) - 1;
    ask_for(helpers, job);
    job->work();
    job->wait();
  }

 private:
  // Fewer are as good. None may be left behind at work on a task that is gone: no exception leaves.
  template <class SharedJob>
  void ask_for(int64_t helpers, const SharedJob& job) const noexcept {
    try {
      for (int64_t helper = 0; helper < helpers; ++helper) {
        pool_.Schedule([job] { job->work(); });
      }
    } catch (...) {  // there is no memory for one more
    }
  }

  // Outlives the call: a helper that starts late finds no index left and never touches the task.
  template <class Task>
  class Job {
   public:
    Job(int64_t count, const Task& task) : count_(count), task_(&task) {}

    void work() {
      const SubnormalsKept subnormals;
      for (;;) {
        const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
        if (index >= count_) return;
        (*task_)(index);
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) done_.notify_all();
      }
    }

    void wait() const {
      for (int64_t done = done_.load(std::memory_order_acquire); done < count_;
           done = done_.load(std::memory_order_acquire)) {
        done_.wait(done, std::memory_order_acquire);
      }
    }

   private:
    const int64_t count_;
    const Task* task_;
    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> done_{0};
  };

  Pool& pool_;
  int64_t threads_;
};

}  // namespace hkv
