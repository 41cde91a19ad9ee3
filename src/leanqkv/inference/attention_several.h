// Attention of several queries.
//
// A piece of a prompt attends to pages of codes and to numbers behind them. A block of keys, and one of values, becomes
// numbers once for all queries of a head, as the right side of a product: floats, or pairs of two columns of a key or of
// two positions of values.

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

template <typename T>
constexpr int64_t kTogether = kHasPairs<T> ? 2 : 1;
template <typename T>
using Products = std::conditional_t<kHasPairs<T>, Pairs, Numbers<float>>;

// Four rows of numbers, as they are or as two rows of pairs.
template <typename T>
inline void put_four(const Floats (&made)[4], float* to, int64_t row, int64_t left) {
  constexpr int64_t together = kTogether<T>;
  for (int64_t i = 0; i < 4; i += together) {
    if constexpr (together == 2) put(Pairs::across(made[i], made[i + 1]), to + i / 2 * row, left);
    else put(made[i], to + i * row, left);
  }
}

// Keys of a block, to [columns / kTogether, kBlock]; of those beyond the `rows`, zeros. room: [kBlock, padded columns].
template <typename T>
void keys_of(const Source& source, const Block& block, int64_t rows, float* room, float* to) {
  if (!block.scale) {
    const int64_t places = (source.columns + kTogether<T> - 1) / kTogether<T>, row = padded(source.columns);
    std::fill(room, room + kBlock * row, 0.0f);
    for (int64_t n = 0; n < rows; ++n) {
      const char* const from = block.first + n * block.row;
      if constexpr (kHasPairs<T>) std::memcpy(room + n * row, from, source.columns * sizeof(T));
      else for (int64_t d = 0; d < source.columns; d += kFloats) {
        put(Numbers<T>::load_last(from, d, source.columns - d), room + n * row + d);
      }
    }
    at::vec::transpose_mxn(room, row, to, kBlock, int(kBlock), int(places));
    return;
  }
  const int64_t places = 8 / source.bits;
  const Ints lowest((1 << source.bits) - 1);
  for (int64_t d = 0; d < source.columns; d += 4) {
    const char* const from = block.first + d / 4 / places * block.row;
    for (int64_t n = 0; n < kBlock; n += kFloats) {
      const Ints read = Ints::loadu(from + 4 * n) >> Ints(int(d / 4 % places * source.bits));
      Floats made[4];
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t column = std::min(d + i, source.columns - 1);
        const Floats code = at::vec::convert<float>(read >> Ints(int(8 * i)) & lowest);
        made[i] = d + i < source.columns
            ? at::vec::fmadd(code, Floats(float(block.scale[column])), Floats(float(block.low[column]))) : Floats(0.0f);
      }
      put_four<T>(made, to + d / kTogether<T> * kBlock + n, kBlock, kFloats);
    }
  }
}

// Values of a block, to [kBlock / kTogether, width]; of those beyond the `rows`, zeros.
template <typename T>
void values_of(const Source& source, const Block& block, int64_t rows, int64_t width, float* to) {
  if (!block.scale) {
    std::fill(to, to + kBlock / kTogether<T> * width, 0.0f);
    for (int64_t n = 0; n < rows; n += kTogether<T>, to += width) {
      const char* const from = block.first + n * block.row;
      for (int64_t d = 0; d < source.columns; d += kFloats) {
        const int64_t left = source.columns - d;
        if constexpr (kHasPairs<T>) {
          put(AcrossRows::load_last(from, n + 1 < rows ? from + block.row : nullptr, d, left), to + d);
        } else {
          put(Numbers<T>::load_last(from, d, left), to + d);
        }
      }
    }
    return;
  }
  const int64_t places = 8 / source.bits;
  const Ints lowest((1 << source.bits) - 1);
  for (int64_t n = 0; n < kBlock; n += 4) {
    const char* const from = block.first + n / 4 / places * block.row;
    const Ints shift(int(n / 4 % places * source.bits));
    for (int64_t group = 0; group < source.groups; ++group) {
      Floats scale[4], low[4];
      for (int64_t i = 0; i < 4; ++i) {
        scale[i] = Floats(float(block.scale[(n + i) * source.groups + group]));
        low[i] = Floats(float(block.low[(n + i) * source.groups + group]));
      }
      const int64_t stop = std::min((group + 1) * source.width, source.columns);
      for (int64_t d = group * source.width; d < stop; d += kFloats) {
        const Ints read = Ints::loadu(from + 4 * d, int(std::min(stop - d, kFloats))) >> shift;
        Floats made[4];
        for (int64_t i = 0; i < 4; ++i) {
          made[i] = at::vec::fmadd(at::vec::convert<float>(read >> Ints(int(8 * i)) & lowest), scale[i], low[i]);
        }
        put_four<T>(made, to + n / kTogether<T> * width + d, width, stop - d);
      }
    }
  }
}

// The memory of a thread, for so many queries of a head: these [most, depth], their scores [most, kBlock], weighted sums of
// values [most, width], highest scores [most], sums of weights [most, kFloats], and a block.
struct Several {
  int64_t depth, width;
  std::vector<Line> lines;
  float *queries, *scores, *sums, *highest, *totals, *keys, *values, *room;

  Several(const Call& call, int64_t most) : depth(padded(call.keys[0].columns)), width(padded(call.values[0].columns)) {
    const int64_t sizes[] = {
        most * depth, most * kBlock, most * width, most, most * kFloats, depth * kBlock, width * kBlock, depth * kBlock};
    float** const places[] = {&queries, &scores, &sums, &highest, &totals, &keys, &values, &room};
    lines = lines_for(sizes, places);
  }
};

// The queries [start, stop) of a head, in one pass over its blocks.
template <typename T>
void attend_several(const Call& call, int64_t b, int64_t head, int64_t start, int64_t stop, Several& own) {
  const Source &keys = call.keys[0], &values = call.values[0];
  const int64_t count = (stop - start) * call.group, width = own.width, length = call.lengths[b];
  const int64_t row = own.depth * sizeof(float), before = length - call.queries;  // the position of the first query
  const auto at = [&](int64_t i) { return std::pair(start + i / call.group, head * call.group + i % call.group); };
  std::fill(own.queries, own.queries + count * own.depth, 0.0f);
  std::fill(own.sums, own.sums + count * width, 0.0f);
  std::fill(own.highest, own.highest + count, kNothing);
  std::fill(own.totals, own.totals + count * kFloats, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const auto [q, h] = at(i);
    const T* const from = static_cast<const T*>(call.query) + b * call.query_batch + h * call.query_head + q * call.query_row;
    float* const to = own.queries + i * own.depth;
    if constexpr (kHasPairs<T>) std::memcpy(to, from, keys.columns * sizeof(T));
    else std::copy(from, from + keys.columns, to);
  }
  for (int64_t n = 0; n < before + stop; n += kBlock) {
    const int64_t rows = std::min(kBlock, length - n);
    keys_of<T>(keys, block_of<T>(call, keys, b, head, n), rows, own.room, own.keys);
    values_of<T>(values, block_of<T>(call, values, b, head, n), rows, width, own.values);
    const int64_t depth = (keys.columns + kTogether<T> - 1) / kTogether<T>;
    const auto* const queries = reinterpret_cast<const char*>(own.queries);
    multiply_rows<Products<T>, false>(queries, row, count, depth, own.keys, kBlock, own.scores);
    for (int64_t i = 0; i < count; ++i) {
      float* const scores = own.scores + i * kBlock;
      const int64_t end = std::clamp<int64_t>(before + at(i).first + 1 - n, 0, rows);
      for (int64_t t = 0; t < kBlock; t += kFloats) (Floats::loadu(scores + t) * Floats(call.scaling)).store(scores + t);
      std::fill(scores + end, scores + kBlock, kNothing);
      weigh<kHasPairs<T>>(scores, own.highest[i], own.totals + i * kFloats, own.sums + i * width, width);
    }
    const auto* const weights = reinterpret_cast<const char*>(own.scores);
    const int64_t block = kBlock * sizeof(float);
    multiply_rows<Products<T>, true>(weights, block, count, kBlock / kTogether<T>, own.values, width, own.sums);
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto [q, h] = at(i);
    T* const to = static_cast<T*>(call.output) + b * call.output_batch + h * call.output_head + q * call.output_row;
    const float scale = 1.0f / sum(Floats::loadu(own.totals + i * kFloats));
    for (int64_t d = 0; d < values.columns; d += kFloats) {
      store(Floats::loadu(own.sums + i * width + d) * Floats(scale), to + d, values.columns - d);
    }
  }
}

template <typename T>
void run_several(const Call& call) {
  // The queries of a head are cut where threads would have nothing to do.
  const int64_t units = call.batch * call.heads, parts = units % call.threads ? std::min(call.threads, call.queries) : 1;
#pragma omp parallel num_threads(call.threads)
  {
    Several own(call, (call.queries + parts - 1) / parts * call.group);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < units * parts; ++i) {
      const int64_t unit = i / parts, part = i % parts;
      const int64_t start = call.queries * part / parts, stop = call.queries * (part + 1) / parts;
      attend_several<T>(call, unit / call.heads, unit % call.heads, start, stop, own);
    }
  }
}

}  // namespace
