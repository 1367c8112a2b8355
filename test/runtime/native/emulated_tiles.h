// The tile instructions (AMX) in plain C++, for machines that have none: forced into the kernels with -include.
//
// Semantics: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED,
// TILEZERO, TDPBF16PS, TDPBSUD, TILERELEASE. What these fault on ends here in SIGILL, with a line on stderr, as on a
// machine; so do strides that no kernel of ours means.
//
// $EMULATED_TILES makes it a broken machine: `bfloat16` or `int8`, whose products leave out the last row of the second
// factor; `illegal`, which knows no products.
#pragma once

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

constexpr int TILES = 8, ROWS = 16, ROW_BYTES = 64;

struct Shape {
    int rows = 0, bytes = 0;
};

struct Tile {
    uint8_t bytes[ROWS][ROW_BYTES];
};

struct State {
    bool configured = false;
    Shape shapes[TILES];
    alignas(64) Tile tiles[TILES];
};

inline thread_local State state;

inline void fault(bool wrong, const char* what) {
    if (!wrong) return;
    std::fprintf(stderr, "emulated tiles: %s\n", what);
    std::fflush(stderr);
    std::raise(SIGILL);
}

inline bool broken(const char* how) {
    static const char* set = std::getenv("EMULATED_TILES");
    return set && std::strcmp(set, how) == 0;
}

// The intrinsics are assembler that reads more memory than gcc is told: of the shapes 8 bytes of 64, of a tile's rows none
// (gcc 12, amxtileintrin.h). So do these, inline, and a kernel that relies on more goes wrong here as on a machine.
#define EMULATED_INLINE inline __attribute__((always_inline))
#if defined(__AVX512BW__)
EMULATED_INLINE void read_shapes(const void* from, uint8_t (&to)[64]) {
    asm volatile("vmovdqu64 %1, %%zmm31\n\tvmovdqu64 %%zmm31, %0" : "=m"(to) : "m"(*static_cast<void* const*>(from)) : "xmm31");
}

EMULATED_INLINE void read_row(const char* from, int bytes, uint8_t (&to)[ROW_BYTES]) {
    const __mmask64 wanted = bytes == 64 ? ~0ull : (1ull << bytes) - 1;
    asm volatile("vmovdqu8 (%1), %%zmm31%{%2%}%{z%}\n\tvmovdqu64 %%zmm31, %0" : "=m"(to) : "r"(from), "Yk"(wanted) : "xmm31");
}
#else
inline void read_shapes(const void* from, uint8_t (&to)[64]) { std::memcpy(to, from, 64); }
inline void read_row(const char* from, int bytes, uint8_t (&to)[ROW_BYTES]) { std::memcpy(to, from, size_t(bytes)); }
#endif

inline void configure(const uint8_t (&bytes)[64]) {
    fault(bytes[0] != 1, "LDTILECFG of a palette that is not 1");
    fault(bytes[1] != 0, "LDTILECFG with a start row");
    for (int i = 2; i < 16; ++i) fault(bytes[i] != 0, "LDTILECFG with reserved bytes that are not zero");
    for (int i = 32; i < 48; ++i) fault(bytes[i] != 0, "LDTILECFG with bytes a row of a tile that there is not");
    for (int i = 56; i < 64; ++i) fault(bytes[i] != 0, "LDTILECFG with rows of a tile that there is not");
    for (int i = 0; i < TILES; ++i) {
        const Shape shape{bytes[48 + i], bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8};
        fault(shape.rows > ROWS, "LDTILECFG of more than 16 rows");
        fault(shape.bytes > ROW_BYTES, "LDTILECFG of more than 64 bytes a row");
        fault((shape.rows == 0) != (shape.bytes == 0), "LDTILECFG of a tile with rows but no bytes, or bytes but no rows");
        state.shapes[i] = shape;
    }
    std::memset(state.tiles, 0, sizeof state.tiles);
    state.configured = true;
}

EMULATED_INLINE void load_config(const void* from) {
    uint8_t bytes[64];
    read_shapes(from, bytes);
    configure(bytes);
}

inline void release() { state = State(); }

inline const Shape& shape_of(int tile) {
    fault(!state.configured, "a tile is used before LDTILECFG");
    fault(tile < 0 || tile >= TILES, "a tile is used that there is not");
    fault(state.shapes[tile].rows == 0, "a tile is used that has no shape");
    fault(state.shapes[tile].bytes % 4 != 0, "a tile is used whose rows are not whole words");
    return state.shapes[tile];
}

EMULATED_INLINE void load(int tile, const void* base, long stride) {
    const Shape s = shape_of(tile);
    fault(s.rows > 1 && stride < s.bytes, "TILELOADD of rows that overlap");
    std::memset(&state.tiles[tile], 0, sizeof(Tile));
    for (int r = 0; r < s.rows; ++r)
        read_row(static_cast<const char*>(base) + r * stride, s.bytes, state.tiles[tile].bytes[r]);
}

inline void store(int tile, void* base, long stride) {
    const Shape s = shape_of(tile);
    fault(s.rows > 1 && stride < s.bytes, "TILESTORED of rows that overlap");
    for (int r = 0; r < s.rows; ++r)
        std::memcpy(static_cast<char*>(base) + r * stride, state.tiles[tile].bytes[r], size_t(s.bytes));
}

inline void zero(int tile) {
    shape_of(tile);
    std::memset(&state.tiles[tile], 0, sizeof(Tile));
}

// c [m, n] += a [m, k] * b [k, n], in words.
inline Shape check_product(int c, int a, int b) {
    const Shape sums = shape_of(c), first = shape_of(a), second = shape_of(b);
    fault(c == a || c == b || a == b, "a product of a tile with itself");
    fault(sums.rows != first.rows, "a product whose sums and first factor differ in rows");
    fault(sums.bytes != second.bytes, "a product whose sums and second factor differ in bytes a row");
    fault(first.bytes / 4 != second.rows, "a product whose factors differ in depth");
    fault(broken("illegal"), "a product, which is not known");
    return sums;
}

template <class T>
inline T word(int tile, int row, int column) {
    T value;
    std::memcpy(&value, state.tiles[tile].bytes[row] + 4 * column, 4);
    return value;
}

template <class T>
inline void set_word(int tile, int row, int column, T value) {
    std::memcpy(state.tiles[tile].bytes[row] + 4 * column, &value, 4);
}

inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return flushed(x);
}

// Even and odd products have a sum each, of fused steps that begin at zero; then these are added, then the tile's.
inline void multiply_bf16(int c, int a, int b) {
    const int rows = check_product(c, a, b).rows, columns = state.shapes[c].bytes / 4;
    const int depth = state.shapes[b].rows - broken("bfloat16");
    for (int m = 0; m < rows; ++m) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < depth; ++k) {
            const uint32_t x = word<uint32_t>(a, m, k);
            const float low = as_float(x << 16), high = as_float(x & 0xFFFF0000u);
            for (int n = 0; n < columns; ++n) {
                const uint32_t y = word<uint32_t>(b, k, n);
                even[n] = flushed(std::fma(low, as_float(y << 16), even[n]));
                odd[n] = flushed(std::fma(high, as_float(y & 0xFFFF0000u), odd[n]));
            }
        }
        for (int n = 0; n < columns; ++n)
            set_word(c, m, n, flushed(flushed(word<float>(c, m, n)) + flushed(even[n] + odd[n])));
    }
}

// The bytes of the first factor have a sign, those of the second have none. Sums wrap around.
inline void multiply_sud(int c, int a, int b) {
    const int rows = check_product(c, a, b).rows, columns = state.shapes[c].bytes / 4;
    const int depth = state.shapes[b].rows - broken("int8");
    for (int m = 0; m < rows; ++m)
        for (int k = 0; k < depth; ++k) {
            const uint32_t x = word<uint32_t>(a, m, k);
            for (int n = 0; n < columns; ++n) {
                const uint32_t y = word<uint32_t>(b, k, n);
                uint32_t total = word<uint32_t>(c, m, n);
                for (int i = 0; i < 32; i += 8) total += uint32_t(int8_t(x >> i) * int32_t(y >> i & 0xFF));
                set_word(c, m, n, total);
            }
        }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(from) emulated::load_config(from)
#define _tile_release() emulated::release()
#define _tile_loadd(tile, base, stride) emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::store(tile, base, stride)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbf16ps(c, a, b) emulated::multiply_bf16(c, a, b)
#define _tile_dpbsud(c, a, b) emulated::multiply_sud(c, a, b)
