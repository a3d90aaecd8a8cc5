// The product that all kernels share: a few rows times a few groups of 16 columns, over the whole depth, in registers.
//
//     weight  at(step, group) -> [16 columns] [one step]    a step is one float, or two bfloat16 side by side: 64 bytes a group
//     x       [rows] [steps]
//     out     [rows] [groups * 16] = sum over the steps, in order, in float32
//
// One sum is one register lane from the first step to the last, so it does not depend on how many rows or groups are taken at once.
// Where the CPU has a matrix unit it takes bfloat16, for one row as for many, so that this stays true (`matrix.h`).
#pragma once

#include "matrix.h"
#include "vector.h"

namespace mstar {

#ifdef __AVX512F__
constexpr int kSumsAtOnce = 24, kRowsAtOnce = 8;  // of 32 registers of 16 lanes
#else
constexpr int kSumsAtOnce = 4, kRowsAtOnce = 4;
#endif

template <typename T>
constexpr int64_t kInStep = 4 / sizeof(T);  // inputs in one step

template <typename T>
inline int64_t steps_of(int64_t in) {
  return (in + kInStep<T> - 1) / kInStep<T>;
}

struct Rows {
  char* first;
  int64_t stride_bytes;
  char* operator[](int64_t row) const { return first + row * stride_bytes; }
};

template <typename T>
inline vfloat multiply_add(vfloat sum, vuint weight, vuint xs) {
  if constexpr (std::is_same_v<T, float>) {
    return sum + (vfloat)weight * (vfloat)xs;
  } else {
#ifdef __AVX512BF16__
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)xs);
#else
    const vfloat first = sum + (vfloat)(weight << 16) * (vfloat)(xs << 16);
    return first + (vfloat)(weight & 0xffff0000) * (vfloat)(xs & 0xffff0000);
#endif
  }
}

template <typename T>
inline vfloat multiply_add(vfloat sum, vuint weight, uint32_t x) {
  return multiply_add<T>(sum, weight, vuint{} + x);
}

inline vuint load_words(const uint32_t* from) {
  vuint out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline vuint load_words_some(const uint32_t* from, int64_t count) {
  if (count >= kLanes) return load_words(from);
  uint32_t lanes[kLanes] = {};
  for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
  return load_words(lanes);
}

struct Packed {  // [steps] [groups] [16 columns]
  static constexpr int64_t kRun = 16;  // steps that lie at one distance
  const uint32_t* first;
  int64_t groups;
  int64_t stride_bytes() const { return groups * kLanes * 4; }
  const uint32_t* at(int64_t step, int64_t group) const { return first + (step * groups + group) * kLanes; }
};

// Its own function: inlined into a larger one, the sums end up on the stack.
template <typename T, int groups, int rows, typename Weight>
__attribute__((noinline)) void tile(Weight weight, int64_t steps, const Rows& x, float* out, int64_t out_stride) {
  vfloat sums[rows][groups];
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < groups; ++g) sums[r][g] = all(0);
  for (int64_t step = 0; step < steps; ++step) {
    vuint weights[groups];
    for (int g = 0; g < groups; ++g) weights[g] = load_words(weight.at(step, g));
    for (int r = 0; r < rows; ++r) {
      uint32_t value;
      std::memcpy(&value, x[r] + step * 4, 4);
      for (int g = 0; g < groups; ++g) sums[r][g] = multiply_add<T>(sums[r][g], weights[g], value);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < groups; ++g) store(sums[r][g], out + r * out_stride + g * kLanes);
}

#ifdef __AMX_BF16__
constexpr int kMostRows = 2 * matrix::kRows;
#else
constexpr int kMostRows = kRowsAtOnce;
#endif

// How many of `rows` to take next, kMostRows at most: few enough for the registers, and evenly.
template <typename T, int groups>
inline int64_t rows_at_once(int64_t rows) {
  constexpr int64_t most = kSumsAtOnce / groups < kRowsAtOnce ? kSumsAtOnce / groups : kRowsAtOnce;
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, Bf16>) {
    constexpr int64_t of_unit = groups <= 3 ? kMostRows : matrix::kRows;
    if (matrix::is_there()) return rows < of_unit ? rows : rows < of_unit + matrix::kRows ? (rows + 1) / 2 : of_unit;
  }
#endif
  return rows > 2 * most ? most : rows > most ? (rows + 1) / 2 : rows;
}

// In a thread that works on such products, for as long as it does; the steps are counted from the first of a run.
using Products = matrix::Use;

template <typename T, int groups, typename Weight>
inline void tile(int64_t rows, Weight weight, int64_t steps, const Rows& x, float* out, int64_t out_stride) {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, Bf16>) {
    if (matrix::is_there()) {
      const int64_t whole = steps / Weight::kRun * Weight::kRun;
      matrix::tile<groups>(rows, weight, whole, x.first, x.stride_bytes, out, out_stride);
      for (int64_t r = 0; whole < steps && r < rows; ++r) {
        for (int g = 0; g < groups; ++g) {
          vfloat sums = load(out + r * out_stride + g * kLanes);
          for (int64_t step = whole; step < steps; ++step) {
            uint32_t value;
            std::memcpy(&value, x[r] + step * 4, 4);
            sums = multiply_add<T>(sums, load_words(weight.at(step, g)), value);
          }
          store(sums, out + r * out_stride + g * kLanes);
        }
      }
      return;
    }
  }
#endif
  switch (rows) {
#define MSTAR_TILE(n)                                                                                                     \
  case n:                                                                                                                 \
    if constexpr (n <= kRowsAtOnce && n * groups <= kSumsAtOnce) tile<T, groups, n>(weight, steps, x, out, out_stride); \
    break;
    MSTAR_TILE(1) MSTAR_TILE(2) MSTAR_TILE(3) MSTAR_TILE(4) MSTAR_TILE(5) MSTAR_TILE(6) MSTAR_TILE(7) MSTAR_TILE(8)
#undef MSTAR_TILE
  }
}

}  // namespace mstar
