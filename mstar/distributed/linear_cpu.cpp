// y = x W^T + b on a CPU, for any number of tokens, from one blocked copy of the weight.
//
//     W [out, in]  ->  blocks of 48 outputs:  [steps of the input] [3 groups] [16 outputs] [one step]
//                      a step is one float, or two bfloat16 side by side; 64 bytes a group, a block is one run of memory
//     tile         3 groups x up to 8 tokens: 24 sums stay in registers while the block streams past once
//
// A decode step is bound by reading W: blocks stream in memory order, and 8 tokens or fewer (32 on AMX) read each block once.
// More tokens find it in the cache. Sums are float32, each over the whole input in order, so a token's result depends neither on
// the threads nor on what else is in the batch. Outputs past the last block's end and an odd last input are padded with zeros.
#include <omp.h>

#include "../native/tile.h"

using namespace mstar;

namespace {

constexpr int kGroups = 3;
constexpr int kBlock = kGroups * kLanes;
constexpr int kGroupsAtOnce = kSumsAtOnce < kGroups * kRowsAtOnce ? 1 : kGroups;
constexpr int64_t kFewTokens = 64;  // so few that reading an adapter's weights is most of adding it

int64_t blocks_of(int64_t out) { return (out + kBlock - 1) / kBlock; }
int64_t groups_in(int64_t out, int64_t block) {
  const int64_t groups = (out - block * kBlock + kLanes - 1) / kLanes;
  return groups < kGroups ? groups : kGroups;
}

// `groups` of one block, its first at `weight`, for all tokens; `y` and `bias` are at its first output, `out` outputs are left.
template <typename T, int groups>
void columns(const uint32_t* weight, int64_t weight_groups, int64_t in, Rows x, int64_t tokens, const T* bias, Rows y, int64_t out) {
  const int64_t whole = in / kInStep<T>;
  while (tokens > 0) {
    const int64_t rows = rows_at_once<T, groups>(tokens);
    alignas(64) float sums[kMostRows][groups * kLanes];
    tile<T, groups>(rows, Packed{weight, weight_groups}, whole, x, sums[0], groups * kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * kLanes, count = out - first;
        vfloat total = load(sums[r] + first);
        if (whole * kInStep<T> < in) {
          uint32_t last = 0;
          std::memcpy(&last, x[r] + whole * 4, sizeof(T));
          total = multiply_add<T>(total, load_words(weight + (whole * weight_groups + g) * kLanes), last);
        }
        if (bias != nullptr) total += load_some(bias + first, count);
        store_some(total, reinterpret_cast<T*>(y[r]) + first, count);
      }
    }
    x.first = x[rows];
    y.first = y[rows];
    tokens -= rows;
  }
}

}  // namespace

extern "C" {

struct Linear {
  const void* weight;  // blocked
  const void* bias;    // [out] or null
  int64_t in, out;
  int64_t is_bf16;
};

// What an adapter adds to columns of `y`: by the thread that has just made them, while they are in its caches.
struct Addition {
  void (*add)(const void* target, const void* plan, int64_t column, int64_t columns, void* y, int64_t y_stride);
  const void* target;
  const void* plan;
};

// Bytes of the blocked copy.
int64_t mstar_linear_bytes(int64_t in, int64_t out, int64_t is_bf16) {
  const int64_t steps = is_bf16 ? steps_of<Bf16>(in) : steps_of<float>(in);
  return (out + kLanes - 1) / kLanes * kLanes * 4 * steps;
}
}

namespace {

template <typename T>
void pack(const T* from, int64_t in, int64_t out, T* to) {  // `to` is zero where padded
  const int64_t steps = steps_of<T>(in);
#pragma omp parallel for
  for (int64_t block = 0; block < blocks_of(out); ++block) {
    const int64_t groups = groups_in(out, block);
    T* base = to + block * kBlock * steps * kInStep<T>;
    for (int64_t row = block * kBlock; row < out && row < (block + 1) * kBlock; ++row) {
      const int64_t lane = row - block * kBlock;
      for (int64_t k = 0; k < in; ++k) base[(k / kInStep<T> * groups * kLanes + lane) * kInStep<T> + k % kInStep<T>] = from[row * in + k];
    }
  }
}

template <typename T>
void gather(const Linear& linear, const int64_t* rows, int64_t count, T* to) {
  const int64_t steps = steps_of<T>(linear.in);
#pragma omp parallel for if (count > 16)
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = rows[i] / kBlock, lane = rows[i] % kBlock, groups = groups_in(linear.out, block);
    const T* base = static_cast<const T*>(linear.weight) + block * kBlock * steps * kInStep<T> + lane * kInStep<T>;
    T* row = to + i * linear.in;
    for (int64_t k = 0; k < linear.in; ++k) row[k] = base[k / kInStep<T> * groups * kLanes * kInStep<T> + k % kInStep<T>];
  }
}

// This thread's part, of the region that it is called in; it does not wait for the others.
template <typename T>
void product(const Linear& linear, const Rows& x, int64_t tokens, const Rows& y, const Addition* addition) {
  const int64_t block_words = kBlock * steps_of<T>(linear.in);
  const Products products;
  const auto take = [&](int64_t block) {
    const int64_t groups = groups_in(linear.out, block);
    const uint32_t* weight = static_cast<const uint32_t*>(linear.weight) + block * block_words;
    int64_t group = 0;
    auto run = [&](auto at_once) {
      const int64_t column = block * kBlock + group * kLanes;
      const T* bias = linear.bias == nullptr ? nullptr : static_cast<const T*>(linear.bias) + column;
      const Rows to{y.first + column * static_cast<int64_t>(sizeof(T)), y.stride_bytes};
      columns<T, at_once>(weight + group * kLanes, groups, linear.in, x, tokens, bias, to, linear.out - column);
      group += at_once;
    };
    if (groups == kGroups && kGroupsAtOnce == kGroups)
      run(std::integral_constant<int, kGroups>());
    else
      while (group < groups) run(std::integral_constant<int, 1>());
  };
  // An adapter's weights lie row by row of its rank: with few tokens each thread has all its columns in one run, to read them as streams.
  const int64_t blocks = blocks_of(linear.out), threads = omp_get_num_threads(), share = (blocks + threads - 1) / threads;
  const int64_t at_once = addition == nullptr ? 1 : tokens <= kFewTokens ? share : 2;
#pragma omp for schedule(dynamic) nowait
  for (int64_t first = 0; first < blocks; first += at_once) {
    const int64_t end = first + at_once < blocks ? first + at_once : blocks, column = first * kBlock;
    for (int64_t block = first; block < end; ++block) take(block);
    if (addition == nullptr) continue;
    const int64_t columns = (end * kBlock < linear.out ? end * kBlock : linear.out) - column;
    addition->add(addition->target, addition->plan, column, columns, y.first, y.stride_bytes / static_cast<int64_t>(sizeof(T)));
  }
}

}  // namespace

extern "C" {

// Blocks the plain `from [out, in]` into the zeroed `to`.
void mstar_linear_pack(const void* from, int64_t in, int64_t out, int64_t is_bf16, void* to) {
  if (is_bf16)
    pack(static_cast<const Bf16*>(from), in, out, static_cast<Bf16*>(to));
  else
    pack(static_cast<const float*>(from), in, out, static_cast<float*>(to));
}

// Rows of the weight as they were before: `to [count, in]`.
void mstar_linear_rows(const Linear* linear, const int64_t* rows, int64_t count, void* to) {
  if (linear->is_bf16)
    gather(*linear, rows, count, static_cast<Bf16*>(to));
  else
    gather(*linear, rows, count, static_cast<float*>(to));
}

// `y [tokens, out] = x [tokens, in] W^T + b`; the strides are in elements. For a thread of a parallel region: its part, without a barrier.
// `addition` may be null.
void mstar_linear_part(const Linear* linear, const void* x, int64_t x_stride, int64_t tokens, void* y, int64_t y_stride,
                       const Addition* addition) {
  const int64_t size = linear->is_bf16 ? 2 : 4;
  const Rows from{static_cast<char*>(const_cast<void*>(x)), x_stride * size}, to{static_cast<char*>(y), y_stride * size};
  if (linear->is_bf16)
    product<Bf16>(*linear, from, tokens, to, addition);
  else
    product<float>(*linear, from, tokens, to, addition);
}

// The whole of it.
void mstar_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t tokens, void* y, int64_t y_stride, int64_t threads) {
#pragma omp parallel num_threads(threads)
  mstar_linear_part(linear, x, x_stride, tokens, y, y_stride, nullptr);
}
}
