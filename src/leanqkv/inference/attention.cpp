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

constexpr int64_t kLine = 64;
constexpr int64_t kLineFloats = kLine / int64_t(sizeof(float));
// Sums that begin at a line of the cache: vectors that lie across two lines are slower.
struct alignas(kLine) Line {
  float floats[kLineFloats];
};
// Positions that are worked on together: their keys and values stay in the processor's first cache.
constexpr int64_t kBlock = 64;
static_assert(kBlock % kFloats == 0);
// Queries, and rows of keys, whose sums are kept in registers: 16 of 32, or 4 of 16; and the same of queries alone, of
// which each has two sums.
constexpr int64_t kTile = kFloats == 16 ? 4 : 2;
constexpr int64_t kQueries = 2 * kTile;
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

// The sums of as many vectors as a vector has elements, in their order; neighbors are added in pairs until one is left.
inline Floats sums_of(Floats (&of)[kFloats]) {
  for (int64_t count = kFloats / 2; count; count /= 2) {
    for (int64_t i = 0; i < count; ++i) {
      const auto [even, odd] = at::vec::deinterleave2(of[2 * i], of[2 * i + 1]);
      of[i] = even + odd;
    }
  }
  return of[0];
}

// A cache longer than its contents lies in runs too short for what the processor foresees by itself.
template <typename T>
inline void ask_for(const T* row, int64_t size) {
  for (int64_t d = 0; d < size; d += kLine / int64_t(sizeof(T))) __builtin_prefetch(row + d);
}

// Columns, filled up to whole steps of two vectors of floats: as many as one vector of 16 bits has elements.
constexpr int64_t kStep = 2 * kFloats;
inline int64_t padded(int64_t size) { return (size + kStep - 1) / kStep * kStep; }

// Calls `tile` with a constant of at most `most` and the first of them, for all of `count`: tiles of sizes as even as can
// be.
template <int64_t most, int64_t size = most, typename Tile>
inline void in_tiles(int64_t count, int64_t first, const Tile& tile) {
  const int64_t tiles = (count + most - 1) / most;
  if constexpr (size > 1) {
    if (count < tiles * size) return in_tiles<most, size - 1>(count, first, tile);
  }
  if (!count) return;
  tile(std::integral_constant<int64_t, size>{}, first);
  in_tiles<most>(count - size, first + size, tile);
}

// Columns of a value, with the keys that follow it.
inline int64_t columns(const Call& call) { return call.value_dim + call.plain_heads * call.plain_dim; }

// What a part of a head leaves for the `group` queries that share it: weighted sums of values [group, padded width],
// highest scores [group], sums of weights [group].
inline int64_t left_size(const Call& call) {
  return call.group * (padded(columns(call)) + 2);
}

// Where the `length` positions of a part begin: its keys, values and what follows them.
template <typename T>
struct Part {
  const T *query, *keys, *values, *plain, *cos, *sin;
  const float* mask;
  int64_t length;
};

// Scores of `count` queries [count, query_size] with `rows` keys of a block, [count, kBlock]; beyond these, the last
// key's.
template <int64_t count, typename T>
void score(
    const T* keys, int64_t row, int64_t rows, int64_t head_dim, const float* queries, int64_t query_size,
    float* weights) {
  constexpr int64_t width = kWidth<T>, parts = kParts<T>;
  for (int64_t first = 0; first < rows; first += kFloats) {
    Floats products[count][kFloats];
    for (int64_t n = 0; n < kFloats; n += kTile) {
      const T* at[kTile];
      Floats totals[count][kTile];
      #pragma GCC unroll 8
      for (int64_t r = 0; r < kTile; ++r) {
        at[r] = keys + std::min(first + n + r, rows - 1) * row;
        ask_for(keys + (first + n + r + kBlock) * row, head_dim);
        #pragma GCC unroll 8
        for (int64_t g = 0; g < count; ++g) totals[g][r] = Floats(0.0f);
      }
      for (int64_t d = 0; d < head_dim; d += width) {
        Floats read[kTile][parts];
        #pragma GCC unroll 8
        for (int64_t r = 0; r < kTile; ++r) load(at[r] + d, head_dim - d, read[r]);
        #pragma GCC unroll 8
        for (int64_t g = 0; g < count; ++g) {
          #pragma GCC unroll 8
          for (int64_t p = 0; p < parts; ++p) {
            const Floats query = Floats::loadu(queries + g * query_size + d + p * kFloats);
            #pragma GCC unroll 8
            for (int64_t r = 0; r < kTile; ++r) totals[g][r] = at::vec::fmadd(read[r][p], query, totals[g][r]);
          }
        }
      }
      #pragma GCC unroll 8
      for (int64_t g = 0; g < count; ++g) {
        #pragma GCC unroll 8
        for (int64_t r = 0; r < kTile; ++r) products[g][n + r] = totals[g][r];
      }
    }
    #pragma GCC unroll 8
    for (int64_t g = 0; g < count; ++g) sums_of(products[g]).store(weights + g * kBlock + first);
  }
}

// Adds `rows` rows of values to the sums [count, size] of `count` queries, each times its weight [count, kBlock].
template <int64_t count, typename T>
void add(
    const T* values, int64_t row, int64_t rows, int64_t columns, const float* weights, float* sums, int64_t size) {
  constexpr int64_t parts = kParts<T>, vectors = 2 / parts;
  for (int64_t n = 0; n < rows; ++n) ask_for(values + (n + kBlock) * row, columns);
  for (int64_t d = 0; d < columns; d += kStep) {
    Floats totals[count][2];
    #pragma GCC unroll 8
    for (int64_t g = 0; g < count; ++g) {
      #pragma GCC unroll 8
      for (int64_t p = 0; p < 2; ++p) totals[g][p] = Floats::loadu(sums + g * size + d + p * kFloats);
    }
    for (int64_t n = 0; n < rows; ++n) {
      Floats read[vectors][parts];
      #pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t at = d + v * kWidth<T>;
        load(values + n * row + at, std::max<int64_t>(columns - at, 0), read[v]);
      }
      #pragma GCC unroll 8
      for (int64_t g = 0; g < count; ++g) {
        const Floats weight(weights[g * kBlock + n]);
        #pragma GCC unroll 8
        for (int64_t p = 0; p < 2; ++p) totals[g][p] = at::vec::fmadd(weight, read[p / parts][p % parts], totals[g][p]);
      }
    }
    #pragma GCC unroll 8
    for (int64_t g = 0; g < count; ++g) {
      #pragma GCC unroll 8
      for (int64_t p = 0; p < 2; ++p) totals[g][p].store(sums + g * size + d + p * kFloats);
    }
  }
}

// Replaces the scores of a block, [kBlock], by exp(score - highest) and adds these to the total. Where the block has a
// higher score than all before it, the sums of values [size] and the total are brought down to it. While nothing is to
// be seen, as of padding tokens, the highest is -inf and all else zero. NaN is higher than any number, and stays.
void weigh(float* scores, float& highest, float& total, float* sums, int64_t size) {
  Floats high = Floats::loadu(scores);
  for (int64_t n = kFloats; n < kBlock; n += kFloats) high = at::vec::maximum(high, Floats::loadu(scores + n));
  const float of_block =
      at::vec::vec_reduce_all<float>([](const Floats& a, const Floats& b) { return at::vec::maximum(a, b); }, high);
  if (!(of_block <= highest)) {
    const float share = std::exp(highest - of_block);
    for (int64_t d = 0; d < size; d += kFloats) (Floats::loadu(sums + d) * Floats(share)).store(sums + d);
    total *= share;
    highest = of_block;
  }
  if (highest == kNothing) return std::fill(scores, scores + kBlock, 0.0f), void();
  Floats totals(0.0f);
  for (int64_t n = 0; n < kBlock; n += kFloats) {
    const Floats weights = (Floats::loadu(scores + n) - Floats(highest)).exp();
    totals = totals + weights;
    weights.store(scores + n);
  }
  total += sum(totals);
}

// Where a row of a latent with the keys behind it is made: of every complex column its frequency, and a row of tables and
// keys as floats.
struct Turn {
  std::vector<int32_t> frequency;
  std::vector<float> table, cos, sin, key;
  explicit Turn(const Call& call)
      : frequency(padded(call.turned / 2)), table(padded(2 * call.frequencies) + kStep), cos(2 * frequency.size()),
        sin(2 * frequency.size()), key(padded(call.plain_dim) + kStep) {
    for (int64_t d = 0; d < call.turned / 2; ++d) frequency[d] = int32_t(call.frequency ? call.frequency[d] : d);
  }
};

// to[d] = table[frequency[d]] for a multiple of kStep columns. Gathering is slow on many processors.
inline void spread(const float* table, int64_t frequencies, const std::vector<int32_t>& frequency, float* to) {
#ifdef CPU_CAPABILITY_AVX512
  for (size_t d = 0; d < frequency.size(); d += 16) {
    const __m512i at = _mm512_loadu_si512(frequency.data() + d), part = _mm512_srli_epi32(at, 4);
    __m512 found = _mm512_setzero_ps();
    for (int32_t p = 0; 16 * p < frequencies; ++p) {
      const __mmask16 here = _mm512_cmpeq_epi32_mask(part, _mm512_set1_epi32(p));
      found = _mm512_mask_permutexvar_ps(found, here, at, _mm512_loadu_ps(table + 16 * p));
    }
    _mm512_storeu_ps(to + d, found);
  }
#else
  for (size_t d = 0; d < frequency.size(); ++d) to[d] = table[frequency[d]];
#endif
}

// Up to a vector more is written, whatever follows there.
template <typename T>
inline void to_floats(const T* from, int64_t size, float* to) {
  Floats read[kParts<T>];
  for (int64_t d = 0; d < size; d += kWidth<T>) {
    load(from + d, size - d, read);
    for (int64_t p = 0; p < kParts<T>; ++p) read[p].store(to + d + p * kFloats);
  }
}

// to = first * cos + second * sin, of `size` columns; and up to a vector more.
inline void turned_by(
    const float* first, const float* cos, const float* second, const float* sin, int64_t size, float* to) {
  for (int64_t d = 0; d < size; d += kFloats) {
    const Floats product = Floats::loadu(second + d) * Floats::loadu(sin + d);
    at::vec::fmadd(Floats::loadu(first + d), Floats::loadu(cos + d), product).store(to + d);
  }
}

// A latent and the keys behind it, as they were before rotary positions; one row, as floats, written from left to right.
template <typename T>
inline void turn_back(const Call& call, const Part<T>& part, int64_t n, Turn& turn, float* row) {
  to_floats(part.values + n * call.value_row, call.value_dim, row);
  const int64_t half = call.turned / 2, other = turn.frequency.size();
  const auto spread_row = [&](const T* tables, float* to) {
    to_floats(tables + n * call.table_row, 2 * call.frequencies, turn.table.data());
    spread(turn.table.data(), call.frequencies, turn.frequency, to);
    spread(turn.table.data() + call.frequencies, call.frequencies, turn.frequency, to + other);
  };
  float *const cos = turn.cos.data(), *const sin = turn.sin.data(), *const key = turn.key.data();
  if (half) {
    spread_row(part.cos, cos);
    spread_row(part.sin, sin);
  }
  for (int64_t h = 0; h < call.plain_heads; ++h) {
    float* const to = row + call.value_dim + h * call.plain_dim;
    to_floats(part.plain + h * call.plain_head + n * call.plain_row, call.plain_dim, key);
    turned_by(key, cos, key + half, sin, half, to);
    turned_by(key + half, cos + other, key, sin + other, half, to + half);
    to_floats(key + call.turned, call.plain_dim - call.turned, to + call.turned);
  }
}

// The `group` queries that share a head of values, on the positions of a part, in one pass ("online softmax", Milakov &
// Gimelshein 2018, https://arxiv.org/abs/1805.02867). Returns where in `scratch` the `left_size` floats begin that it
// leaves.
template <typename T>
float* attend(const Call& call, const Part<T>& part, Turn& turn, float* scratch) {
  const int64_t group = call.group, head_dim = call.head_dim, shared = group / call.key_heads;
  const int64_t query_size = padded(head_dim), output_size = padded(columns(call));
  float* const queries = scratch;  // [group, query_size]
  float* const weights = queries + group * query_size;  // [group, kBlock]
  float* const turned = weights + group * kBlock;  // [kBlock, output_size] and a step more, or nothing
  float* const left = turned + (part.plain ? kBlock * output_size + kStep : 0);
  float *const highest = left + group * output_size, *const totals = highest + group;
  std::fill(queries, weights, 0.0f);
  std::fill(left, left + left_size(call), 0.0f);
  std::fill(highest, totals, kNothing);
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t d = 0; d < head_dim; ++d) {
      queries[g * query_size + d] = static_cast<float>(part.query[g * call.query_head + d]) * call.scaling;
    }
  }
  for (int64_t start = 0; start < part.length; start += kBlock) {
    const int64_t rows = std::min(kBlock, part.length - start);
    for (int64_t k = 0; k < call.key_heads; ++k) {
      const T* const keys = part.keys + k * call.key_head + start * call.key_row;
      in_tiles<kTile>(shared, 0, [&](auto count, int64_t first) {
        const int64_t g = k * shared + first;
        score<count>(
            keys, call.key_row, rows, head_dim, queries + g * query_size, query_size, weights + g * kBlock);
      });
    }
    for (int64_t g = 0; g < group; ++g) {
      float* const own = weights + g * kBlock;
      if (part.mask) {
        for (int64_t n = 0; n < rows; ++n) own[n] += part.mask[start + n];
      }
      std::fill(own + rows, own + kBlock, kNothing);
      weigh(own, highest[g], totals[g], left + g * output_size, output_size);
    }
    if (part.plain) {
      for (int64_t n = 0; n < rows; ++n) turn_back(call, part, start + n, turn, turned + n * output_size);
    }
    in_tiles<kQueries>(group, 0, [&](auto count, int64_t g) {
      float *const own = weights + g * kBlock, *const sums = left + g * output_size;
      if (part.plain) {
        add<count>(turned, output_size, rows, columns(call), own, sums, output_size);
      } else {
        const T* const values = part.values + start * call.value_row;
        add<count>(values, call.value_row, rows, call.value_dim, own, sums, output_size);
      }
    });
  }
  return left;
}

// Puts together what the parts of a head, one behind the other in `left`, have for query `g` of its group.
template <typename T>
void combine(const Call& call, float* left, int64_t g, T* output) {
  const int64_t size = padded(columns(call)), next = left_size(call);
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
  const int64_t heads = call.batch * call.heads, chunks = call.chunks;
  const int64_t size = left_size(call);
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
    const int64_t queries = call.group * padded(call.head_dim), weights = call.group * kBlock;
    const int64_t turned = plain ? kBlock * padded(columns(call)) + kStep : 0;
    Turn turn(call);
    std::vector<Line> scratch((queries + size + weights + turned) / kLineFloats + 1);
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
      float* const left = attend<T>(call, part, turn, scratch[0].floats);
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
