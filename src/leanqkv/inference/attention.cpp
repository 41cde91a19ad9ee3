// Attention of one query per sequence, over keys and values where they lie in a cache.
//
// Keys and values are read once, whatever the number of queries that share them. Sums are in float32. The strides of a
// dimension are in elements; the last dimension of every tensor is contiguous.
//
// Values may be one head that all queries read, beside several heads of keys; it is read once too. They may be a latent
// with the keys behind it, as they were before rotary positions: these are turned back here, row by row, and nowhere kept.
//
// Each head's positions are cut into `chunks` parts, which threads take in turn ("flash-decoding", Dao et al. 2023,
// https://pytorch.org/blog/flash-decoding). A part leaves its largest score, the sum of its weights and its weighted
// sum of values; these are put together at the end.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// The same, in the same order, as `_Call` in attention.py.
struct Call {
  const void* query;   // [batch, heads * group, head_dim]
  const void* keys;    // [batch, heads * key_heads, length, head_dim]
  const void* values;  // [batch, heads, length, value_dim]
  const float* mask;   // [batch or 1, length], added to the scores; or null
  const void* plain;   // keys that follow the values, [batch, plain_heads, length, plain_dim]; or null
  const void* cos;     // what turns their first `turned` columns back, [batch or 1, length, 2 * frequencies]; or null
  const void* sin;
  const int64_t* frequency;  // of the first half of these columns, and so of the second; or null: one after the other
  void* output;        // [batch, heads * group, value_dim + plain_heads * plain_dim]
  int64_t batch, heads, group, length, head_dim, value_dim, threads, chunks;
  int64_t key_heads;  // of each head of values; they share its `group` queries evenly
  int64_t plain_heads, plain_dim, turned, frequencies;
  int64_t query_batch, query_head;
  int64_t key_batch, key_head, key_row;
  int64_t value_batch, value_head, value_row;
  int64_t plain_batch, plain_head, plain_row;
  int64_t table_batch, table_row;
  int64_t mask_batch;
  int64_t output_batch, output_head;
  float scaling;
};

namespace {

using Floats = at::vec::Vectorized<float>;
constexpr int64_t kFloats = Floats::size();

// Elements in a vector of T, and vectors of float that hold as many.
template <typename T>
constexpr int64_t kWidth = at::vec::Vectorized<T>::size();
template <typename T>
constexpr int64_t kParts = kWidth<T> / kFloats;

// How far ahead of its use a row is asked for. A cache longer than its contents lies in runs too short for what the
// processor foresees by itself.
constexpr int64_t kBytesAhead = 3072;
constexpr int64_t kLine = 64;
constexpr int64_t kLineFloats = kLine / int64_t(sizeof(float));
// Sums that begin at a line of the cache: vectors that lie across two lines are slower.
struct alignas(kLine) Line {
  float floats[kLineFloats];
};
// Rows of values that are added up between a load and a store of the sum.
constexpr int64_t kRows = 4;
// The score of what is not to be seen.
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The next `left` elements, or as many of them as a vector has, as floats; zeros in place of those there are not.
template <typename T>
inline void load(const T* from, int64_t left, Floats (&to)[kParts<T>]) {
  using Raw = at::vec::Vectorized<T>;
  const Raw raw = left >= kWidth<T> ? Raw::loadu(from) : Raw::loadu(from, left);
  if constexpr (std::is_same_v<T, float>) {
    to[0] = raw;
  } else {
    std::tie(to[0], to[1]) = at::vec::convert_to_float<T>(raw);
  }
}

inline float sum(const Floats& of) {
  return at::vec::vec_reduce_all<float>([](const Floats& a, const Floats& b) { return a + b; }, of);
}

template <typename T>
inline void ask_for(const T* row, int64_t size) {
  for (int64_t d = 0; d < size; d += kLine / int64_t(sizeof(T))) __builtin_prefetch(row + d);
}

// Rows between the one in use and the one to be asked for.
template <typename T>
inline int64_t rows_ahead(int64_t size) {
  return std::max<int64_t>(kRows, kBytesAhead / (size * int64_t(sizeof(T))));
}

template <typename T>
inline int64_t padded(int64_t size) {
  return (size + kWidth<T> - 1) / kWidth<T> * kWidth<T>;
}

// Replaces scores by exp(score - highest) and returns the highest and the sum of the new values. Where nothing is to be
// seen, as of a padding token, the highest is -inf and all else zero.
std::pair<float, float> exponentials(float* row, int64_t length) {
  const float highest = length ? *std::max_element(row, row + length) : kNothing;
  if (highest == kNothing) {
    std::fill(row, row + length, 0.0f);
    return {kNothing, 0.0f};
  }
  Floats totals(0.0f);
  float total = 0.0f;
  int64_t n = 0;
  for (; n + kFloats <= length; n += kFloats) {
    const Floats weights = (Floats::loadu(row + n) - Floats(highest)).exp();
    totals = totals + weights;
    weights.store(row + n);
  }
  for (; n < length; ++n) {
    row[n] = std::exp(row[n] - highest);
    total += row[n];
  }
  return {highest, total + sum(totals)};
}

// Columns of a value, with the keys that follow it.
inline int64_t columns(const Call& call) { return call.value_dim + call.plain_heads * call.plain_dim; }

// What a part of a head leaves for the `group` queries that share it: weighted sums of values [group, padded width],
// highest scores [group], sums of weights [group].
template <typename T>
inline int64_t left_size(const Call& call) {
  return call.group * (padded<T>(columns(call)) + 2);
}

// Where the `length` positions of a part begin: its keys, values and what follows them.
template <typename T>
struct Part {
  const T *query, *keys, *values, *plain, *cos, *sin;
  const float* mask;
  int64_t length;
};

// Scores of `count` queries, [count, query_size], with one head of keys: weights [count, length].
template <typename T>
void score(
    const Call& call, const Part<T>& part, const T* keys, const float* queries, int64_t query_size, int64_t count,
    float* weights) {
  constexpr int64_t width = kWidth<T>, parts = kParts<T>;
  const int64_t head_dim = call.head_dim, length = part.length, ahead = rows_ahead<T>(head_dim);
  for (int64_t n = 0; n < length; ++n) {
    const T* const key = keys + n * call.key_row;
    ask_for(key + ahead * call.key_row, head_dim);
    for (int64_t g = 0; g < count; ++g) {
      Floats totals[parts], read[parts];
      for (int64_t p = 0; p < parts; ++p) totals[p] = Floats(0.0f);
      for (int64_t d = 0; d < head_dim; d += width) {
        load(key + d, head_dim - d, read);
        for (int64_t p = 0; p < parts; ++p) {
          totals[p] = at::vec::fmadd(read[p], Floats::loadu(queries + g * query_size + d + p * kFloats), totals[p]);
        }
      }
      for (int64_t p = 1; p < parts; ++p) totals[0] = totals[0] + totals[p];
      weights[g * length + n] = sum(totals[0]) + (part.mask ? part.mask[n] : 0.0f);
    }
  }
}

// Adds `count` rows of values to the sums [group, size] of all queries, each times its weight of position n.
template <typename T>
inline void add_rows(
    const Call& call, const T* rows, int64_t row, int64_t width_of_rows, int64_t count, const float* weights,
    int64_t length, float* sums, int64_t size) {
  constexpr int64_t width = kWidth<T>, parts = kParts<T>;
  for (int64_t d = 0; d < width_of_rows; d += width) {
    Floats read[kRows][parts];
    for (int64_t r = 0; r < count; ++r) load(rows + r * row + d, width_of_rows - d, read[r]);
    for (int64_t g = 0; g < call.group; ++g) {
      const float* const weight = weights + g * length;
      for (int64_t p = 0; p < parts; ++p) {
        float* const at = sums + g * size + d + p * kFloats;
        Floats total = Floats::loadu(at);
        for (int64_t r = 0; r < count; ++r) total = at::vec::fmadd(Floats(weight[r]), read[r][p], total);
        total.store(at);
      }
    }
  }
}

// A latent and the keys behind it, as they were before rotary positions; one row, as floats.
template <typename T>
inline void turn_back(const Call& call, const Part<T>& part, int64_t n, float* __restrict__ row) {
  const T* __restrict__ const latent = part.values + n * call.value_row;
  for (int64_t d = 0; d < call.value_dim; ++d) row[d] = static_cast<float>(latent[d]);
  const int64_t half = call.turned / 2;
  const T* __restrict__ const cos = part.cos + n * call.table_row;
  const T* __restrict__ const sin = part.sin + n * call.table_row;
  for (int64_t h = 0; h < call.plain_heads; ++h) {
    const T* __restrict__ const key = part.plain + h * call.plain_head + n * call.plain_row;
    float* __restrict__ const to = row + call.value_dim + h * call.plain_dim;
    const auto turn = [&](int64_t d, int64_t at, int64_t next) {
      const float first = static_cast<float>(key[d]), second = static_cast<float>(key[d + half]);
      to[d] = first * static_cast<float>(cos[at]) + second * static_cast<float>(sin[at]);
      to[d + half] = second * static_cast<float>(cos[next]) + first * static_cast<float>(sin[next]);
    };
    if (call.frequency) {
      for (int64_t d = 0; d < half; ++d) turn(d, call.frequency[d], call.frequency[d] + call.frequencies);
    } else {
      for (int64_t d = 0; d < half; ++d) turn(d, d, d + half);
    }
    for (int64_t d = call.turned; d < call.plain_dim; ++d) to[d] = static_cast<float>(key[d]);
  }
}

// The `group` queries that share a head of values, on the positions of a part. Returns where in `scratch` the
// `left_size` floats begin that it leaves.
template <typename T>
float* attend(const Call& call, const Part<T>& part, float* scratch) {
  const int64_t group = call.group, head_dim = call.head_dim, length = part.length;
  const int64_t query_size = padded<T>(head_dim), output_size = padded<T>(columns(call));
  float* const queries = scratch;  // [group, query_size]
  float* const left = queries + group * query_size;
  float* const rows = left + left_size<T>(call);  // [kRows, output_size]
  float* const weights = rows + kRows * output_size;  // [group, length]
  std::fill(queries, weights, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t d = 0; d < head_dim; ++d) {
      queries[g * query_size + d] = static_cast<float>(part.query[g * call.query_head + d]) * call.scaling;
    }
  }
  const int64_t shared = group / call.key_heads;
  for (int64_t k = 0; k < call.key_heads; ++k) {
    const int64_t first = k * shared;
    score(
        call, part, part.keys + k * call.key_head, queries + first * query_size, query_size, shared,
        weights + first * length);
  }
  float *const highest = left + group * output_size, *const totals = highest + group;
  for (int64_t g = 0; g < group; ++g) std::tie(highest[g], totals[g]) = exponentials(weights + g * length, length);

  const int64_t ahead = rows_ahead<T>(call.value_dim);
  for (int64_t n = 0; n < length; n += kRows) {
    const int64_t count = std::min(kRows, length - n);
    if (part.plain) {
      for (int64_t r = 0; r < count; ++r) turn_back(call, part, n + r, rows + r * output_size);
      add_rows<float>(call, rows, output_size, columns(call), count, weights + n, length, left, output_size);
      continue;
    }
    const T* const values = part.values + n * call.value_row;
    for (int64_t r = 0; r < count; ++r) ask_for(values + (r + ahead) * call.value_row, call.value_dim);
    add_rows<T>(call, values, call.value_row, call.value_dim, count, weights + n, length, left, output_size);
  }
  return left;
}

// Puts together what the parts of a head, one behind the other in `left`, have for query `g` of its group.
template <typename T>
void combine(const Call& call, float* left, int64_t g, T* output) {
  const int64_t size = padded<T>(columns(call)), next = left_size<T>(call);
  float* const sums = left + g * size;
  const float *const highs = left + call.group * size + g, *const totals = highs + call.group;
  float highest = kNothing, total = 0.0f;
  for (int64_t c = 0; c < call.chunks; ++c) highest = std::max(highest, highs[c * next]);
  for (int64_t c = 0; c < call.chunks; ++c) {
    const float share = highs[c * next] == kNothing ? 0.0f : std::exp(highs[c * next] - highest);
    total += share * totals[c * next];
    for (int64_t d = 0; d < size; ++d) sums[d] = share * sums[c * next + d] + (c ? sums[d] : 0.0f);
  }
  const float scale = total > 0.0f ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < columns(call); ++d) output[d] = static_cast<T>(sums[d] * scale);
}

template <typename T>
void run(const Call& call) {
  const int64_t heads = call.batch * call.heads, chunks = call.chunks, longest = (call.length + chunks - 1) / chunks;
  const int64_t size = left_size<T>(call);
  const auto* const query = static_cast<const T*>(call.query);
  const auto* const keys = static_cast<const T*>(call.keys);
  const auto* const values = static_cast<const T*>(call.values);
  const auto* const plain = static_cast<const T*>(call.plain);
  const auto *const cos = static_cast<const T*>(call.cos), *const sin = static_cast<const T*>(call.sin);
  auto* const output = static_cast<T*>(call.output);
  const auto finish = [&](int64_t head, int64_t g, float* left) {
    const int64_t b = head / call.heads, h = head % call.heads;
    combine<T>(call, left, g, output + b * call.output_batch + (h * call.group + g) * call.output_head);
  };
  std::vector<float> all(chunks > 1 ? heads * chunks * size : 0);
#pragma omp parallel num_threads(call.threads)
  {
    // A thread adds up in memory of its own: what different parts leave shares lines of the cache at their ends.
    const int64_t queries = call.group * padded<T>(call.head_dim), rows = kRows * padded<T>(columns(call));
    std::vector<Line> scratch((size + queries + rows + call.group * longest) / kLineFloats + 1);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < heads * chunks; ++i) {
      const int64_t head = i / chunks, b = head / call.heads, h = head % call.heads;
      const int64_t start = call.length * (i % chunks) / chunks, end = call.length * (i % chunks + 1) / chunks;
      const int64_t table = b * call.table_batch + start * call.table_row;
      const Part<T> part{
          query + b * call.query_batch + h * call.group * call.query_head,
          keys + b * call.key_batch + h * call.key_heads * call.key_head + start * call.key_row,
          values + b * call.value_batch + h * call.value_head + start * call.value_row,
          plain ? plain + b * call.plain_batch + start * call.plain_row : nullptr,
          cos ? cos + table : nullptr,
          sin ? sin + table : nullptr,
          call.mask ? call.mask + b * call.mask_batch + start : nullptr,
          end - start};
      float* const left = attend<T>(call, part, scratch[0].floats);
      if (chunks > 1) {
        std::copy(left, left + size, all.begin() + i * size);
      } else {
        for (int64_t g = 0; g < call.group; ++g) finish(head, g, left);
      }
    }
    if (chunks > 1) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < heads * call.group; ++i) {
        const int64_t head = i / call.group;
        finish(head, i % call.group, all.data() + head * chunks * size);
      }
    }
  }
}

}  // namespace

extern "C" void attend_float32(const Call* call) { run<float>(*call); }
extern "C" void attend_bfloat16(const Call* call) { run<c10::BFloat16>(*call); }
extern "C" void attend_float16(const Call* call) { run<c10::Half>(*call); }
