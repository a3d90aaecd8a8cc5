// The CPU's matrix unit (Intel AMX) for products of bfloat16: 16 rows x 16 columns x 32 inputs in one instruction.
//
//     x       [rows <= 16] [32 inputs]          a register of 1 KiB, as the rows lie
//     weight  [16 steps] [16 columns] [a step]  as `tile` streams it: nothing is laid out anew
//     sums    [rows] [16 columns] float32
//
// A sum takes its inputs 32 (or 16) at a time, whatever the number of rows: as in `tile`, it is a function of its own row and column
// alone. The unit takes subnormals as zero. Linux gives it to a process that asks; where it does not, vectors do the work.
#pragma once

#include "vector.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mstar::matrix {

#ifndef __AMX_BF16__

inline bool is_there() { return false; }
struct Use {
  Use() {}
};

#else

constexpr int64_t kRows = 16;
constexpr int kX = 6, kWeight = 7;  // registers; 0 to 5 are sums

inline bool is_there() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_given = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_given;
}

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct Shape {
  int64_t rows, steps;  // of x; 0: not known
};
inline thread_local Shape shape{0, 0};

// A kernel's use of the unit in a thread: between two of them others may have given it other shapes.
struct Use {
  Use() { shape = {0, 0}; }
  ~Use() {
    if (shape.rows != 0) asm volatile("tilerelease" ::: "memory");
  }
  Use(const Use&) = delete;
};

inline void take_shape(int64_t rows, int64_t steps) {
  if (shape.rows == rows && shape.steps == steps) return;
  Shapes shapes;
  for (int i = 0; i <= kWeight; ++i) {
    shapes.rows[i] = static_cast<uint8_t>(i == kWeight ? steps : rows);
    shapes.row_bytes[i] = static_cast<uint16_t>(i == kX ? steps * 4 : kLanes * 4);
  }
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
  shape = {rows, steps};
}

template <int reg>
inline void load(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(reg) : "memory");
}
template <int reg>
inline void store(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(reg) : "memory");
}
template <int reg>
inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(reg));
}
template <int sums>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(kX), "i"(kWeight));
}

template <int first, int count, typename Do>
inline void each(Do work) {
  if constexpr (count > 0) {
    work(std::integral_constant<int, first>());
    each<first + 1, count - 1>(work);
  }
}

// `rows` up to 16, or up to 32 with at most 3 groups: the second 16 then overlap the first, to the same numbers.
// `steps` is a whole number of runs; `Weight::kRun` steps lie `stride_bytes()` apart.
template <int groups, typename Weight>
inline void tile(int64_t rows, const Weight& weight, int64_t steps, char* x, int64_t x_stride, float* out, int64_t out_stride) {
  constexpr int64_t run = Weight::kRun;
  const bool are_two = groups <= 3 && rows > kRows;
  const int64_t second = rows - kRows;
  take_shape(rows < kRows ? rows : kRows, run);
  each<0, groups>([](auto g) { clear<g>(); });
  if constexpr (groups <= 3)
    if (are_two) each<groups, groups>([](auto g) { clear<g>(); });
  for (int64_t step = 0; step < steps; step += run) {
    load<kX>(x + step * 4, x_stride);
    each<0, groups>([&](auto g) {
      load<kWeight>(weight.at(step, g), weight.stride_bytes());
      multiply_add<g>();
    });
    if constexpr (groups <= 3) {
      if (!are_two) continue;
      load<kX>(x + second * x_stride + step * 4, x_stride);
      each<0, groups>([&](auto back) {  // the last group's weights are still there
        constexpr int g = groups - 1 - back;
        if constexpr (back != 0) load<kWeight>(weight.at(step, g), weight.stride_bytes());
        multiply_add<groups + g>();
      });
    }
  }
  each<0, groups>([&](auto g) { store<g>(out + g * kLanes, out_stride * 4); });
  if constexpr (groups <= 3)
    if (are_two) each<0, groups>([&](auto g) { store<groups + g>(out + second * out_stride + g * kLanes, out_stride * 4); });
}

#endif

}  // namespace mstar::matrix
