// LoRA deltas for a mixed batch on a CPU: y[t] += scaling * (x[t] A^T) B^T for the tokens t of every segment, one segment per slot.
//
//     shrink   h[i, p*r + j] = scaling[p] * dot(x[token i], A[p, j])        items: (segment, 4 rows of A)
//     expand   y[token i, o] += sum_j h[i, p*r + j] * B^T[j, o]             items: (segment, part, 64 columns)
//
// Each weight of a slot is read once a call for a few tokens at a time; sums are float32 whatever the storage. Each thread takes a run of
// neighbouring items of every segment, so that weights are streamed in memory order and no thread always has the larger share. The order
// of every sum is fixed by the shapes alone: it depends neither on the threads nor on what else is in the batch.
#include <omp.h>

#include "../../../../native/tile.h"

namespace {

using namespace mstar;

constexpr int kTile = 4;      // tokens that share one reading of a weight
constexpr int kRows = 4;      // rows of A in one item
constexpr int kColumns = 64;  // columns of B in one item
constexpr int kGroups = kColumns / kLanes;
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

// Columns of one item for some tokens. `columns` below kColumns: the last of a part.
template <typename T, int tokens>
__attribute__((noinline)) void add_products(const T* b, int64_t b_stride, int64_t rank, const float* h, int64_t h_stride, int64_t columns,
                                            T* const* y) {
  vfloat sums[tokens][kGroups];
  for (int i = 0; i < tokens; ++i)
    for (int g = 0; g < kGroups; ++g) sums[i][g] = all(0);
  if (columns == kColumns) {
    for (int64_t j = 0; j < rank; ++j) {
      vfloat weights[kGroups];
      for (int g = 0; g < kGroups; ++g) weights[g] = load(b + j * b_stride + g * kLanes);
      for (int i = 0; i < tokens; ++i)
        for (int g = 0; g < kGroups; ++g) sums[i][g] += all(h[i * h_stride + j]) * weights[g];
    }
    for (int i = 0; i < tokens; ++i)
      for (int g = 0; g < kGroups; ++g) store(load(y[i] + g * kLanes) + sums[i][g], y[i] + g * kLanes);
    return;
  }
  for (int64_t from = 0, g = 0; from < columns; from += kLanes, ++g) {
    for (int64_t j = 0; j < rank; ++j) {
      const vfloat weights = load_some(b + j * b_stride + from, columns - from);
      for (int i = 0; i < tokens; ++i) sums[i][g] += all(h[i * h_stride + j]) * weights;
    }
    for (int i = 0; i < tokens; ++i) store_some(load_some(y[i] + from, columns - from) + sums[i][g], y[i] + from, columns - from);
  }
}

template <typename T>
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
    add_products<T, kTile>(b, target.b_row, rank, h + first * plan.width, plan.width, columns, at);
  }
  for (; first < plan.counts[segment]; ++first) {
    at[0] = y + tokens[first] * y_stride + column;
    add_products<T, 1>(b, target.b_row, rank, h + first * plan.width, plan.width, columns, at);
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

template <typename T>
void expand_part(const LoraTarget& target, const LoraPlan& plan, T* y, int64_t y_stride) {
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  int64_t blocks = 0;  // column items of one segment
  for (int64_t p = 0; p < target.parts; ++p) blocks += (target.out_sizes[p] + kColumns - 1) / kColumns;
  for (int64_t segment = 0; segment < plan.segments; ++segment) {
    if (plan.ranks[segment] == 0) continue;
    const Share share(blocks, segment, thread, threads);
    for (int64_t item = share.first; item < share.end; ++item) {
      int64_t part = 0, column = 0, block = item;
      while (block * kColumns >= target.out_sizes[part]) {
        block -= (target.out_sizes[part] + kColumns - 1) / kColumns;
        column += target.out_sizes[part];
        ++part;
      }
      const int64_t left = target.out_sizes[part] - block * kColumns;
      expand(target, plan, segment, part, column + block * kColumns, left < kColumns ? left : kColumns, y, y_stride);
    }
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

void mstar_lora_expand_part(const LoraTarget* target, const LoraPlan* plan, void* y, int64_t y_stride) {
  if (target->is_bf16)
    expand_part(*target, *plan, static_cast<Bf16*>(y), y_stride);
  else
    expand_part(*target, *plan, static_cast<float*>(y), y_stride);
}

// The whole of it.
void mstar_lora_delta(const LoraTarget* target, const LoraPlan* plan, const void* x, int64_t x_stride, void* y, int64_t y_stride) {
#pragma omp parallel num_threads(plan->threads)
  {
    mstar_lora_shrink_part(target, plan, x, x_stride);
#pragma omp barrier
    mstar_lora_expand_part(target, plan, y, y_stride);
  }
}
}
