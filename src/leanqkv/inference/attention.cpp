// Attention of one query per sequence, over keys and values where they lie in a cache.
//
// Keys and values are read once, whatever the number of queries that share them. Sums are in float32. The strides of a
// dimension are in elements; the last dimension of every tensor is contiguous.
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
  const void* keys;    // [batch, heads, length, head_dim]
  const void* values;  // [batch, heads, length, value_dim]
  const float* mask;   // [batch or 1, length], added to the scores; or null
  void* output;        // [batch, heads * group, value_dim]
  int64_t batch, heads, group, length, head_dim, value_dim, threads, chunks;
  int64_t query_batch, query_head;
  int64_t key_batch, key_head, key_row;
  int64_t value_batch, value_head, value_row;
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

// What a part of a head leaves for the `group` queries that share it: weighted sums of values [group, padded width],
// highest scores [group], sums of weights [group].
template <typename T>
inline int64_t left_size(const Call& call) {
  return call.group * (padded<T>(call.value_dim) + 2);
}

// The `group` queries that share a head, on `length` of its keys and values. Returns where in `scratch` the `left_size`
// floats begin that it leaves.
template <typename T>
float* attend(
    const Call& call, const T* query, const T* keys, const T* values, const float* mask, int64_t length,
    float* scratch) {
  constexpr int64_t width = kWidth<T>, parts = kParts<T>;
  const int64_t group = call.group, head_dim = call.head_dim, value_dim = call.value_dim;
  const int64_t query_size = padded<T>(head_dim), output_size = padded<T>(value_dim);
  float* const queries = scratch;                    // [group, query_size]
  float* const left = queries + group * query_size;
  float* const weights = left + left_size<T>(call);  // [group, length]
  std::fill(queries, weights, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t d = 0; d < head_dim; ++d) {
      queries[g * query_size + d] = static_cast<float>(query[g * call.query_head + d]) * call.scaling;
    }
  }

  const int64_t keys_ahead = rows_ahead<T>(head_dim), values_ahead = rows_ahead<T>(value_dim);
  for (int64_t n = 0; n < length; ++n) {
    const T* const key = keys + n * call.key_row;
    ask_for(key + keys_ahead * call.key_row, head_dim);
    for (int64_t g = 0; g < group; ++g) {
      Floats totals[parts], read[parts];
      for (int64_t p = 0; p < parts; ++p) totals[p] = Floats(0.0f);
      for (int64_t d = 0; d < head_dim; d += width) {
        load(key + d, head_dim - d, read);
        for (int64_t p = 0; p < parts; ++p) {
          totals[p] = at::vec::fmadd(read[p], Floats::loadu(queries + g * query_size + d + p * kFloats), totals[p]);
        }
      }
      for (int64_t p = 1; p < parts; ++p) totals[0] = totals[0] + totals[p];
      weights[g * length + n] = sum(totals[0]) + (mask ? mask[n] : 0.0f);
    }
  }
  float *const highest = left + group * output_size, *const totals = highest + group;
  for (int64_t g = 0; g < group; ++g) std::tie(highest[g], totals[g]) = exponentials(weights + g * length, length);

  for (int64_t n = 0; n < length; n += kRows) {
    const int64_t count = std::min(kRows, length - n);
    const T* const rows = values + n * call.value_row;
    for (int64_t r = 0; r < count; ++r) ask_for(rows + (r + values_ahead) * call.value_row, value_dim);
    for (int64_t d = 0; d < value_dim; d += width) {
      Floats read[kRows][parts];
      for (int64_t r = 0; r < count; ++r) load(rows + r * call.value_row + d, value_dim - d, read[r]);
      for (int64_t g = 0; g < group; ++g) {
        const float* const weight = weights + g * length + n;
        for (int64_t p = 0; p < parts; ++p) {
          float* const at = left + g * output_size + d + p * kFloats;
          Floats total = Floats::loadu(at);
          for (int64_t r = 0; r < count; ++r) total = at::vec::fmadd(Floats(weight[r]), read[r][p], total);
          total.store(at);
        }
      }
    }
  }
  return left;
}

// Puts together what the parts of a head, one behind the other in `left`, have for query `g` of its group.
template <typename T>
void combine(const Call& call, float* left, int64_t g, T* output) {
  const int64_t size = padded<T>(call.value_dim), next = left_size<T>(call);
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
  for (int64_t d = 0; d < call.value_dim; ++d) output[d] = static_cast<T>(sums[d] * scale);
}

template <typename T>
void run(const Call& call) {
  const int64_t heads = call.batch * call.heads, chunks = call.chunks, longest = (call.length + chunks - 1) / chunks;
  const int64_t size = left_size<T>(call);
  const auto* const query = static_cast<const T*>(call.query);
  const auto* const keys = static_cast<const T*>(call.keys);
  const auto* const values = static_cast<const T*>(call.values);
  auto* const output = static_cast<T*>(call.output);
  const auto finish = [&](int64_t head, int64_t g, float* left) {
    const int64_t b = head / call.heads, h = head % call.heads;
    combine<T>(call, left, g, output + b * call.output_batch + (h * call.group + g) * call.output_head);
  };
  std::vector<float> all(chunks > 1 ? heads * chunks * size : 0);
#pragma omp parallel num_threads(call.threads)
  {
    // A thread adds up in memory of its own: what different parts leave shares lines of the cache at their ends.
    std::vector<Line> scratch((size + call.group * (padded<T>(call.head_dim) + longest)) / kLineFloats + 1);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < heads * chunks; ++i) {
      const int64_t head = i / chunks, b = head / call.heads, h = head % call.heads;
      const int64_t start = call.length * (i % chunks) / chunks, end = call.length * (i % chunks + 1) / chunks;
      float* const left = attend<T>(
          call, query + b * call.query_batch + h * call.group * call.query_head,
          keys + b * call.key_batch + h * call.key_head + start * call.key_row,
          values + b * call.value_batch + h * call.value_head + start * call.value_row,
          call.mask ? call.mask + b * call.mask_batch + start : nullptr, end - start, scratch[0].floats);
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
