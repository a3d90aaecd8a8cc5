// What the CPU kernels share: 16-lane vectors of GCC's own kind, the two storage types, and their roundings.
//
// Sums are float32 whatever the storage. GCC's vector types keep the code free of any one instruction set; -march=native picks the
// best. Where AVX512-BF16 is there, products of bfloat16 pairs and roundings to it use it (it takes subnormals as zero).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace mstar {

constexpr int kLanes = 16;

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef float vfloat8 __attribute__((vector_size(32)));
typedef float vfloat4 __attribute__((vector_size(16)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vhalf __attribute__((vector_size(kLanes * 2)));

struct Bf16 {
  uint16_t bits;
};

// Vectors go by value and are cast by GCC's own cast: sums that an address was taken of would not stay in registers.
template <typename To, typename From>
inline To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps the bits");
  if constexpr (std::is_scalar_v<To>) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
  } else {
    return (To)from;
  }
}

inline float widen(float value) { return value; }
inline float widen(Bf16 value) { return cast<float>(static_cast<uint32_t>(value.bits) << 16); }

inline vfloat widen(vhalf half) {
#ifdef __AVX512F__  // GCC 12 makes four instructions of the other
  return cast<vfloat>((vuint)_mm512_cvtepu16_epi32((__m256i)half) << 16);
#else
  return cast<vfloat>(__builtin_convertvector(half, vuint) << 16);
#endif
}

inline vfloat load(const float* from) {
  vfloat out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline vfloat load(const Bf16* from) {
  vhalf half;
  std::memcpy(&half, from, sizeof half);
  return widen(half);
}

// To the nearest bfloat16, ties to even, as torch rounds; NaN stays NaN.
inline vhalf narrow(vfloat value) {
#ifdef __AVX512BF16__
  return (vhalf)_mm512_cvtneps_pbh((__m512)value);
#else
  const vuint bits = cast<vuint>(value);
  const vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded, vhalf);
#endif
}

inline void store(vfloat value, float* to) { std::memcpy(to, &value, sizeof value); }
inline void store(vfloat value, Bf16* to) {
  const vhalf half = narrow(value);
  std::memcpy(to, &half, sizeof half);
}

// The first `count` lanes alone. Loops, since a copy of unknown size is a slow string instruction or a call.
template <typename T>
inline void store_some(vfloat value, T* to, int64_t count) {
  if (count >= kLanes) return store(value, to);
  T lanes[kLanes];
  store(value, lanes);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
}
template <typename T>
inline vfloat load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
  return load(lanes);
}

// As it would come back from memory.
template <typename T>
inline vfloat rounded(vfloat value) {
  if constexpr (std::is_same_v<T, float>)
    return value;
  else
    return widen(narrow(value));
}

inline vfloat all(float value) { return vfloat{} + value; }

// The lanes' sum, by halves: always in this order.
inline float sum(vfloat v) {
  vfloat8 eight[2];
  std::memcpy(eight, &v, sizeof eight);
  const vfloat8 of_eight = eight[0] + eight[1];
  vfloat4 four[2];
  std::memcpy(four, &of_eight, sizeof four);
  const vfloat4 of_four = four[0] + four[1];
  return (of_four[0] + of_four[2]) + (of_four[1] + of_four[3]);
}

// e^x to about one unit in the last place (Cephes' reduction and polynomial); 0 below -87.3, infinity above 88.7, NaN for NaN.
inline vfloat exp(vfloat x) {
  const vfloat clamped = x < -87.3f ? all(-87.3f) : x > 88.7f ? all(88.7f) : x;
  const vfloat magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vfloat power = (clamped * 1.44269504088896341f + magic) - magic;
  const vfloat r = clamped - power * 0.693359375f - power * -2.12194440e-4f;
  vfloat p = all(1.9875691500e-4f);
  const float rest[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  for (const float c : rest) p = p * r + c;
  const vfloat value = p * r * r + r + 1.0f;
  // 2^power in two halves: at the upper end one factor alone would overflow.
  const vint whole = __builtin_convertvector(power, vint), half = whole >> 1;
  const vfloat scaled = value * cast<vfloat>((half + 127) << 23) * cast<vfloat>((whole - half + 127) << 23);
  return x < -87.3f ? all(0.0f) : x > 88.7f ? all(__builtin_inff()) : x != x ? x : scaled;
}

}  // namespace mstar
