// Threads that stay alive from step to step and from stage to stage.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace trellis {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A counter that can be waited for. Waiting spins for some 20 microseconds, which is longer than the others of a stage
// are usually late; then it gives the core away, which may be the one that the others wait for; then it sleeps.
class Gate {
public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void wait_while(uint32_t seen) {
        for (int i = 0; i < 1500; ++i) {
            if (value() != seen) return;
            relax();
        }
        for (int i = 0; i < 30; ++i) {
            if (value() != seen) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        sleep_.wait(lock, [&] { return value_.load() != seen; });
        sleepers_.fetch_sub(1);
    }

    // Sequentially consistent, as the reads in wait_while are: either the sleeper is seen here, or it sees the value.
    void advance() {
        value_.fetch_add(1);
        if (sleepers_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        sleep_.notify_all();
    }

private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable sleep_;
};

// Numbers too small for the usual form count as zero: they cost hundreds of cycles each on some processors.
class FlushToZero {
public:
#if defined(__x86_64__) || defined(__i386__)
    FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before_); }

private:
    unsigned before_;
#endif
};

// Runs one function on all threads at a time; the caller is thread 0. Within it, `each` shares out the units of a stage
// and `barrier` ends it. Every thread must come to the same stages in the same order.
class Team {
public:
    explicit Team(int threads) : threads_(std::max(1, threads)), stage_(threads_ * STRIDE) {
        for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { serve(i); });
    }

    ~Team() {
        ending_ = true;
        start_.advance();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    // stages: at most so many calls of `each` in the work.
    void run(int stages, const std::function<void(int)>& work) {
        if (int(taken_size_) < stages) {
            taken_.reset(new Taken[stages]);
            taken_size_ = stages;
        }
        for (int i = 0; i < stages; ++i) taken_[i].next.store(0, std::memory_order_relaxed);
        for (int i = 0; i < threads_; ++i) stage_[i * STRIDE] = 0;
        work_ = &work;
        const uint32_t before = done_.value();
        left_.store(threads_ - 1);
        start_.advance();
        {
            FlushToZero quick;
            work(0);
        }
        if (threads_ > 1) done_.wait_while(before);
    }

    // Units 0 .. n-1, each once, on whichever thread is free. Takes half of a fair share at a time, then ever less, so
    // that threads read long runs of memory and still end together, also when one is stopped in between.
    template <class Do>
    void each(int me, int n, Do&& act) {
        std::atomic<int>& next = taken_[stage_[me * STRIDE]++].next;
        int from = next.load(std::memory_order_relaxed);
        while (from < n) {
            const int take = std::max(1, (n - from) / (2 * threads_));
            if (!next.compare_exchange_weak(from, from + take, std::memory_order_relaxed)) continue;
            for (int unit = from; unit < from + take; ++unit) act(unit);
            from = next.load(std::memory_order_relaxed);
        }
    }

    void barrier() {
        if (threads_ == 1) return;
        const uint32_t seen = turn_.value();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.advance();
        } else {
            turn_.wait_while(seen);
        }
    }

private:
    static constexpr int STRIDE = 16;  // a cache line of ints: no two threads write the same
    struct alignas(64) Taken {
        std::atomic<int> next{0};
    };

    void serve(int me) {
        FlushToZero quick;
        for (uint32_t seen = 0;; ++seen) {
            start_.wait_while(seen);
            if (ending_) return;
            (*work_)(me);
            if (left_.fetch_sub(1) == 1) done_.advance();
        }
    }

    const int threads_;
    std::vector<int> stage_;  // which stage each thread is in
    std::unique_ptr<Taken[]> taken_;
    size_t taken_size_ = 0;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<bool> ending_{false};
    Gate start_, done_, turn_;
    std::atomic<int> left_{0}, arrived_{0};
    std::vector<std::thread> workers_;
};

}  // namespace trellis
