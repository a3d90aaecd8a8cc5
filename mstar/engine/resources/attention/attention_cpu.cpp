// Causal attention over paged keys and values on a CPU, without gathering them: decode rows and prefill chunks in one call.
//
//     item     (row, KV head, up to 32 of the queries that read it)     a query is one token and one query head
//     chunk    128 positions, counted from the row's first, in units of 16
//     unit     what `tile` streams: keys as columns, values with two keys side by side where a step is two
//
//              keys    [head dims / step] [16 keys] [one step]
//              values  [16 / step] [head dims] [one step]
//
// Pages hold such units, per KV head, where their sizes divide by 16; else keys and values lie as they come, and units are made of them
// anew in every step. A value's unit is zeroed when its first position is written, so that no stale number meets a weight of 0.
//
//       scores = q K^T     tile: columns are keys, steps are head dims
//       p = e^(score - most of the chunk), 0 where the query does not see the key
//       out_c = p V        tile: columns are head dims, steps are keys
//       total = total * e^(most_before - most) + out_c * e^(most_of_chunk - most)          chunk by chunk, in order
//
// Sums are float32; p is rounded to the storage type before p V. A query's result is a function of its own row alone, whatever tile it
// rides in: the chunks lie at fixed positions. Where there are few items, the chunks of an item are shared out and
// merged afterwards in the same order, so to the same bits. Only positions that the row has written ever count.
#include <cstdlib>
#include <vector>

#include "../../../native/tile.h"

using namespace mstar;

extern "C" {

struct Attention {  // of one rank
  void* k;          // [layers, pages, kv_heads, block / 16] units, or [layers, pages, block, kv_heads, head_dim]
  void* v;
  const int64_t* first_query;  // [kv_heads + 1]: the query heads that read each KV head
  const int64_t* windows;      // [layers]: positions that a token sees, itself included; 0 is all
  int64_t pages, block, kv_heads, head_dim;
  int64_t is_bf16;
  float scale;
};

struct AttentionRows {   // of one step
  const int64_t* table;  // [rows, width]: pages in order
  const int64_t* starts;  // [rows]: first position that is new
  const int64_t* counts;  // [rows]: new positions
  int64_t rows, width;
};

struct Heads {  // q [T, query heads, head_dim], or k or v: strides in elements, head dims side by side
  const void* data;
  int64_t token_stride, head_stride;
};
}

namespace {

constexpr int64_t kChunk = 128, kQueries = 32, kUnit = kLanes;
constexpr int64_t kUnits = kChunk / kUnit;  // of a chunk
constexpr int kFew = 4;                     // groups at once where there are few rows

struct Item {
  int64_t row, kv_head, first_token;      // first_token: the row's first in the step
  int64_t first_query, queries;           // among the row's tokens x the query heads of this KV head
  int64_t first_chunk, chunks, positions;  // positions: keys that its last token sees, from the row's first
};

int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

template <typename T>
struct View {
  const T* data;
  int64_t token_stride, head_stride;
  explicit View(const Heads& heads) : data(static_cast<const T*>(heads.data)), token_stride(heads.token_stride), head_stride(heads.head_stride) {}
  const T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

struct Keys {  // a group is a unit
  static constexpr int64_t kRun = 16;
  static constexpr int64_t stride_bytes() { return kLanes * 4; }
  const uint32_t* const* units;
  const uint32_t* at(int64_t step, int64_t group) const { return units[group] + step * kLanes; }
};

template <typename T>
struct Values {  // a group is 16 head dims
  static constexpr int64_t kRun = kUnit / kInStep<T>;
  const uint32_t* const* units;
  int64_t width;
  int64_t stride_bytes() const { return width * 4; }
  const uint32_t* at(int64_t step, int64_t group) const { return units[step / kRun] + step % kRun * width + group * kLanes; }
};

// What one chunk gives its queries, and what all chunks up to it give: sums are kept by lane until the end.
struct Partial {
  float* out;   // [queries, padded head dims]
  float* sums;  // [queries, lanes]
  float* most;  // [queries]; -inf where no key was seen
  static int64_t floats(int64_t queries, int64_t width) { return queries * (width + kLanes + 1); }
  Partial(float* at, int64_t queries, int64_t width) : out(at), sums(at + queries * width), most(sums + queries * kLanes) {}
};

template <typename T>
struct Scratch {  // of one thread
  std::vector<T> q;        // [queries, head dims, padded to a step]
  std::vector<uint32_t> k, v;  // units that were made
  std::vector<float> scores, partials;
  std::vector<T> p;  // [queries, kChunk]
  int64_t places[kChunk];  // of the chunk's keys, in elements from the layer's first
};

// Swaps the off-diagonal quarters of every square of `2 * width`.
template <int width>
inline void swap_quarters(vuint (&rows)[kLanes]) {
  vint low{}, high{};
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane & width ? kLanes + lane - width : lane;
    high[lane] = lane & width ? kLanes + lane : lane + width;
  }
  for (int i = 0; i < kLanes; ++i) {
    if (i & width) continue;
    const vuint a = rows[i], b = rows[i + width];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + width] = __builtin_shuffle(a, b, high);
  }
}
inline void transpose(vuint (&rows)[kLanes]) {
  swap_quarters<8>(rows);
  swap_quarters<4>(rows);
  swap_quarters<2>(rows);
  swap_quarters<1>(rows);
}

float largest(vfloat v) {
  float most = v[0];
  for (int lane = 1; lane < kLanes; ++lane) most = v[lane] > most ? v[lane] : most;
  return most;
}

template <typename T>
class Step {
 public:
  Step(const Attention& attention, const AttentionRows& rows, int64_t layer, const Heads& q, const Heads& k, const Heads& v, T* out)
      : a_(attention), rows_(rows), q_(q), k_(k), v_(v), out_(out), window_(attention.windows[layer]), dim_(attention.head_dim),
        width_(padded(attention.head_dim)), num_heads_(attention.first_query[attention.kv_heads]),
        holds_units_(attention.block % kUnit == 0 && attention.head_dim % kLanes == 0) {
    const int64_t layer_size = a_.pages * a_.block * a_.kv_heads * dim_;
    keys_ = static_cast<T*>(a_.k) + layer * layer_size;
    values_ = static_cast<T*>(a_.v) + layer * layer_size;
  }

  void run(int64_t threads) {
    const std::vector<Item> items = list_items();
    const int64_t count = static_cast<int64_t>(items.size());
    std::vector<int64_t> parts(1, 0);  // where the chunks of each item begin among all
    for (const Item& item : items) parts.push_back(parts.back() + item.chunks);
    const bool shares = count < 4 * threads && parts.back() > count && threads > 1;
    std::vector<float> shared;
    const int64_t stride = Partial::floats(kQueries, width_);
    if (shares) shared.resize(parts.back() * stride);
#pragma omp parallel num_threads(threads)
    {
      Scratch<T>& scratch = own_scratch();
      const Products products;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows_.rows; ++row) write_row(row);
      if (!shares) {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) {
          const Item& item = items[count - 1 - i];  // long ones come last in a chunked prompt and go first
          Partial total(scratch.partials.data(), item.queries, width_), part(total.out + stride, item.queries, width_);
          load_queries(item, scratch);
          for (int64_t c = 0; c < item.chunks; ++c) {
            attend(item, item.first_chunk + c, scratch, c == 0 ? total : part);
            if (c > 0) merge(item, total, part);
          }
          finish(item, total);
        }
      } else {
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < parts.back(); ++p) {
          int64_t i = 0;
          while (parts[i + 1] <= p) ++i;
          load_queries(items[i], scratch);
          attend(items[i], items[i].first_chunk + p - parts[i], scratch, Partial(&shared[p * stride], items[i].queries, width_));
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) {
          const Partial total(&shared[parts[i] * stride], items[i].queries, width_);
          for (int64_t p = parts[i] + 1; p < parts[i + 1]; ++p)
            merge(items[i], total, Partial(&shared[p * stride], items[i].queries, width_));
          finish(items[i], total);
        }
      }
    }
  }

 private:
  int64_t heads_of(int64_t kv_head) const { return a_.first_query[kv_head + 1] - a_.first_query[kv_head]; }

  std::vector<Item> list_items() const {
    std::vector<Item> items;
    int64_t first_token = 0;
    for (int64_t row = 0; row < rows_.rows; first_token += rows_.counts[row], ++row) {
      for (int64_t kv_head = 0; kv_head < a_.kv_heads; ++kv_head) {
        const int64_t heads = heads_of(kv_head), all = rows_.counts[row] * heads;
        for (int64_t query = 0; query < all; query += kQueries) {
          const int64_t queries = all - query < kQueries ? all - query : kQueries;
          const int64_t first_position = rows_.starts[row] + query / heads;
          const int64_t positions = rows_.starts[row] + (query + queries - 1) / heads + 1;
          const int64_t first_seen = window_ && first_position + 1 > window_ ? first_position + 1 - window_ : 0;
          const int64_t first_chunk = first_seen / kChunk, chunks = (positions - 1) / kChunk + 1 - first_chunk;
          items.push_back({row, kv_head, first_token, query, queries, first_chunk, chunks, positions});
        }
      }
    }
    return items;
  }

  Scratch<T>& own_scratch() const {
    static thread_local Scratch<T> scratch;
    scratch.q.resize(kQueries * steps_of<T>(dim_) * kInStep<T>);
    if (!holds_units_) scratch.k.resize(steps_of<T>(dim_) * kChunk);
    if (!holds_units_) scratch.v.resize(steps_of<T>(kChunk) * width_);
    scratch.scores.resize(kQueries * kChunk);
    scratch.p.resize(kQueries * kChunk);
    scratch.partials.resize(2 * Partial::floats(kQueries, width_));
    return scratch;
  }

  int64_t page(int64_t row, int64_t position) const { return rows_.table[row * rows_.width + position / a_.block]; }

  // Where pages hold units: that of 16 positions, in elements from the layer's first.
  int64_t unit(int64_t row, int64_t position, int64_t kv_head) const {
    const int64_t before = page(row, position) * a_.kv_heads + kv_head;
    return (before * (a_.block / kUnit) + position % a_.block / kUnit) * kUnit * dim_;
  }

  // Where they do not: that of one position.
  int64_t slot(int64_t row, int64_t position, int64_t kv_head) const {
    return ((page(row, position) * a_.block + position % a_.block) * a_.kv_heads + kv_head) * dim_;
  }

  void find_keys(const Item& item, int64_t first, int64_t count, int64_t* places) const {
    const int64_t key_size = a_.kv_heads * dim_;
    for (int64_t key = 0; key < count;) {
      const int64_t within = (first + key) % a_.block, left = count - key, some = a_.block - within < left ? a_.block - within : left;
      const int64_t place = slot(item.row, first + key, item.kv_head);
      for (int64_t i = 0; i < some; ++i) places[key + i] = place + i * key_size;
      key += some;
    }
  }

  void write_row(int64_t row) {
    int64_t token = 0;
    for (int64_t before = 0; before < row; ++before) token += rows_.counts[before];
    for (int64_t i = 0; i < rows_.counts[row]; ++i) {
      const int64_t position = rows_.starts[row] + i;
      for (int64_t head = 0; head < a_.kv_heads; ++head) {
        const T *key = k_.at(token + i, head), *value = v_.at(token + i, head);
        if (holds_units_) {
          write_to_unit(key, value, unit(row, position, head), position % kUnit);
        } else {
          const int64_t to = slot(row, position, head);
          std::memcpy(keys_ + to, key, dim_ * sizeof(T));
          std::memcpy(values_ + to, value, dim_ * sizeof(T));
        }
      }
    }
  }

  void write_to_unit(const T* key, const T* value, int64_t to, int64_t lane) {
    constexpr int64_t in_step = kInStep<T>;
    T *keys = keys_ + to, *values = values_ + to;
    if (lane == 0) std::memset(values, 0, kUnit * dim_ * sizeof(T));
    for (int64_t dim = 0; dim < dim_; dim += in_step) std::memcpy(keys + dim * kUnit + lane * in_step, key + dim, in_step * sizeof(T));
    T* const line = values + lane / in_step * in_step * dim_ + lane % in_step;
    for (int64_t dim = 0; dim < dim_; ++dim) line[dim * in_step] = value[dim];
  }

  void load_queries(const Item& item, Scratch<T>& scratch) const {
    const int64_t heads = heads_of(item.kv_head), first_head = a_.first_query[item.kv_head];
    for (int64_t i = 0; i < item.queries; ++i) {
      const int64_t query = item.first_query + i;
      std::memcpy(&scratch.q[i * dim_], q_.at(item.first_token + query / heads, first_head + query % heads), dim_ * sizeof(T));
    }
  }

  void find_units(const Item& item, int64_t first, int64_t count, const uint32_t** keys, const uint32_t** values) const {
    for (int64_t key = 0; key < count; key += kUnit) {
      const int64_t at = unit(item.row, first + key, item.kv_head);
      *keys++ = reinterpret_cast<const uint32_t*>(keys_ + at);
      *values++ = reinterpret_cast<const uint32_t*>(values_ + at);
    }
  }

  void make_units(const Item& item, int64_t first, int64_t count, Scratch<T>& scratch, const uint32_t** keys, const uint32_t** values) const {
    find_keys(item, first, count, scratch.places);
    uint32_t *k = scratch.k.data(), *v = scratch.v.data();
    for (int64_t key = 0; key < count; key += kUnit, k += steps_of<T>(dim_) * kUnit, v += kUnit / kInStep<T> * width_) {
      const int64_t some = count - key < kUnit ? count - key : kUnit;
      turn_keys(scratch.places + key, some, k);
      interleave_values(scratch.places + key, some, v);
      *keys++ = k;
      *values++ = v;
    }
  }

  void turn_keys(const int64_t* places, int64_t count, uint32_t* to) const {
    const int64_t steps = dim_ / kInStep<T>;
    const uint32_t* from[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) from[lane] = lane < count ? reinterpret_cast<const uint32_t*>(keys_ + places[lane]) : nullptr;
    for (int64_t step = 0; step < steps; step += kLanes) {
      vuint rows[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        rows[lane] = from[lane] == nullptr ? vuint{} : load_words_some(from[lane] + step, steps - step);
      }
      transpose(rows);
      for (int64_t i = 0; i < kLanes && step + i < steps; ++i) std::memcpy(to + (step + i) * kLanes, &rows[i], sizeof(vuint));
    }
  }

  void interleave_values(const int64_t* places, int64_t count, uint32_t* to) const {
    if (count < kUnit) std::memset(to, 0, kUnit / kInStep<T> * width_ * 4);
    for (int64_t key = 0; key < count; key += kInStep<T>, to += width_) {
      const T* even = values_ + places[key];
      const T* odd = kInStep<T> == 2 && key + 1 < count ? values_ + places[key + 1] : nullptr;
      for (int64_t dim = 0; dim < dim_; dim += kLanes) {
        vuint words = (vuint)load_some(even + dim, dim_ - dim);
        if constexpr (kInStep<T> == 2) words = words >> 16 | (odd == nullptr ? vuint{} : (vuint)load_some(odd + dim, dim_ - dim));
        std::memcpy(to + dim, &words, sizeof words);
      }
    }
  }

  void attend(const Item& item, int64_t chunk, Scratch<T>& scratch, const Partial& part) const {
    const int64_t first = chunk * kChunk, count = item.positions - first < kChunk ? item.positions - first : kChunk;
    const uint32_t *keys[kUnits], *values[kUnits];
    if (holds_units_)
      find_units(item, first, count, keys, values);
    else
      make_units(item, first, count, scratch, keys, values);
    float* scores = scratch.scores.data();
    const int64_t units = (count + kUnit - 1) / kUnit, size = sizeof(T);
    const Rows q{reinterpret_cast<char*>(scratch.q.data()), dim_ * size}, p{reinterpret_cast<char*>(scratch.p.data()), kChunk * size};
    int64_t at = 0;
    for (; kFew <= kSumsAtOnce && at + kFew <= units && item.queries <= kSumsAtOnce / kFew; at += kFew)
      product<kFew>(item.queries, Keys{keys + at}, dim_ / kInStep<T>, q, scores + at * kUnit, kChunk);
    for (; at + 2 <= units; at += 2) product<2>(item.queries, Keys{keys + at}, dim_ / kInStep<T>, q, scores + at * kUnit, kChunk);
    for (; at < units; ++at) product<1>(item.queries, Keys{keys + at}, dim_ / kInStep<T>, q, scores + at * kUnit, kChunk);
    for (int64_t i = 0; i < item.queries; ++i) soften(item, i, first, units, scores + i * kChunk, &scratch.p[i * kChunk], part);
    int64_t dim = 0;
    for (; kFew <= kSumsAtOnce && dim + kFew * kLanes <= width_; dim += kFew * kLanes) weigh<kFew>(item.queries, values, dim, count, p, part.out);
    for (; dim < width_; dim += kLanes) weigh<1>(item.queries, values, dim, count, p, part.out);
  }

  template <int groups>
  void weigh(int64_t queries, const uint32_t** values, int64_t dim, int64_t count, const Rows& p, float* out) const {
    const uint32_t* units[kUnits];
    int64_t steps = 0;
    for (int64_t i = 0; i * kUnit < count; ++i, steps += Values<T>::kRun) units[i] = values[i] + dim;  // past `count` both are zero
    product<groups>(queries, Values<T>{units, width_}, steps, p, out + dim, width_);
  }

  template <int groups, typename Weight>
  static void product(int64_t rows, Weight weight, int64_t steps, Rows x, float* out, int64_t out_stride) {
    while (rows > 0) {
      const int64_t some = rows_at_once<T, groups>(rows);
      tile<T, groups>(some, weight, steps, x, out, out_stride);
      x.first = x[some];
      out += some * out_stride;
      rows -= some;
    }
  }

  // One query's scores of a chunk to its p; zero up to the chunk's padded end.
  void soften(const Item& item, int64_t i, int64_t first, int64_t groups, float* scores, T* p, const Partial& part) const {
    const int64_t last = rows_.starts[item.row] + (item.first_query + i) / heads_of(item.kv_head) - first;  // the last seen, in the chunk
    const int64_t from = window_ ? last - window_ + 1 : 0;
    const vint lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vfloat most = all(-__builtin_inff());
    for (int64_t g = 0; g < groups; ++g) {
      const vint key = lanes + static_cast<int32_t>(g * kLanes);
      vfloat score = load(scores + g * kLanes) * a_.scale;
      score = key > static_cast<int32_t>(last) || key < static_cast<int32_t>(from) ? all(-__builtin_inff()) : score;
      store(score, scores + g * kLanes);
      most = score > most ? score : most;
    }
    part.most[i] = largest(most);
    const float base = part.most[i] == -__builtin_inff() ? 0 : part.most[i];
    vfloat sums = all(0);
    for (int64_t g = 0; g < groups; ++g) {
      const vfloat value = exp(load(scores + g * kLanes) - base);
      store(value, p + g * kLanes);
      sums += rounded<T>(value);
    }
    store(sums, part.sums + i * kLanes);
  }

  void merge(const Item& item, const Partial& total, const Partial& part) const {
    for (int64_t i = 0; i < item.queries; ++i) {
      if (part.most[i] == -__builtin_inff() && load_sum(part, i) == 0) continue;
      const float most = part.most[i] > total.most[i] ? part.most[i] : total.most[i];
      const float keep = exp(all(total.most[i] - most))[0], add = exp(all(part.most[i] - most))[0];
      total.most[i] = most;
      fold(total.sums + i * kLanes, part.sums + i * kLanes, kLanes, keep, add);
      fold(total.out + i * width_, part.out + i * width_, width_, keep, add);
    }
  }

  static float load_sum(const Partial& part, int64_t i) { return sum(load(part.sums + i * kLanes)); }

  static void fold(float* total, const float* part, int64_t count, float keep, float add) {
    for (int64_t at = 0; at < count; at += kLanes) store(load(total + at) * keep + load(part + at) * add, total + at);
  }

  void finish(const Item& item, const Partial& total) const {
    const int64_t heads = heads_of(item.kv_head), first_head = a_.first_query[item.kv_head];
    for (int64_t i = 0; i < item.queries; ++i) {
      const int64_t query = item.first_query + i, head = first_head + query % heads;
      T* to = out_ + ((item.first_token + query / heads) * num_heads_ + head) * dim_;
      const float share = 1 / load_sum(total, i);
      for (int64_t dim = 0; dim < dim_; dim += kLanes)
        store_some(load(total.out + i * width_ + dim) * share, to + dim, dim_ - dim);
    }
  }

  const Attention& a_;
  const AttentionRows& rows_;
  const View<T> q_, k_, v_;
  T* out_;
  T* keys_;
  T* values_;
  const int64_t window_, dim_, width_, num_heads_;
  const bool holds_units_;
};

}  // namespace

// Writes `k` and `v [T, kv_heads, head_dim]` to the rows' pages, then attends: `out [T, query heads * head_dim]`.
extern "C" void mstar_attention(const Attention* attention, const AttentionRows* rows, int64_t layer, const Heads* q, const Heads* k,
                                const Heads* v, void* out, int64_t threads) {
  if (attention->is_bf16)
    Step<Bf16>(*attention, *rows, layer, *q, *k, *v, static_cast<Bf16*>(out)).run(threads);
  else
    Step<float>(*attention, *rows, layer, *q, *k, *v, static_cast<float*>(out)).run(threads);
}
