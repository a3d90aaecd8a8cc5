// How fast memory can be read: the roof that a decode step stands under.
#include "../native/vector.h"

using namespace mstar;

extern "C" float mstar_stream(const float* data, int64_t count, int64_t threads) {
  float total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
  for (int64_t block = 0; block < count / 1024; ++block) {
    vfloat sums[4] = {};
    for (int64_t i = 0; i < 1024; i += 4 * kLanes)
      for (int part = 0; part < 4; ++part) sums[part] += load(data + block * 1024 + i + part * kLanes);
    total += sum(sums[0] + sums[1] + sums[2] + sums[3]);
  }
  return total;
}
