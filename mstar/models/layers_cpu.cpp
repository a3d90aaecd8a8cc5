// The small operations of a decoder layer on a CPU, one by one, and all layers of a step in one call.
//
// Roundings follow torch operator by operator (`decoder.py`), so that either way gives the same bits. What `run` calls in the large
// - products, attention, adapters' deltas, sums over ranks - are the kernels of their own libraries, given as functions.
#include <cmath>

#include "../native/vector.h"

using namespace mstar;

namespace {

constexpr int64_t kFewTokens = 32;  // below, one thread is done before others have woken
constexpr int64_t kColumns = 256;   // of one item

template <typename T>
__attribute__((noinline)) void norm(const T* x, const T* weight, float eps, int64_t size, T* to) {
  vfloat squares = all(0);
  for (int64_t i = 0; i < size; i += kLanes) {
    const vfloat value = load_some(x + i, size - i);
    squares += value * value;
  }
  const float scale = 1 / std::sqrt(sum(squares) / size + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const vfloat value = rounded<T>(load_some(x + i, size - i) * scale);
    store_some(value * load_some(weight + i, size - i), to + i, size - i);
  }
}

template <typename T>
__attribute__((noinline)) void turn(T* x, const T* cosine, const T* signed_sine, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const vfloat low = load_some(x + i, left), high = load_some(x + half + i, left);
    const auto turned = [&](vfloat own, vfloat other, int64_t at) {
      const vfloat straight = rounded<T>(own * load_some(cosine + at, left));
      return straight + rounded<T>(other * load_some(signed_sine + at, left));
    };
    store_some(turned(low, high, i), x + i, left);
    store_some(turned(high, low, half + i), x + half + i, left);
  }
}

template <typename T>
__attribute__((noinline)) void gate(const T* gates, const T* ups, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const vfloat value = load_some(gates + i, count - i);
    const vfloat silu = rounded<T>(value / (1.0f + exp(-value)));
    store_some(silu * load_some(ups + i, count - i), to + i, count - i);
  }
}

template <typename T>
__attribute__((noinline)) void add(const T* x, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i += kLanes) store_some(load_some(to + i, count - i) + load_some(x + i, count - i), to + i, count - i);
}

// `[tokens, groups, size]`, a weight `[size]` for each group.
template <typename T>
void norms(const T* x, int64_t x_stride, const T* weight, float eps, int64_t tokens, int64_t groups, int64_t size, T* to,
           int64_t to_stride, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > kFewTokens)
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < groups; ++g) norm(x + t * x_stride + g * size, weight + g * size, eps, size, to + t * to_stride + g * size);
}

template <typename T>
void rotations(T* x, int64_t x_stride, const T* cosine, const T* signed_sine, int64_t tokens, int64_t heads, int64_t dim, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > kFewTokens)
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t head = 0; head < heads; ++head) turn(x + t * x_stride + head * dim, cosine + t * dim, signed_sine + t * dim, dim);
}

template <typename T>
void gates(const T* gate_up, int64_t tokens, int64_t width, T* to, int64_t threads) {
  const int64_t blocks = (width + kColumns - 1) / kColumns;
#pragma omp parallel for num_threads(threads)
  for (int64_t item = 0; item < tokens * blocks; ++item) {
    const int64_t t = item / blocks, column = item % blocks * kColumns, left = width - column;
    const T* row = gate_up + t * 2 * width + column;
    gate(row, row + width, left < kColumns ? left : kColumns, to + t * width + column);
  }
}

}  // namespace

extern "C" {

struct Heads {  // as in attention_cpu.cpp
  const void* data;
  int64_t token_stride, head_stride;
};

// Those that say `part` do the calling thread's share of a parallel region, without a barrier.
using AddColumns = void (*)(const void* target, const void* plan, int64_t column, int64_t columns, void* y, int64_t y_stride);
struct Addition {  // as in linear_cpu.cpp
  AddColumns add;
  const void* target;
  const void* plan;
};
using LinearPart = void (*)(const void* linear, const void* x, int64_t x_stride, int64_t tokens, void* y, int64_t y_stride,
                            const Addition* addition);
using AttentionKernel = void (*)(const void* attention, const void* rows, int64_t layer, const Heads* q, const Heads* k, const Heads* v,
                                 void* out, int64_t threads);
using ShrinkPart = void (*)(const void* target, const void* plan, const void* x, int64_t x_stride);
using SumKernel = int64_t (*)(void* memory, void* x, int64_t count, int64_t is_bf16);

enum { kQkv, kO, kGateUp, kDown, kLinears };

struct Layer {
  const void* input_norm;
  const void* qk_norm;  // [query and KV heads, head_dim] or null
  const void* post_norm;
  const void* linears[kLinears];
  const void* targets[kLinears];  // what adapters add to each, for the delta kernel; null where they never do
};

struct Layers {  // of one rank
  const Layer* layers;
  int64_t count, hidden, heads, kv_heads, head_dim, mlp;
  int64_t is_bf16;
  float eps;
  LinearPart linear;
  AttentionKernel attention;
  const void* attention_of_rank;
  SumKernel sum;  // null: one rank
  void* memory;
};

struct LayersStep {
  void* x;  // [tokens, hidden], in and out
  const void* cosine;
  const void* signed_sine;  // [tokens, head_dim]
  const void* attention_rows;
  ShrinkPart shrink;  // null: no row has an adapter
  AddColumns expand;
  const void* plan;
  void* scratch;
  int64_t tokens, threads;
};

int64_t mstar_layers_scratch_bytes(const Layers* layers, int64_t tokens) {
  const int64_t q = layers->heads * layers->head_dim, kv = layers->kv_heads * layers->head_dim;
  return tokens * (2 * layers->hidden + 2 * q + 2 * kv + 3 * layers->mlp) * (layers->is_bf16 ? 2 : 4);
}
}

namespace {

template <typename T>
int64_t run(const Layers& model, const LayersStep& step) {
  const int64_t tokens = step.tokens, threads = step.threads, hidden = model.hidden, dim = model.head_dim, mlp = model.mlp;
  const int64_t turned_heads = model.heads + model.kv_heads, q_size = model.heads * dim, kv_size = model.kv_heads * dim;
  const int64_t qkv_size = q_size + 2 * kv_size;
  const T* cosine = static_cast<const T*>(step.cosine);
  const T* signed_sine = static_cast<const T*>(step.signed_sine);
  T* x = static_cast<T*>(step.x);
  T* normed = static_cast<T*>(step.scratch);
  T* out = normed + tokens * hidden;
  T* qkv = out + tokens * hidden;
  T* attended = qkv + tokens * qkv_size;
  T* gate_up = attended + tokens * q_size;
  T* gated = gate_up + tokens * 2 * mlp;
  int64_t missing = 0;

  for (int64_t index = 0; index < model.count && missing == 0; ++index) {
    const Layer& layer = model.layers[index];
    const auto product = [&](int which, const T* from, int64_t in, T* to, int64_t size) {
      const void* target = step.shrink == nullptr ? nullptr : layer.targets[which];
#pragma omp parallel num_threads(threads)
      {
        if (target != nullptr) {
          step.shrink(target, step.plan, from, in);
#pragma omp barrier
        }
        const Addition delta{step.expand, target, step.plan};
        model.linear(layer.linears[which], from, in, tokens, to, size, target == nullptr ? nullptr : &delta);
      }
    };
    const auto add_whole = [&] {  // `out` of all ranks to the residual
      if (model.sum != nullptr && missing == 0) missing = model.sum(model.memory, out, tokens * hidden, model.is_bf16);
      add(out, tokens * hidden, x);
    };
    const auto normalize = [&](const void* weight) {
      norms(x, hidden, static_cast<const T*>(weight), model.eps, tokens, 1, hidden, normed, hidden, threads);
    };
    normalize(layer.input_norm);
    product(kQkv, normed, hidden, qkv, qkv_size);
    if (layer.qk_norm != nullptr)
      norms(qkv, qkv_size, static_cast<const T*>(layer.qk_norm), model.eps, tokens, turned_heads, dim, qkv, qkv_size, threads);
    rotations(qkv, qkv_size, cosine, signed_sine, tokens, turned_heads, dim, threads);
    const Heads q{qkv, qkv_size, dim}, k{qkv + q_size, qkv_size, dim}, v{qkv + q_size + kv_size, qkv_size, dim};
    model.attention(model.attention_of_rank, step.attention_rows, index, &q, &k, &v, attended, threads);
    product(kO, attended, q_size, out, hidden);
    add_whole();
    if (missing != 0) break;
    normalize(layer.post_norm);
    product(kGateUp, normed, hidden, gate_up, 2 * mlp);
    gates(gate_up, tokens, mlp, gated, threads);
    product(kDown, gated, mlp, out, hidden);
    add_whole();
  }
  return missing;
}

}  // namespace

extern "C" {

// All layers of one step. 0, or what the sum over ranks said was missing.
int64_t mstar_layers_run(const Layers* layers, const LayersStep* step) {
  return layers->is_bf16 ? run<Bf16>(*layers, *step) : run<float>(*layers, *step);
}

void mstar_norm(const void* x, int64_t x_stride, const void* weight, float eps, int64_t tokens, int64_t groups, int64_t size, void* to,
                int64_t is_bf16, int64_t threads) {
  const int64_t row = groups * size;
  if (is_bf16)
    norms(static_cast<const Bf16*>(x), x_stride, static_cast<const Bf16*>(weight), eps, tokens, groups, size, static_cast<Bf16*>(to), row, threads);
  else
    norms(static_cast<const float*>(x), x_stride, static_cast<const float*>(weight), eps, tokens, groups, size, static_cast<float*>(to), row, threads);
}

void mstar_rotate(void* x, int64_t x_stride, const void* cosine, const void* signed_sine, int64_t tokens, int64_t heads, int64_t dim,
                  int64_t is_bf16, int64_t threads) {
  if (is_bf16)
    rotations(static_cast<Bf16*>(x), x_stride, static_cast<const Bf16*>(cosine), static_cast<const Bf16*>(signed_sine), tokens, heads, dim, threads);
  else
    rotations(static_cast<float*>(x), x_stride, static_cast<const float*>(cosine), static_cast<const float*>(signed_sine), tokens, heads, dim, threads);
}

void mstar_gate(const void* gate_up, int64_t tokens, int64_t width, void* to, int64_t is_bf16, int64_t threads) {
  if (is_bf16)
    gates(static_cast<const Bf16*>(gate_up), tokens, width, static_cast<Bf16*>(to), threads);
  else
    gates(static_cast<const float*>(gate_up), tokens, width, static_cast<float*>(to), threads);
}
}
