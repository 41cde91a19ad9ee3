// Products of attention with rows of numbers: scores, weights from these, and weighted sums.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// Adds the products of `count` queries [count, query_size], as keys are read, with `rows` keys of a block to scores
// [count, kBlock]; beyond these, the last key's. What is read next is `ahead` bytes away.
template <int64_t count, int64_t tile, typename Reader>
void score(
    const Block& keys, int64_t rows, int64_t ahead, int64_t head_dim, const float* queries, int64_t query_size,
    float* weights) {
  constexpr int64_t width = Reader::kWidth, parts = Reader::kParts;
  for (int64_t first = 0; first < rows; first += kFloats) {
    Floats products[count][kFloats / 2];
    for (int64_t n = 0; n < kFloats; n += tile) {
      const char* at[tile];
      Floats totals[count][tile];
      #pragma GCC unroll 16
      for (int64_t r = 0; r < tile; ++r) {
        at[r] = keys.first + std::min(first + n + r, rows - 1) * keys.row;
        #pragma GCC unroll 16
        for (int64_t g = 0; g < count; ++g) totals[g][r] = Floats(0.0f);
      }
      const auto add_columns = [&](int64_t d, auto parts) __attribute__((always_inline)) {
        Floats read[tile][parts];
        #pragma GCC unroll 16
        for (int64_t r = 0; r < tile; ++r) {
          ask_for(at[r] + ahead + Reader::bytes(d), Reader::bytes(width));
          if constexpr (parts == Reader::kParts) {
            Reader::load(at[r], d, head_dim - d, read[r]);
          } else {
            read[r][0] = Reader::load_last(at[r], d, head_dim - d);
          }
        }
        #pragma GCC unroll 16
        for (int64_t g = 0; g < count; ++g) {
          #pragma GCC unroll 16
          for (int64_t p = 0; p < parts; ++p) {
            const Floats query = kept(Floats::loadu(queries + g * query_size + d / Reader::kPacked + p * kFloats));
            #pragma GCC unroll 16
            for (int64_t r = 0; r < tile; ++r) totals[g][r] = Reader::multiply(read[r][p], query, totals[g][r]);
          }
        }
      };
      int64_t d = 0;
      for (; d < head_dim - (parts - 1) * kFloats; d += width) add_columns(d, constant<parts>());
      if (d < head_dim) add_columns(d, constant<1>());
      #pragma GCC unroll 16
      for (int64_t g = 0; g < count; ++g) {
        #pragma GCC unroll 16
        for (int64_t r = 0; r < tile; r += 2) products[g][(n + r) / 2] = pair_sums(totals[g][r], totals[g][r + 1]);
      }
    }
    #pragma GCC unroll 16
    for (int64_t g = 0; g < count; ++g) {
      float* const to = weights + g * kBlock + first;
      (Floats::loadu(to) + sums_of(products[g])).store(to);
    }
  }
}

// Adds `rows` rows of values to the sums [count, size] of `count` queries, each times its weight [count, kBlock]; those of
// rows that are read together lie where one of floats would.
template <int64_t count, typename Reader>
void add(
    const Block& values, int64_t rows, int64_t ahead, int64_t columns, const float* weights, float* sums, int64_t size) {
  // Columns at once: two vectors, or as many as are read at once.
  constexpr int64_t parts = Reader::kParts, step = std::max(kStep, Reader::kWidth), together = Reader::kRows;
  const auto read_some = [&](const char* row, int64_t n, int64_t d, auto& to) __attribute__((always_inline)) {
    if constexpr (together == 1) return Reader::load(row, d, columns - d, to);
    else return Reader::load(row, n + 1 < rows ? row + values.row : nullptr, d, columns - d, to);
  };
  const auto read_last = [&](const char* row, int64_t n, int64_t d) __attribute__((always_inline)) {
    if constexpr (together == 1) return Reader::load_last(row, d, columns - d);
    else return Reader::load_last(row, n + 1 < rows ? row + values.row : nullptr, d, columns - d);
  };
  const auto add_columns = [&](int64_t d, auto vectors) __attribute__((always_inline)) {
    Floats totals[count][vectors];
    #pragma GCC unroll 16
    for (int64_t g = 0; g < count; ++g) {
      #pragma GCC unroll 16
      for (int64_t p = 0; p < vectors; ++p) totals[g][p] = Floats::loadu(sums + g * size + d + p * kFloats);
    }
    for (int64_t n = 0; n < rows; n += together) {
      Floats read[vectors];
      const char* const row = values.first + n * values.row;
      #pragma GCC unroll 16
      for (int64_t r = 0; r < together; ++r) {
        ask_for(row + r * values.row + ahead + Reader::bytes(d), Reader::bytes(std::max(vectors * kFloats, step)));
      }
      if constexpr (vectors == 1) {
        read[0] = read_last(row, n, d);
      } else {
        #pragma GCC unroll 16
        for (int64_t p = 0; p < vectors; p += parts) {
          Floats some[parts];
          read_some(row, n, d + p * kFloats, some);
          for (int64_t i = 0; i < parts; ++i) read[p + i] = some[i];
        }
      }
      #pragma GCC unroll 16
      for (int64_t g = 0; g < count; ++g) {
        const Floats weight(weights[g * kBlock + n / together]);
        #pragma GCC unroll 16
        for (int64_t p = 0; p < vectors; ++p) totals[g][p] = Reader::multiply(read[p], weight, totals[g][p]);
      }
    }
    #pragma GCC unroll 16
    for (int64_t g = 0; g < count; ++g) {
      #pragma GCC unroll 16
      for (int64_t p = 0; p < vectors; ++p) totals[g][p].store(sums + g * size + d + p * kFloats);
    }
  };
  int64_t d = 0;
  if constexpr (count <= kWideQueries) {
    for (; d + 2 * step <= columns; d += 2 * step) add_columns(d, constant<2 * step / kFloats>());
  }
  for (; d < columns - kFloats; d += step) add_columns(d, constant<step / kFloats>());
  if (d < columns) add_columns(d, constant<1>());
}

// The same of any number of queries.
template <typename Reader>
void add_rows(
    const Block& values, int64_t rows, int64_t ahead, int64_t columns, const float* weights, int64_t queries, float* sums,
    int64_t size) {
  in_tiles<kQueries>(queries, 0, [&](auto count, int64_t g) {
    add<count, Reader>(values, rows, ahead, columns, weights + g * kBlock, sums + g * size, size);
  });
}

// Replaces the scores of a block, [kBlock], by exp(score - highest) and adds these to the totals, [kFloats]. Where the block
// has a higher score than all before it, the sums of values [size] and the totals are brought down to it. While nothing is
// to be seen, as of padding tokens, the highest is -inf and all else zero. NaN is higher than any number, and stays.
// pairs: whether they become pairs of bfloat16, which are what is added to the totals.
template <bool pairs>
void weigh(float* scores, float& highest, float* totals_of, float* sums, int64_t size) {
  Floats high = Floats::loadu(scores), totals = Floats::loadu(totals_of);
  for (int64_t n = kFloats; n < kBlock; n += kFloats) high = at::vec::maximum(high, Floats::loadu(scores + n));
  if ((high <= Floats(highest)).zero_mask()) {
    const float of_block = largest(high);
    if (highest != kNothing) {  // of the first block there is nothing to bring down
      const Floats share(std::exp(highest - of_block));
      for (int64_t d = 0; d < size; d += kFloats) (Floats::loadu(sums + d) * share).store(sums + d);
      totals = totals * share;
    }
    highest = of_block;
  }
  if (highest == kNothing) return std::fill(scores, scores + kBlock, 0.0f), void();
  const auto weight = [&](int64_t n) { return (Floats::loadu(scores + n) - Floats(highest)).exp_u20(); };
  if constexpr (pairs) {
    for (int64_t n = 0; n < kBlock; n += 2 * kFloats) {
      const Floats both = Pairs::of(weight(n), weight(n + kFloats));
      totals = Pairs::multiply(both, Pairs::of(Floats(1.0f), Floats(1.0f)), totals);
      both.store(scores + n / 2);
    }
  } else {
    for (int64_t n = 0; n < kBlock; n += kFloats) {
      const Floats weights = weight(n);
      totals = totals + weights;
      weights.store(scores + n);
    }
  }
  totals.store(totals_of);
}

// Of `count` rows of a product and two vectors of columns, whose sums stay in registers: see below.
template <int64_t count, typename Reader, bool adds>
void multiply_some(
    const char* left, int64_t row, int64_t depth, const float* right, int64_t columns, float* sums) {
  Floats totals[count][2];
  #pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r) {
    totals[r][0] = adds ? Floats::loadu(sums + r * columns) : Floats(0.0f);
    totals[r][1] = adds ? Floats::loadu(sums + r * columns + kFloats) : Floats(0.0f);
  }
  for (int64_t c = 0; c < depth; ++c) {
    const Floats one = Floats::loadu(right + c * columns), other = Floats::loadu(right + c * columns + kFloats);
    #pragma GCC unroll 8
    for (int64_t r = 0; r < count; ++r) {
      float number;
      std::memcpy(&number, left + r * row + c * sizeof(float), sizeof(float));
      const Floats factor(number);
      totals[r][0] = Reader::multiply(factor, one, totals[r][0]);
      totals[r][1] = Reader::multiply(factor, other, totals[r][1]);
    }
  }
  #pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r) {
    totals[r][0].store(sums + r * columns), totals[r][1].store(sums + r * columns + kFloats);
  }
}

// Adds the product of `left` [rows, depth], whose rows are so many bytes apart, and `right` [depth, columns] to sums [rows,
// columns]; or writes it there. Numbers are floats or pairs; columns fill whole steps.
template <typename Reader, bool adds>
void multiply_rows(
    const char* left, int64_t row, int64_t rows, int64_t depth, const float* right, int64_t columns, float* sums) {
  for (int64_t d = 0; d < columns; d += kStep) {
    in_tiles<kFloats == 16 ? 8 : 4>(rows, 0, [&](auto count, int64_t first) {
      multiply_some<count, Reader, adds>(left + first * row, row, depth, right + d, columns, sums + first * columns + d);
    });
  }
}

}  // namespace
