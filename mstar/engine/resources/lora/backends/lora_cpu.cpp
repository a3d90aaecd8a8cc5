// LoRA deltas for a mixed batch on a CPU: y[t] += scaling * (x[t] A^T) B^T for the tokens t of every segment, one segment per slot.
//
//     shrink   h[i, p*r + j] = scaling[p] * dot(x[token i], A[p, j])        items: (segment, 4 rows of A)
//     expand   y[token i, o] += sum_j h[i, p*r + j] * B^T[j, o]             for some columns at a time, all segments
//
// Each weight of a slot is read once a call for a few tokens at a time; sums are float32 whatever the storage. The shrink goes before the
// base product, each thread with a run of neighbouring items of every segment; the expand is called by the thread that has made the
// columns, while they are in its caches. The order of every sum is fixed by the shapes alone: it depends neither on the threads nor on
// what else is in the batch.
#include <omp.h>

#include "../../../../native/tile.h"

namespace {

using namespace mstar;

constexpr int kTile = 4;    // tokens that share one reading of a weight
constexpr int kRows = 4;    // rows of A in one item
constexpr int kGroups = 6;  // of 16 columns of B at once
constexpr int kColumns = kGroups * kLanes;
constexpr int kMaxParts = 8;

}  // namespace

extern "C" {

struct LoraTarget {
  const void* lora_a;    // [slots, parts, rows, in]
  const void* lora_b_t;  // [slots, rows, out]
  const float* scaling;  // [slots, parts]
  int64_t a_slot, a_part, a_row, b_slot, b_row;  // from one to the next, in elements; what lies side by side are inputs and outputs
  int64_t parts, in;
  int64_t out_sizes[kMaxParts];
  int64_t is_bf16;
};

struct LoraPlan {
  const int64_t* tokens;  // [tokens of all segments], grouped by segment
  const int64_t* slots;   // [segments]
  const int64_t* starts;  // [segments]: first of its tokens in `tokens`
  const int64_t* counts;  // [segments]
  const int64_t* ranks;   // [segments]: the rank in use in its slot
  int64_t segments, threads, width;  // width: floats of one row of the scratch
  float* scratch;         // [tokens of all segments, width]
};
}

namespace {

// The end of a row, less than 64 bytes, with zeros after it.
template <typename T>
inline vuint load_part(const T* from, int64_t count) {
  T lanes[kLanes * kInStep<T>] = {};
  for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
  vuint out;
  std::memcpy(&out, lanes, sizeof out);
  return out;
}

// Its own function: inlined into a larger one, the sums end up on the stack.
template <typename T, int tokens>
__attribute__((noinline)) void dots(const T* a, int64_t a_row, int64_t rows, int64_t in, const T* const* x, float scaling, float* h, int64_t h_stride) {
  constexpr int64_t step = kLanes * kInStep<T>;
  const T *weight_rows[kRows], *token_rows[tokens];
  for (int r = 0; r < kRows; ++r) weight_rows[r] = a + (r < rows ? r : 0) * a_row;
  for (int i = 0; i < tokens; ++i) token_rows[i] = x[i];
  vfloat sums[tokens][kRows];
  for (int i = 0; i < tokens; ++i)
    for (int r = 0; r < kRows; ++r) sums[i][r] = all(0);
  int64_t k = 0;
  const auto take = [&](auto next) {
    vuint weights[kRows];
    for (int r = 0; r < kRows; ++r) weights[r] = next(weight_rows[r] + k);
    for (int i = 0; i < tokens; ++i) {
      const vuint xs = next(token_rows[i] + k);
      for (int r = 0; r < kRows; ++r) sums[i][r] = multiply_add<T>(sums[i][r], weights[r], xs);
    }
  };
  for (; k + step <= in; k += step) take([](const T* from) { return load_words(reinterpret_cast<const uint32_t*>(from)); });
  if (k < in) take([&](const T* from) { return load_part(from, in - k); });
  for (int i = 0; i < tokens; ++i)
    for (int r = 0; r < kRows; ++r)
      if (r < rows) h[i * h_stride + r] = scaling * sum(sums[i][r]);
}

template <typename T>
void shrink(const LoraTarget& target, const LoraPlan& plan, int64_t segment, int64_t first_row, const T* x, int64_t x_stride) {
  const int64_t rank = plan.ranks[segment], slot = plan.slots[segment], in = target.in;
  const int64_t part = first_row / rank, row = first_row % rank;
  const int64_t rows = rank - row < kRows ? rank - row : kRows;
  const T* a = static_cast<const T*>(target.lora_a) + slot * target.a_slot + part * target.a_part + row * target.a_row;
  const float scaling = target.scaling[slot * target.parts + part];
  const int64_t* tokens = plan.tokens + plan.starts[segment];
  float* h = plan.scratch + plan.starts[segment] * plan.width + first_row;
  int64_t first = 0;
  const T* at[kTile];
  for (; first + kTile <= plan.counts[segment]; first += kTile) {
    for (int i = 0; i < kTile; ++i) at[i] = x + tokens[first + i] * x_stride;
    dots<T, kTile>(a, target.a_row, rows, in, at, scaling, h + first * plan.width, plan.width);
  }
  for (; first < plan.counts[segment]; ++first) {
    at[0] = x + tokens[first] * x_stride;
    dots<T, 1>(a, target.a_row, rows, in, at, scaling, h + first * plan.width, plan.width);
  }
}

// `groups` of 16 columns for some tokens; below `groups * 16` columns: the last of a part.
template <typename T, int groups, int tokens>
__attribute__((noinline)) void add_products(const T* b, int64_t b_row, int64_t rank, const float* h, int64_t h_stride, int64_t columns,
                                            T* const* y) {
  vfloat sums[tokens][groups];
  for (int i = 0; i < tokens; ++i)
    for (int g = 0; g < groups; ++g) sums[i][g] = all(0);
  for (int64_t j = 0; j < rank; ++j) {
    vfloat weights[groups];
    for (int g = 0; g < groups; ++g) {
      const T* from = b + j * b_row + g * kLanes;
      weights[g] = groups == 1 ? load_some(from, columns) : load(from);
    }
    for (int i = 0; i < tokens; ++i)
      for (int g = 0; g < groups; ++g) sums[i][g] += all(h[i * h_stride + j]) * weights[g];
  }
  for (int i = 0; i < tokens; ++i) {
    for (int g = 0; g < groups; ++g) {
      T* to = y[i] + g * kLanes;
      if (groups == 1)
        store_some(load_some(to, columns) + sums[i][g], to, columns);
      else
        store(load(to) + sums[i][g], to);
    }
  }
}

// Some columns of one part for all tokens of a segment.
template <typename T, int groups>
void expand(const LoraTarget& target, const LoraPlan& plan, int64_t segment, int64_t part, int64_t column, int64_t columns, T* y,
            int64_t y_stride) {
  const int64_t rank = plan.ranks[segment], slot = plan.slots[segment];
  const T* b = static_cast<const T*>(target.lora_b_t) + slot * target.b_slot + column;
  const int64_t* tokens = plan.tokens + plan.starts[segment];
  const float* h = plan.scratch + plan.starts[segment] * plan.width + part * rank;
  int64_t first = 0;
  T* at[kTile];
  for (; first + kTile <= plan.counts[segment]; first += kTile) {
    for (int i = 0; i < kTile; ++i) at[i] = y + tokens[first + i] * y_stride + column;
    add_products<T, groups, kTile>(b, target.b_row, rank, h + first * plan.width, plan.width, columns, at);
  }
  for (; first < plan.counts[segment]; ++first) {
    at[0] = y + tokens[first] * y_stride + column;
    add_products<T, groups, 1>(b, target.b_row, rank, h + first * plan.width, plan.width, columns, at);
  }
}

template <typename T>
void expand_columns(const LoraTarget& target, const LoraPlan& plan, int64_t column, int64_t columns, T* y, int64_t y_stride) {
  for (int64_t segment = 0; segment < plan.segments; ++segment) {
    if (plan.ranks[segment] == 0) continue;
    for (int64_t part = 0, first = 0; part < target.parts; first += target.out_sizes[part++]) {
      int64_t at = column > first ? column : first;
      const int64_t end_of_part = first + target.out_sizes[part];
      const int64_t end = column + columns < end_of_part ? column + columns : end_of_part;
      const auto add = [&](auto groups) {
        const int64_t width = end - at < groups * kLanes ? end - at : groups * kLanes;
        expand<T, groups>(target, plan, segment, part, at, width, y, y_stride);
        at += width;
      };
      while (at + kGroups * kLanes <= end) add(std::integral_constant<int, kGroups>());
      while (at + kGroups / 2 * kLanes <= end) add(std::integral_constant<int, kGroups / 2>());
      while (at < end) add(std::integral_constant<int, 1>());
    }
  }
}

// This thread's run of `items`; which share is whose moves on with the segment.
struct Share {
  int64_t first, end;
  Share(int64_t items, int64_t segment, int64_t thread, int64_t threads) {
    const int64_t turn = (thread + segment) % threads;
    first = items * turn / threads;
    end = items * (turn + 1) / threads;
  }
};

template <typename T>
void shrink_part(const LoraTarget& target, const LoraPlan& plan, const T* x, int64_t x_stride) {
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  for (int64_t segment = 0; segment < plan.segments; ++segment) {
    const int64_t rank = plan.ranks[segment];
    const int64_t groups = (rank + kRows - 1) / kRows;
    const Share share(target.parts * groups, segment, thread, threads);
    for (int64_t item = share.first; item < share.end; ++item)
      shrink(target, plan, segment, item / groups * rank + item % groups * kRows, x, x_stride);
  }
}

}  // namespace

extern "C" {

// For a thread of a parallel region: its part, without a barrier. Between the two there must be one.
void mstar_lora_shrink_part(const LoraTarget* target, const LoraPlan* plan, const void* x, int64_t x_stride) {
  if (target->is_bf16)
    shrink_part(*target, *plan, static_cast<const Bf16*>(x), x_stride);
  else
    shrink_part(*target, *plan, static_cast<const float*>(x), x_stride);
}

// For a thread of a parallel region, after a barrier: the delta of some columns of `y`, as `[tokens, out]` begins.
void mstar_lora_expand_columns(const LoraTarget* target, const LoraPlan* plan, int64_t column, int64_t columns, void* y, int64_t y_stride) {
  if (target->is_bf16)
    expand_columns(*target, *plan, column, columns, static_cast<Bf16*>(y), y_stride);
  else
    expand_columns(*target, *plan, column, columns, static_cast<float*>(y), y_stride);
}

// The whole of it.
void mstar_lora_delta(const LoraTarget* target, const LoraPlan* plan, const void* x, int64_t x_stride, void* y, int64_t y_stride) {
  int64_t out = 0;
  for (int64_t part = 0; part < target->parts; ++part) out += target->out_sizes[part];
#pragma omp parallel num_threads(plan->threads)
  {
    mstar_lora_shrink_part(target, plan, x, x_stride);
#pragma omp barrier
#pragma omp for schedule(dynamic)
    for (int64_t column = 0; column < out; column += kColumns)
      mstar_lora_expand_columns(target, plan, column, out - column < kColumns ? out - column : kColumns, y, y_stride);
  }
}
}
