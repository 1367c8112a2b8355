// Memory for weights and for work between the products.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace trellis {

constexpr size_t HUGE_PAGE = size_t(2) << 20;

// Whole pages, zero, and huge ones where the system has them: weights are read front to back in every step, and with
// pages of 4 KB a tenth of that time goes into finding them.
class Pages {
public:
    explicit Pages(size_t bytes) : bytes_((bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE) {
#if defined(__linux__)
        const size_t reserved = bytes_ + HUGE_PAGE;
        void* at = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        char* base = static_cast<char*>(at);
        char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        if (aligned > base) munmap(base, aligned - base);
        if (base + reserved > aligned + bytes_) munmap(aligned + bytes_, base + reserved - aligned - bytes_);
        madvise(aligned, bytes_, MADV_HUGEPAGE);
        data_ = aligned;
#else
        data_ = static_cast<char*>(std::aligned_alloc(4096, bytes_));
        if (!data_) throw std::bad_alloc();
        for (size_t i = 0; i < bytes_; ++i) data_[i] = 0;
#endif
    }
    ~Pages() {
#if defined(__linux__)
        if (data_) munmap(data_, bytes_);
#else
        std::free(data_);
#endif
    }
    Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    char* data_;
    size_t bytes_;
};

// What to fetch into the caches meanwhile: `bytes` from `at` on, spread over the tile. far: into the second one only.
struct Ahead {
    const char* at = nullptr;
    int bytes = 0;
    bool far = false;

    static void fetch(const char* at, bool far) {
        if (far)
            __builtin_prefetch(at, 0, 2);
        else
            __builtin_prefetch(at, 0, 3);
    }
};

// Hands out pieces that live as long as the arena.
class Arena {
public:
    template <class T>
    T* take(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (blocks_.empty() || used_ + bytes > blocks_.back().bytes()) {
            blocks_.emplace_back(bytes > CHUNK ? bytes : CHUNK);
            used_ = 0;
        }
        char* at = blocks_.back().data() + used_;
        used_ += bytes;
        total_ += bytes;
        return reinterpret_cast<T*>(at);
    }
    size_t total() const { return total_; }

private:
    static constexpr size_t CHUNK = size_t(64) << 20;
    std::vector<Pages> blocks_;
    size_t used_ = 0, total_ = 0;
};

// Room that grows to the largest step so far and is used anew by each.
class Room {
public:
    // Begins a step that takes at most so many bytes; each piece is rounded up to whole cache lines.
    void reset(size_t bytes) {
        if (pages_.empty() || pages_.back().bytes() < bytes) {
            pages_.clear();
            pages_.emplace_back(bytes);
        }
        used_ = 0;
    }
    template <class T>
    T* take(size_t count) {
        const size_t bytes = rounded(count * sizeof(T));
        if (used_ + bytes > pages_.back().bytes()) throw std::bad_alloc();
        char* at = pages_.back().data() + used_;
        used_ += bytes;
        return reinterpret_cast<T*>(at);
    }
    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

private:
    std::vector<Pages> pages_;
    size_t used_ = 0;
};

}  // namespace trellis
