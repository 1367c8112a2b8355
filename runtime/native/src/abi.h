// The structs that Python fills in; mirrored in runtime/native/abi.py.
#pragma once

#include <cstdint>

extern "C" {

struct TrellisDecoder {
    int32_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim;
    int32_t format;  // see in_pool_format
    int32_t tied, alike;
    float norm_eps, scale, soft_cap, rotary_scale;
    const int32_t* windows;
    const float* frequencies;
};

struct TrellisStep {
    int32_t extends, pool_rows;
    const int32_t *lengths, *starts, *slots, *tokens, *logits_from;
    void* const* keys;
    void* const* values;
    float* hidden;
    float* logits;
    double* seconds;
};

struct TrellisProduct {
    int32_t outputs, inputs, rows;
    int32_t kept, source;  // see Kept and Source
    const void* weights;   // [outputs][inputs]
    const float* x;        // [rows][inputs]
    float* out;            // [rows][outputs]
    float* unpacked;       // [outputs][inputs]: the weights as they were kept
};

struct TrellisAttention {
    int32_t extends, heads, kv_heads, head_dim, format, window;
    float scale, soft_cap;
    const int32_t *lengths, *starts, *slots;
    const float* queries;
    const void *keys, *values;
    float* out;
    int64_t keys_read;  // filled in: how many, those that several rows read together once
};

}  // extern "C"
