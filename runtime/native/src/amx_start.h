// Before tiles are used: the kernel of the system must allow them, and their products must be those of the vectors.
#pragma once

#include <stdexcept>
#include <string>

#include "matrix.h"

#if defined(TRELLIS_TILES)
#include <csetjmp>
#include <csignal>
#include <cerrno>
#if !defined(TRELLIS_EMULATE_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace trellis {

#if !defined(TRELLIS_TILES)

inline void start_tiles() {}

#else

// Tiles are 8 KB of state that each switch of threads would save, so Linux asks a process to say that it will use them:
// https://docs.kernel.org/arch/x86/xstate.html. Raises runtime_error with the reason of a refusal.
inline void ask_for_tiles() {
#if !defined(TRELLIS_EMULATE_TILES)
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0) return;
    const char* why = errno == ENOSPC ? "a thread's stack for signals is too small for their state" : std::strerror(errno);
    throw std::runtime_error(std::string("the kernel of the system does not let this process use tiles (AMX): ") + why);
#endif
}

// An instruction that the machine does not know, while it lives and on its thread, is an exception. What the jump out of it
// passes over is not undone, but for the state of float operations.
class IllegalGuard {
public:
    IllegalGuard() {
        struct sigaction action = {};
        action.sa_handler = &jump;
        sigemptyset(&action.sa_mask);
        sigaction(SIGILL, &action, &before_);
    }
    ~IllegalGuard() { sigaction(SIGILL, &before_, nullptr); }

    template <class Do>
    void run(Do&& act) {
        const unsigned floats = _mm_getcsr();
        if (sigsetjmp(back(), 1) != 0) {
            armed() = false;
            _mm_setcsr(floats);
            throw std::runtime_error("tiles (AMX) are an illegal instruction here");
        }
        armed() = true;
        act();
        armed() = false;
    }

private:
    static sigjmp_buf& back() {
        static thread_local sigjmp_buf buffer;
        return buffer;
    }
    static bool& armed() {
        static thread_local bool value = false;
        return value;
    }
    static void jump(int signal) {
        if (armed()) siglongjmp(back(), 1);
        std::signal(signal, SIG_DFL);  // another thread's: it runs into it again
    }
    struct sigaction before_;
};

// Products of random matrices by tiles and by vectors.
class TileCheck {
public:
    // Shapes with and without a rest of rows, of outputs and of depth, of one tile of activations and of several.
    void run() {
        for (const int rows : {1, 7, 16, 17, 32, 50})
            for (const int inputs : {20, 64, 224}) {
                compare<Bf16>(Kept::OWN, "bfloat16 weights", 50, inputs, rows);
                compare<Q8>(Kept::Q8, "8-bit weights", 50, inputs, rows);
                compare<Q4>(Kept::Q4, "4-bit weights", 50, inputs, rows);
            }
        for (const int depth : {8, 32, 40})
            for (const int stride : {depth, 64}) compare_two(depth, stride);
    }

private:
    std::vector<float> numbers(size_t count) {
        std::vector<float> made(count);
        for (float& x : made) {
            random_ = random_ * 6364136223846793005u + 1442695040888963407u;  // Knuth, MMIX
            x = float(int32_t(random_ >> 32)) * 0x1p-31f;
        }
        return made;
    }

    template <class G>
    std::vector<float> product(const Matrix& m, const std::vector<float>& x, int rows, bool tiles) {
        const int depth = G::panel_depth(m.inputs);
        std::vector<uint32_t> data(size_t(rows) * (depth + Panel::PADDING)), words(depth);
        const Panel panel = panel_of<G>(data.data(), rows, m.inputs, tiles);
        for (int r = 0; r < rows; ++r) put_row<G>(panel, r, x.data() + size_t(r) * m.inputs, m.inputs, words.data());
        std::vector<float> out(size_t(rows) * m.outputs);
        team_.run(1, [&](int me) { multiply<G>(team_, me, m, panel, Into{m, out.data(), size_t(m.outputs), false}); });
        return out;
    }

    // Those of integers are the same bits; those of bfloat16 differ by the rounding of sums of numbers up to 1.
    template <class G>
    void compare(Kept kept, const char* what, int outputs, int inputs, int rows) {
        Matrix m;
        m.outputs = outputs, m.inputs = inputs, m.kept = kept;
        const std::vector<float> weights = numbers(size_t(outputs) * inputs), x = numbers(size_t(rows) * inputs);
        pack_as_kept<Bf16>(team_, arena_, m, weights.data(), Source::F32, nullptr);
        const std::vector<float> got = product<G>(m, x, rows, true), want = product<G>(m, x, rows, false);
        require_equal(what, got, want, kept == Kept::OWN ? 1e-6f * float(inputs) : 0.0f, rows, inputs);
    }

    static void require_equal(const char* what, const std::vector<float>& got, const std::vector<float>& want, float bound,
                              int rows, int inputs) {
        for (size_t i = 0; i < got.size(); ++i)
            if (!(std::fabs(got[i] - want[i]) <= bound))
                throw std::runtime_error(std::string("products by tiles (AMX) of ") + what + " are wrong: " +
                                         std::to_string(got[i]) + " instead of " + std::to_string(want[i]) + " with " +
                                         std::to_string(rows) + " rows of " + std::to_string(inputs) + " inputs");
    }

    // As attention multiplies.
    void compare_two(int depth, int stride) {
        constexpr int ROWS = 2 * TILE_ROWS;
        std::vector<uint32_t> w(size_t(depth) * BLOCK), a(size_t(ROWS) * stride);
        for (std::vector<uint32_t>* words : {&w, &a}) {
            const int count = int(2 * words->size());
            Bf16::encode(numbers(size_t(count)).data(), count, words->data());
        }
        std::vector<float> got(size_t(ROWS) * BLOCK), want(got.size());
        {
            const Tiles tiles(TILE_ROWS, TILE_WORDS);
            multiply_two_tiles<Bf16>(w.data(), a.data(), stride, depth, got.data());
        }
        for (int r = 0; r < ROWS; ++r)
            tile_for<Bf16, false>(1, true)(w.data(), a.data() + size_t(r) * stride, depth, want.data() + r * BLOCK, Ahead{});
        require_equal("attention", got, want, 2e-6f * float(depth), ROWS, 2 * depth);
    }

    Team team_{1};
    Arena arena_;
    uint64_t random_ = 1;
};

inline std::string reason_against_tiles() {
    try {
        ask_for_tiles();
        TileCheck check;
        IllegalGuard().run([&] { check.run(); });
        return "";
    } catch (const std::exception& error) {
        return error.what();
    }
}

// Asks and checks once. Raises runtime_error with the reason when tiles must not be used.
inline void start_tiles() {
    static const std::string reason = reason_against_tiles();
    if (!reason.empty()) throw std::runtime_error(reason);
}

#endif

}  // namespace trellis
