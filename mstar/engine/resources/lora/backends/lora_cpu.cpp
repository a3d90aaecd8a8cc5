// LoRA deltas for a mixed batch on a CPU: y[t] += scaling * (x[t] A^T) B^T for the tokens t of every segment, one segment per slot.
//
//     shrink   h[i, p*r + j] = scaling[p] * dot(x[token i], A[p, j])        items: (segment, 4 rows of A)
//     expand   y[token i, o] += sum_j h[i, p*r + j] * B^T[j, o]             items: (segment, part, 64 columns)
//
// Each weight of a slot is read once a call, for a tile of 4 tokens at a time; sums are float32 whatever the storage. Weights are
// streamed in memory order in both phases. The order of every sum is fixed by the shapes alone, so it does not depend on the threads or
// on what else is in the batch. GCC's vector types keep it free of any one instruction set; -march=native picks the best.
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;
constexpr int kTile = 4;      // tokens that share one reading of a weight
constexpr int kRows = 4;      // rows of A in one item
constexpr int kColumns = 64;  // columns of B in one item
constexpr int kMaxParts = 8;

typedef float vfloat __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t vhalf __attribute__((vector_size(kLanes * 2), aligned(2)));

struct Bf16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline void narrow(float value, float* out) { *out = value; }
inline void narrow(float value, Bf16* out) {  // round to nearest even, as torch does; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    out->bits = 0x7fc0;
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline vfloat load(const float* from) {
  vfloat out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline vfloat load(const Bf16* from) {
  vhalf half;
  std::memcpy(&half, from, sizeof half);
  vuint bits = __builtin_convertvector(half, vuint) << 16;
  vfloat out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline float sum(const vfloat& v) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += v[lane];
  return total;
}

}  // namespace

extern "C" {

struct LoraTarget {
  const void* lora_a;    // [slots, parts, cap, in]
  const void* lora_b_t;  // [slots, cap, out]
  const float* scaling;  // [slots, parts]
  int64_t parts, cap, in, out;
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

template <typename T>
void shrink(const LoraTarget& target, const LoraPlan& plan, int64_t segment, int64_t first_row, const T* x, int64_t x_stride) {
  const int64_t rank = plan.ranks[segment], slot = plan.slots[segment], in = target.in;
  const int64_t part = first_row / rank, row = first_row % rank;
  const int64_t rows = rank - row < kRows ? rank - row : kRows;
  const T* a = static_cast<const T*>(target.lora_a) + ((slot * target.parts + part) * target.cap + row) * in;
  const float scaling = target.scaling[slot * target.parts + part];
  const int64_t* tokens = plan.tokens + plan.starts[segment];
  float* h = plan.scratch + plan.starts[segment] * plan.width + first_row;
  const int64_t whole = in - in % kLanes;
  for (int64_t first = 0; first < plan.counts[segment]; first += kTile) {
    const int64_t count = plan.counts[segment] - first < kTile ? plan.counts[segment] - first : kTile;
    const T* at[kTile];
    for (int64_t i = 0; i < kTile; ++i) at[i] = x + tokens[first + (i < count ? i : 0)] * x_stride;
    vfloat acc[kTile][kRows] = {};
    for (int64_t k = 0; k < whole; k += kLanes) {
      vfloat weight[kRows];
      for (int64_t r = 0; r < kRows; ++r) weight[r] = load(a + (r < rows ? r : 0) * in + k);
      for (int64_t i = 0; i < count; ++i) {
        const vfloat value = load(at[i] + k);
        for (int64_t r = 0; r < kRows; ++r) acc[i][r] += value * weight[r];
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t r = 0; r < rows; ++r) {
        float total = sum(acc[i][r]);
        for (int64_t k = whole; k < in; ++k) total += widen(at[i][k]) * widen(a[r * in + k]);
        h[(first + i) * plan.width + r] = scaling * total;
      }
    }
  }
}

template <typename T>
void expand(const LoraTarget& target, const LoraPlan& plan, int64_t segment, int64_t part, int64_t column, int64_t columns, T* y,
            int64_t y_stride) {
  const int64_t rank = plan.ranks[segment], slot = plan.slots[segment];
  const T* b = static_cast<const T*>(target.lora_b_t) + slot * target.cap * target.out + column;
  const int64_t* tokens = plan.tokens + plan.starts[segment];
  const float* h = plan.scratch + plan.starts[segment] * plan.width + part * rank;
  for (int64_t first = 0; first < plan.counts[segment]; first += kTile) {
    const int64_t count = plan.counts[segment] - first < kTile ? plan.counts[segment] - first : kTile;
    if (columns == kColumns) {
      vfloat acc[kTile][kColumns / kLanes] = {};
      for (int64_t j = 0; j < rank; ++j) {
        vfloat weight[kColumns / kLanes];
        for (int c = 0; c < kColumns / kLanes; ++c) weight[c] = load(b + j * target.out + c * kLanes);
        for (int64_t i = 0; i < count; ++i) {
          const float value = h[(first + i) * plan.width + j];
          for (int c = 0; c < kColumns / kLanes; ++c) acc[i][c] += value * weight[c];
        }
      }
      for (int64_t i = 0; i < count; ++i) {
        T* row = y + tokens[first + i] * y_stride + column;
        for (int64_t c = 0; c < kColumns; ++c) narrow(widen(row[c]) + acc[i][c / kLanes][c % kLanes], row + c);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        T* row = y + tokens[first + i] * y_stride + column;
        for (int64_t c = 0; c < columns; ++c) {
          float total = 0;
          for (int64_t j = 0; j < rank; ++j) total += h[(first + i) * plan.width + j] * widen(b[j * target.out + c]);
          narrow(widen(row[c]) + total, row + c);
        }
      }
    }
  }
}

template <typename T>
void run(const LoraTarget& target, const LoraPlan& plan, const T* x, int64_t x_stride, T* y, int64_t y_stride) {
  int64_t blocks = 0;  // column items of one segment
  for (int64_t p = 0; p < target.parts; ++p) blocks += (target.out_sizes[p] + kColumns - 1) / kColumns;
#pragma omp parallel num_threads(plan.threads)
  {
    for (int64_t segment = 0; segment < plan.segments; ++segment) {
      const int64_t rank = plan.ranks[segment];
      const int64_t groups = (rank + kRows - 1) / kRows;
#pragma omp for schedule(static) nowait
      for (int64_t item = 0; item < target.parts * groups; ++item)
        shrink(target, plan, segment, item / groups * rank + item % groups * kRows, x, x_stride);
    }
#pragma omp barrier
    for (int64_t segment = 0; segment < plan.segments; ++segment) {
      if (plan.ranks[segment] == 0) continue;
#pragma omp for schedule(static) nowait
      for (int64_t item = 0; item < blocks; ++item) {
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
}

}  // namespace

extern "C" void mstar_lora_delta(const LoraTarget* target, const LoraPlan* plan, const void* x, int64_t x_stride, void* y,
                                 int64_t y_stride) {
  if (target->is_bf16)
    run(*target, *plan, static_cast<const Bf16*>(x), x_stride, static_cast<Bf16*>(y), y_stride);
  else
    run(*target, *plan, static_cast<const float*>(x), x_stride, static_cast<float*>(y), y_stride);
}
