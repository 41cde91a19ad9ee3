// Attention of one query per sequence, over keys and values where they lie in a cache; and of several, over codes in pages.
//
// Keys and values are read once, whatever the number of queries that share them, and once from beginning to end. Sums are
// in float32. They lie in rows of the model's numbers, or first in pages: of the same rows, or of codes of 8, 4 or 2 bits,
// which are turned into numbers in registers. The last dimension of every tensor is contiguous.
// Rows of bfloat16 are multiplied as they are where the processor can; weights are rounded to bfloat16 for that.
//
// Values may be one head that all queries read, beside several heads of keys; it is read once too. They may be a latent
// with the keys behind it, as they were before rotary positions: these are turned back here, row by row, and nowhere kept.
// Keys may be made of one latent for all heads, by a map for each, normed, and turned by rotary positions; block by block.
// One head of keys or values may lie in pieces, some of its columns here and some there, as MLA's latent and rotary key.
//
// Each head's positions are cut into `chunks` parts, which threads take in turn ("flash-decoding", Dao et al. 2023,
// https://pytorch.org/blog/flash-decoding). A part leaves its largest score, the sum of its weights and its weighted
// sum of values; these are put together at the end.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Where keys or values lie. The same, in the same order, as `_Source` in attention.py, and so is `Call`.
struct Source {
  const void* rows;      // [batch, heads, positions behind the pages, columns]
  const int64_t* pages;  // addresses of pages, [batch, pages]; or null
  int64_t columns, skipped;  // those that are read, and the first of these, which are not asked for
  int64_t batch, head, row;  // strides of `rows`, in numbers
  int64_t page_batch, page_start, page_head, page_row;  // strides of `pages`, in addresses, and of what is in one, in bytes
  int64_t bits;                                     // of the codes in pages; 0: numbers
  // Of codes, where scales and offsets of a page begin, in bytes, and how many a head has, in bfloat16: of every position
  // and group of so many columns; or of every column, where there are no groups. Codes lie in `lanes`.
  int64_t scales, offsets, scale_head, groups, width, lanes;
  // Where the numbers behind pages of codes lie in pages too: their addresses, and strides as those of `pages`; or null.
  const int64_t* tails;
  int64_t tail_batch, tail_start, tail_head, tail_row;
  int64_t row_count, page_count, tail_count;  // how many positions lie in `rows`, and addresses in a row of each table
};

// The most pieces that a head lies in.
constexpr int64_t kPieces = 3;

struct Call {
  Source keys[kPieces];    // [batch, heads * key_heads, length, columns of the piece], together head_dim
  Source values[kPieces];  // [batch, heads, length, columns of the piece], together value_dim
  Source plain;   // keys that follow the values, [batch, plain_heads, length, plain_dim]; of keys that are made their latent
  const void* query;   // [batch, heads * group, head_dim]
  const float* mask;   // [batch or 1, length], added to the scores; or null
  const void* cos;     // what turns the first `turned` columns of plain keys back, or of keys that are made, [batch or 1,
                       // length, 2 * frequencies]
  const void* sin;     // or null
  const int64_t* frequency;  // of the first half of these columns, and so of the second; or null: one after the other
  void* output;        // [batch, heads * group, value_dim + plain_heads * plain_dim]
  const float* up;     // what makes key heads of a latent, [heads * key_heads, columns, padded(made)]; or null
  const float* norm;   // the weight of their RMSNorm, [made]; or null
  // Of every row of the batch: positions, of which the last `length` of mask, cos and sin are; the first that is read; and
  // how many of them are in pages. Or null: `length`, 0 and 0.
  const int64_t *lengths, *firsts, *paged;
  int64_t page, tail;  // positions of a page, and of one of numbers behind pages of codes
  int64_t batch, heads, group, length, threads, chunks;
  int64_t key_pieces, value_pieces;
  int64_t key_heads;  // of each head of values; they share its `group` queries evenly
  int64_t made;       // columns of a key head that is made of a latent; 0: keys are read
  int64_t plain_heads, turned, frequencies;
  int64_t query_batch, query_head, table_batch, table_row, mask_batch, output_batch, output_head;
  int64_t padded_right;  // whether the first of mask, cos and sin are a shorter row's, and not the last
  int64_t queries, query_row, output_row;  // several, which are a row's last positions and see all up to their own; or 0
  float scaling, epsilon;  // of the norm
};

namespace {

using Scales = Numbers<c10::BFloat16>;  // and offsets
using Ints = at::vec::Vectorized<int32_t>;
static_assert(Ints::size() == kFloats);

// Positions that are worked on together: their keys and values stay in the processor's first cache.
constexpr int64_t kBlock = 64;
static_assert(kBlock % kFloats == 0);
// Queries, and rows of keys, whose sums are kept in registers: 16 to 18 of 32, or 4 to 10 of 16. Many queries that share
// rows of which few are read at once read them less often. And queries alone, of which each has two sums; or four, where
// there are so few that two would leave registers empty.
constexpr int64_t kTile = kFloats == 16 ? 4 : 2;
constexpr int64_t kManyQueries = kFloats == 16 ? 9 : 5, kFewRows = 2;
constexpr int64_t kQueries = kFloats == 16 ? 12 : 5, kWideQueries = kFloats == 16 ? 0 : 3;
// The score of what is not to be seen.
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// NaN is larger than any number.
inline float largest(const Floats& of) {
  return at::vec::vec_reduce_all<float>([](const Floats& a, const Floats& b) { return at::vec::maximum(a, b); }, of);
}

// A cache longer than its contents lies in runs too short for what the processor foresees by itself.
inline void ask_for(const char* row, int64_t bytes) {
  for (int64_t d = 0; d < bytes; d += kLine) __builtin_prefetch(row + d);
}

// Columns that are added at once, and columns filled up to whole steps of these and of what lies in a byte each.
constexpr int64_t kStep = 2 * kFloats, kPadding = 32;
static_assert(kPadding % kStep == 0);
inline int64_t padded(int64_t size) { return (size + kPadding - 1) / kPadding * kPadding; }

// Calls `use` with how numbers of a source are read: beside codes, in the order of their columns.
template <typename T, typename Use>
inline void with_reader(const Source& source, const Use& use) {
  source.bits ? use(Numbers<T>()) : use(Folded<T>());
}

// Whether keys, and values, are multiplied in pairs: those that are read where they lie, and what is made of such values.
template <typename T>
inline bool pairs_of_keys(const Call& call) { return kHasPairs<T> && !call.keys[0].bits && !call.made; }
template <typename T>
inline bool pairs_of_values(const Call& call) { return kHasPairs<T> && !call.values[0].bits; }
// And the latent that keys are made of, where what follows values is read in pairs too.
template <typename T>
inline bool pairs_of_latent(const Call& call) {
  return pairs_of_values<T>(call) && call.made && !call.keys[0].bits && call.keys[0].columns % 2 == 0;
}

// The same where keys, or values, may be pairs.
template <typename T, typename Use>
inline void with_key_reader(const Call& call, const Source& source, const Use& use) {
  pairs_of_keys<T>(call) ? use(AlongRow()) : with_reader<T>(source, use);
}
template <typename T, typename Use>
inline void with_value_reader(const Call& call, const Source& source, const Use& use) {
  pairs_of_values<T>(call) ? use(AcrossRows()) : with_reader<T>(source, use);
}

// Numbers of a query as they are read, times `scaling`; there is room for whole steps.
template <typename Reader, typename T>
inline void scaled(Reader, const T* from, const Source& source, float scaling, float* to) {
  const auto* const row = reinterpret_cast<const char*>(from - source.skipped);
  for (int64_t d = 0; d < source.columns; d += Reader::kWidth) {
    Floats read[Reader::kParts];
    if (source.columns - d <= kFloats) {
      read[0] = Reader::load_last(row, d, source.columns - d);
    } else {
      Reader::load(row, d, source.columns - d, read);
    }
    for (int64_t p = 0; p < Reader::kParts && d + p * kFloats < source.columns; ++p) {
      (read[p] * Floats(scaling)).store(to + d + p * kFloats);
    }
  }
  std::fill(to, to + source.skipped, 0.0f);
}

// Where the columns of a piece begin, in queries and sums: every piece is filled up. Behind those of codes with offsets by
// position lie, for each group, the vectors whose sum is what these add to all of its columns.
inline int64_t place_of(const Source* pieces, int64_t piece) {
  int64_t place = 0;
  for (int64_t p = 0; p < piece; ++p) place += padded(pieces[p].columns) + pieces[p].groups * kFloats;
  return place;
}

// Columns of the keys that follow values, and where they begin in sums: as if they were one more piece.
inline int64_t plain_columns(const Call& call) { return call.plain_heads * call.plain.columns; }
inline int64_t plain_place(const Call& call) { return place_of(call.values, call.value_pieces); }

// Room for the sums of a query.
inline int64_t sums_size(const Call& call) { return plain_place(call) + padded(plain_columns(call)); }

// What a part of a head leaves for the `group` queries that share it: weighted sums of values [group, sums_size],
// highest scores [group], sums of weights [group].
inline int64_t left_size(const Call& call) { return call.group * (sums_size(call) + 2); }

// The positions of a head from one on that lie behind each other: in a page, or behind all pages. Those of codes are a
// whole page.
struct Block {
  const char* first;
  int64_t row;  // bytes from one to the next; of codes, of lanes
  const c10::BFloat16 *scale, *low;  // of codes; null of numbers
};

template <typename T>
inline Block block_of(const Call& call, const Source& source, int64_t b, int64_t head, int64_t n) {
  const int64_t paged = call.paged ? call.paged[b] : 0;
  if (n >= paged && source.tails) {
    const int64_t place = n - paged, address = source.tails[b * source.tail_batch + place / call.tail];
    const char* const first = reinterpret_cast<const char*>(address) + source.tail_start + head * source.tail_head;
    return {first + place % call.tail * source.tail_row, source.tail_row, {}, {}};
  }
  if (n >= paged) {
    const T* const rows = static_cast<const T*>(source.rows) + b * source.batch + head * source.head;
    return {reinterpret_cast<const char*>(rows + (n - paged) * source.row), source.row * int64_t(sizeof(T)), {}, {}};
  }
  const char* const page = reinterpret_cast<const char*>(source.pages[b * source.page_batch + n / call.page]);
  const char* const first = page + source.page_start + head * source.page_head;
  if (!source.bits) return {first + n % call.page * source.page_row, source.page_row, {}, {}};
  const auto scales = [&](int64_t start) {
    return reinterpret_cast<const c10::BFloat16*>(page + start) + head * source.scale_head;
  };
  return {first, 4 * source.lanes, scales(source.scales), scales(source.offsets)};
}

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

// --- codes -----------------------------------------------------------------------------------------------------------
//
// A page's codes of a head are a matrix [depth, lanes]: of keys [columns, positions], of values [positions, columns]. Four
// of a lane lie in four bytes, whose lowest bits are those of the first four, the next bits those of the next four
// (PageLayout in model/cache_quantized.py). Both products of attention are those of factors [count, depth] with such a
// matrix: of keys the factors are queries times scales by column, of values weights times scales by position.

template <int bits>
constexpr int64_t kPlaces = 8 / bits;

// Calls `use` with the bits as a constant.
template <typename Use>
inline void with_bits(int64_t bits, const Use& use) {
  if (bits == 8) return use(std::integral_constant<int, 8>());
  if (bits == 4) return use(std::integral_constant<int, 4>());
  use(std::integral_constant<int, 2>());
}

inline int64_t filled(int64_t depth, int64_t bits) { return (depth + 32 / bits - 1) / (32 / bits) * (32 / bits); }

// What is taken from codes that are multiplied as bfloat16, so that these are small.
template <typename T>
inline float middle(int64_t bits) { return kHasPairs<T> && bits < 8 ? float(1 << (bits - 1)) : 0.0f; }

// Factors of codes: numbers [count, size], zeros behind the depth; and room for a tile of them as they are multiplied.
struct Factors {
  const float* numbers;
  int64_t size;
  float* room;
};

// Adds vectors of as many lanes as there are to out, [count, out_size].
template <int count, int vectors>
inline void add_lanes(const Floats (&totals)[count][vectors], int64_t lanes, float* out, int64_t out_size) {
  #pragma GCC unroll 16
  for (int g = 0; g < count; ++g) {
    #pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      float* const to = out + g * out_size + v * kFloats;
      const int64_t left = std::clamp<int64_t>(lanes - v * kFloats, 0, kFloats);
      (Floats::loadu(to, left) + totals[g][v]).store(to, left);
    }
  }
}

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
// Factors as integers of seven bits, `parts` of each: x = scale * (a * 128 + b), or one more; four behind each other are
// multiplied with four codes at once. Of 16-bit numbers two parts, of float three are finer than the numbers are.
template <int parts>
struct Integers {
  static constexpr int64_t kTiles = parts == 2 ? 5 : 3;  // of queries, with two vectors of lanes each
  const float* from;  // [count, size], with zeros behind the depth
  int64_t size;
  int8_t* ints;  // [count, parts, stride]
  int64_t depth, stride;  // padded
  float scale[kTiles];

  void prepare(int64_t count) {
    const float most = float((127 << 7 * (parts - 1)) - 1);
    for (int64_t g = 0; g < count; ++g) {
      const float* const own = from + g * size;
      // The bits of a float without its sign are in the order of their numbers, and those of NaN above all.
      __m512i high = _mm512_setzero_si512();
      for (int64_t d = 0; d < stride; d += kFloats) {
        high = _mm512_max_epi32(high, _mm512_and_si512(_mm512_loadu_si512(own + d), _mm512_set1_epi32(0x7fffffff)));
      }
      const int32_t bits = _mm512_reduce_max_epi32(high);
      float highest;
      std::memcpy(&highest, &bits, sizeof(bits));
      scale[g] = highest / most;
      const __m512 back = _mm512_set1_ps(highest > 0.0f ? most / highest : 0.0f);
      const auto whole = [&](int64_t d) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(own + d), back)); };
      for (int64_t d = 0; d < stride; d += 2 * kFloats) {
        int8_t* const to = ints + g * parts * stride + d;
        if constexpr (parts == 2) {
          cut(_mm512_packs_epi32(whole(d), whole(d + kFloats)), to);
        } else {
          cut(whole(d), to), cut(whole(d + kFloats), to + kFloats);
        }
      }
    }
  }

  // The lowest seven bits as -64 to 63, so that the parts before take the rest.
  void cut(__m512i rest, int8_t* to) const {
    if constexpr (parts == 2) {  // of 16 bits, in fours that are in turns of the first and the second vector
      const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(rest, 9), 9);
      const __m512i both = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_sub_epi16(rest, low), 7), low);
      const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const __m512i parted = _mm512_permutexvar_epi32(order, both);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(parted));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + stride), _mm512_extracti64x4_epi64(parted, 1));
    } else {
      for (int part = parts - 1; part >= 0; --part) {
        const __m512i low = part ? _mm512_srai_epi32(_mm512_slli_epi32(rest, 25), 25) : rest;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + part * stride), _mm512_cvtepi32_epi8(low));
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 7);
      }
    }
  }
};

// out[g, lane] += sum of factors[g, d] * codes[d, lane], of `lanes` lanes of a matrix that has `row` of them.
template <int count, int vectors, int bits, int parts>
inline void multiply_lanes(
    const uint8_t* codes, int64_t row, int64_t ahead, int64_t lanes, const Integers<parts>& factors, float* out,
    int64_t out_size) {
  const __m512i mask = _mm512_set1_epi8(char((1 << bits) - 1));
  __m512i totals[count][parts][vectors];
  #pragma GCC unroll 8
  for (int g = 0; g < count; ++g) {
    #pragma GCC unroll 8
    for (int part = 0; part < parts; ++part) {
      #pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) totals[g][part][v] = _mm512_setzero_si512();
    }
  }
  for (int64_t d = 0; d < factors.depth; d += 4 * kPlaces<bits>) {
    __m512i read[vectors];
    #pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const uint8_t* const from = codes + d / (4 * kPlaces<bits>) * row + 64 * v;
      read[v] = _mm512_loadu_si512(from);
      __builtin_prefetch(from + ahead);
    }
    #pragma GCC unroll 8
    for (int place = 0; place < kPlaces<bits>; ++place) {
      __m512i own[vectors];
      #pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        own[v] = bits == 8 ? read[v] : _mm512_and_si512(_mm512_srli_epi16(read[v], bits * place), mask);
      }
      #pragma GCC unroll 8
      for (int g = 0; g < count; ++g) {
        #pragma GCC unroll 8
        for (int part = 0; part < parts; ++part) {
          int32_t four;
          std::memcpy(&four, factors.ints + (g * parts + part) * factors.stride + d + 4 * place, 4);
          const __m512i factor = _mm512_set1_epi32(four);
          #pragma GCC unroll 8
          for (int v = 0; v < vectors; ++v) {
            totals[g][part][v] = _mm512_dpbusd_epi32(totals[g][part][v], own[v], factor);
          }
        }
      }
    }
  }
  #pragma GCC unroll 8
  for (int g = 0; g < count; ++g) {
    #pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      __m512 total = _mm512_cvtepi32_ps(totals[g][0][v]);
      #pragma GCC unroll 8
      for (int part = 1; part < parts; ++part) {
        total = _mm512_fmadd_ps(total, _mm512_set1_ps(128.0f), _mm512_cvtepi32_ps(totals[g][part][v]));
      }
      const int64_t left = std::min<int64_t>(lanes - 16 * v, 16);
      const __mmask16 there = (1u << std::max<int64_t>(left, 0)) - 1;
      float* const to = out + g * out_size + 16 * v;
      const __m512 before = _mm512_maskz_loadu_ps(there, to);
      _mm512_mask_storeu_ps(to, there, _mm512_fmadd_ps(total, _mm512_set1_ps(factors.scale[g]), before));
    }
  }
}

// Codes of a few bits less their middle, as bfloat16; of any word with these lowest bits.
template <int bits>
struct Middled {
  alignas(kLine) uint16_t words[32];
  Middled() {
    for (int i = 0; i < 32; ++i) words[i] = c10::BFloat16(float(i % (1 << bits)) - middle<c10::BFloat16>(bits)).x;
  }
};

// The same of codes of 4 or 2 bits as pairs of bfloat16, about their middle: two words of a lane are four codes at once.
// pairs: factors [count, size] of codes 0 and 2, 1 and 3, 4 and 6, and so on.
template <int count, int vectors, int bits>
inline void multiply_pairs(
    const uint8_t* codes, int64_t row, int64_t ahead, int64_t lanes, int64_t depth, const float* pairs, int64_t size,
    float* out, int64_t out_size) {
  static const Middled<bits> numbers;
  const __m512i table = _mm512_load_si512(numbers.words);
  Floats totals[count][vectors];
  #pragma GCC unroll 16
  for (int g = 0; g < count; ++g) {
    #pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) totals[g][v] = Floats(0.0f);
  }
  for (int64_t d = 0; d < depth; d += 4 * kPlaces<bits>) {
    __m512i read[vectors];
    #pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const uint8_t* const from = codes + d / (4 * kPlaces<bits>) * row + 64 * v;
      read[v] = _mm512_loadu_si512(from);
      __builtin_prefetch(from + ahead);
    }
    #pragma GCC unroll 8
    for (int i = 0; i < 2 * kPlaces<bits>; ++i) {
      Floats own[vectors];
      #pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const __m512i at = _mm512_srli_epi16(read[v], i / 2 * bits + i % 2 * 8);
        own[v] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(at, table));
      }
      #pragma GCC unroll 16
      for (int g = 0; g < count; ++g) {
        const Floats factor(pairs[g * size + d / 2 + i]);
        #pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) totals[g][v] = Pairs::multiply(own[v], factor, totals[g][v]);
      }
    }
  }
  add_lanes(totals, lanes, out, out_size);
}

// Factors as pairs [count, padded(depth) / 2] in that order.
inline void pairs_of_factors(const Factors& factors, int64_t count, int64_t depth) {
  float* to = factors.room;
  for (int64_t g = 0; g < count; ++g) {
    const float* const from = factors.numbers + g * factors.size;
    for (int64_t d = 0; d < padded(depth); d += kStep, to += kFloats) {
      const Floats both = Pairs::of(Floats::loadu(from + d), Floats::loadu(from + d + kFloats));
      const __m512i words = _mm512_castps_si512(both);  // of each four, the middle two change places
      _mm512_storeu_si512(to, _mm512_shufflelo_epi16(_mm512_shufflehi_epi16(words, 0xd8), 0xd8));
    }
  }
}

template <typename T, int bits>
void multiply(
    const uint8_t* codes, int64_t row, int64_t ahead, int64_t lanes, int64_t depth, const Factors& from, int64_t queries,
    float* out, int64_t out_size) {
  if constexpr (kHasPairs<T> && bits < 8) {
    const int64_t width = padded(depth) / 2;
    in_tiles<kQueries>(queries, 0, [&](auto count, int64_t g) {
      pairs_of_factors({from.numbers + g * from.size, from.size, from.room}, count, depth);
      const auto some = [&](auto vectors, int64_t l) {
        multiply_pairs<count, vectors, bits>(
            codes + 4 * l, row, ahead, lanes - l, depth, from.room, width, out + g * out_size + l, out_size);
      };
      constexpr int64_t vectors = count <= 5 ? 4 : 2;
      int64_t l = 0;
      for (; l < lanes - kFloats; l += vectors * kFloats) some(constant<vectors>(), l);
      if (l < lanes) some(constant<1>(), l);
    });
  } else {
    constexpr int parts = std::is_same_v<T, float> ? 3 : 2;
    auto* const ints = reinterpret_cast<int8_t*>(from.room);
    in_tiles<Integers<parts>::kTiles>(queries, 0, [&](auto count, int64_t g) {
      Integers<parts> factors{from.numbers + g * from.size, from.size, ints, depth, padded(depth), {}};
      factors.prepare(count);
      const auto some = [&](auto vectors, int64_t l) {
        multiply_lanes<count, vectors, bits>(
            codes + 4 * l, row, ahead, lanes - l, factors, out + g * out_size + l, out_size);
      };
      int64_t l = 0;
      if constexpr (count <= 2) {
        for (; l + 64 <= lanes; l += 64) some(constant<4>(), l);
      }
      for (; l < lanes; l += 32) some(constant<2>(), l);
    });
  }
}
#else
// The same with numbers: with vectors that are whole, or with one that need not be.
template <int count, int vectors, int bits>
inline void multiply_lanes(
    const uint8_t* codes, int64_t row, int64_t ahead, int64_t lanes, int64_t depth, const float* factors, int64_t size,
    float* out, int64_t out_size) {
  const Ints mask((1 << bits) - 1);
  Floats totals[count][vectors];
  #pragma GCC unroll 16
  for (int g = 0; g < count; ++g) {
    #pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) totals[g][v] = Floats(0.0f);
  }
  for (int64_t d = 0; d < depth; d += 4 * kPlaces<bits>) {
    Ints read[vectors];
    #pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      const uint8_t* const from = codes + d / (4 * kPlaces<bits>) * row + 4 * kFloats * v;
      read[v] = Ints::loadu(from);
      __builtin_prefetch(from + ahead);
    }
    #pragma GCC unroll 16
    for (int64_t i = 0; i < 4 * kPlaces<bits>; ++i) {
      Floats code[vectors];
      #pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) {
        code[v] = at::vec::convert<float>((read[v] >> Ints(i % 4 * 8 + i / 4 * bits)) & mask);
      }
      #pragma GCC unroll 16
      for (int g = 0; g < count; ++g) {
        const Floats factor(factors[g * size + d + i]);
        #pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) totals[g][v] = at::vec::fmadd(code[v], factor, totals[g][v]);
      }
    }
  }
  add_lanes(totals, lanes, out, out_size);
}

template <typename T, int bits>
void multiply(
    const uint8_t* codes, int64_t row, int64_t ahead, int64_t lanes, int64_t depth, const Factors& from, int64_t queries,
    float* out, int64_t out_size) {
  in_tiles<kQueries>(queries, 0, [&](auto count, int64_t g) {
    const auto some = [&](auto vectors, int64_t l) {
      multiply_lanes<count, vectors, bits>(
          codes + 4 * l, row, ahead, lanes - l, depth, from.numbers + g * from.size, from.size, out + g * out_size + l,
          out_size);
    };
    constexpr int64_t vectors = count <= 2 ? 4 : 2;
    int64_t l = 0;
    for (; l + vectors * kFloats <= lanes; l += vectors * kFloats) some(constant<vectors>(), l);
    for (; l < lanes; l += kFloats) some(constant<1>(), l);
  });
}
#endif

// Lays a page's codes [columns, kBlock] of `row` bytes out as codes of 8 bits [kBlock, columns], of `to_row` bytes; there
// are zeros up to a multiple of 16 columns.
template <int bits>
inline void transpose(const uint8_t* codes, int64_t row, int64_t columns, uint8_t* to, int64_t to_row) {
  constexpr int places = kPlaces<bits>;
#ifdef CPU_CAPABILITY_AVX512
  const __m512i mask = _mm512_set1_epi8(char((1 << bits) - 1));
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (int64_t d = 0; d < columns; d += 16) {
    for (int64_t n = 0; n < kBlock; n += 16) {
      __m512i of[4];  // four columns each: 4 x [4 positions, 4 columns] become 4 x [4 columns, 4 positions]
      #pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint8_t* const from = codes + (d + 4 * i) / (4 * places) * row + 4 * n;
        const __m512i read = d + 4 * i < columns ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
        of[i] = _mm512_shuffle_epi8(_mm512_and_si512(_mm512_srli_epi16(read, bits * (i % places)), mask), order);
      }
      // And these [4 x 4 columns] of each four positions.
      const __m512i even[] = {_mm512_shuffle_i32x4(of[0], of[1], 0x88), _mm512_shuffle_i32x4(of[2], of[3], 0x88)};
      const __m512i odd[] = {_mm512_shuffle_i32x4(of[0], of[1], 0xdd), _mm512_shuffle_i32x4(of[2], of[3], 0xdd)};
      uint8_t* const first = to + n / 4 * to_row + 4 * d;
      _mm512_storeu_si512(first, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
      _mm512_storeu_si512(first + to_row, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
      _mm512_storeu_si512(first + 2 * to_row, _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
      _mm512_storeu_si512(first + 3 * to_row, _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
    }
  }
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i mask = _mm_set1_epi8(char((1 << bits) - 1));
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t d = 0; d < (columns + 15) / 16 * 16; d += 4) {  // [4 positions, 4 columns] become [4 columns, 4 positions]
    const uint8_t* const from = codes + d / (4 * places) * row;
    for (int64_t n = 0; n < kBlock; n += 4) {
      const auto* const here = reinterpret_cast<const __m128i*>(from + 4 * n);
      const __m128i read = d < columns ? _mm_loadu_si128(here) : _mm_setzero_si128();
      const __m128i own = _mm_and_si128(_mm_srli_epi16(read, int(bits * (d / 4 % places))), mask);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + n / 4 * to_row + 4 * d), _mm_shuffle_epi8(own, order));
    }
  }
#else
  for (int64_t d = 0; d < (columns + 15) / 16 * 16; ++d) {
    const uint8_t* const from = codes + d / (4 * places) * row + d % 4;
    for (int64_t n = 0; n < kBlock; ++n) {
      const int code = d < columns ? from[4 * n] >> (d / 4 % places * bits) & ((1 << bits) - 1) : 0;
      to[n / 4 * to_row + 4 * d + n % 4] = uint8_t(code);
    }
  }
#endif
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

// What turns keys: of every complex column its frequency, where that is not its place, and what its cosines and sines are at
// the positions of a segment, [kSegment, 4, padded columns]. Rows of the batch with the same tables share them.
struct Turn {
  static constexpr int64_t kSegment = 512;
  std::vector<int32_t> frequency;
  std::vector<float> table, key, segment;
  const void* of = nullptr;  // the first table of the segment
  int64_t count = 0;  // of its positions

  explicit Turn(const Call& call)
      : frequency(call.frequency ? padded(call.turned / 2) : 0), table(padded(2 * call.frequencies) + kStep),
        key(padded(std::max(call.plain.columns, call.made)) + kStep) {
    for (int64_t d = 0; call.frequency && d < call.turned / 2; ++d) frequency[d] = int32_t(call.frequency[d]);
  }
};

// Up to a step more is written, whatever follows there.
template <typename Reader>
inline void to_floats(const char* from, int64_t size, float* to) {
  Floats read[Reader::kParts];
  for (int64_t d = 0; d < size; d += Reader::kWidth) {
    Reader::load(from, d, size - d, read);
    for (int64_t p = 0; p < Reader::kParts; ++p) read[p].store(to + d + p * kFloats);
  }
}

// The n-th row of a block as floats; and up to a step more.
template <typename T>
inline void to_floats(const Source& source, const Block& block, int64_t n, float* to) {
  if (!block.scale) return to_floats<Numbers<T>>(block.first + n * block.row, source.columns, to);
  const auto* const codes = reinterpret_cast<const uint8_t*>(block.first);
  const int64_t places = 8 / source.bits;
  const int mask = (1 << source.bits) - 1;
  if (!source.groups) {
    for (int64_t d = 0; d < source.columns; ++d) {
      const int byte = codes[d / 4 / places * block.row + 4 * n + d % 4];
      to[d] = float(byte >> (d / 4 % places * source.bits) & mask) * float(block.scale[d]) + float(block.low[d]);
    }
    return;
  }
  const uint8_t* const own = codes + n / 4 / places * block.row;
  const Ints shift(int(n % 4 * 8 + n / 4 % places * source.bits)), lowest(mask);
  for (int64_t group = 0; group < source.groups; ++group) {
    const Floats scale(float(block.scale[n * source.groups + group])), low(float(block.low[n * source.groups + group]));
    const int64_t stop = std::min((group + 1) * source.width, source.columns);
    for (int64_t d = group * source.width; d < stop; d += kFloats) {
      const int64_t left = std::min(stop - d, kFloats);
      const Floats code = at::vec::convert<float>(Ints::loadu(own + 4 * d, left) >> shift & lowest);
      at::vec::fmadd(code, scale, low).store(to + d, left);
    }
  }
}

// One vector of a row that is made, as floats or as what is read in pairs.
inline void put(const Floats& from, float* to, int64_t left = kFloats) {
  left < kFloats ? from.store(to, int(left)) : from.store(to);
}
inline void put(const Floats& from, c10::BFloat16* to, int64_t left = kFloats) { Pairs::store(from, to, left); }
// `size` floats, and up to a vector more.
template <typename To>
inline void put(const float* from, int64_t size, To* to) {
  for (int64_t d = 0; d < size; d += kFloats) put(Floats::loadu(from + d), to + d);
}

// Positions of a head of values, of one row of the batch, that are worked on at once.
template <typename T>
struct Part {
  const T *query, *cos, *sin;  // tables of the row's first position
  const float* mask;
  int64_t b, head, first, start, end;  // none before `first` is seen
};

// Cosines and sines of the complex columns at a position, each of the first half of a head and then of the second.
template <typename T>
const float* turn_at(const Call& call, const Part<T>& part, int64_t n, Turn& turn) {
  const int64_t size = turn.frequency.size(), place = (n - part.start) % Turn::kSegment, first = n - place;
  const T* const of = part.cos + first * call.table_row;
  const int64_t count = std::min(Turn::kSegment, part.end - first);
  if (turn.of != of || turn.count < count) {
    turn.of = of, turn.count = count;
    turn.segment.resize(Turn::kSegment * 4 * size);
    float* to = turn.segment.data();
    for (int64_t i = 0; i < count; ++i) {
      for (const T* const tables : {part.cos, part.sin}) {
        const auto* const from = reinterpret_cast<const char*>(tables + (first + i) * call.table_row);
        to_floats<Numbers<T>>(from, 2 * call.frequencies, turn.table.data());
        for (const float* table : {turn.table.data(), turn.table.data() + call.frequencies}) {
          for (int64_t d = 0; d < size; ++d) to[d] = table[turn.frequency[d]];
          to += size;
        }
      }
    }
  }
  return turn.segment.data() + place * 4 * size;
}

#ifdef CPU_CAPABILITY_AVX512
// The same of up to 32 * `blocks` frequencies, in registers.
template <typename T, int64_t blocks>
struct InRegisters {
  Floats tables[2][2][2 * blocks];
  const int32_t* frequency;

  InRegisters(const char* const (&rows)[2], int64_t frequencies, const Turn& turn) : frequency(turn.frequency.data()) {
    for (int64_t which = 0; which < 2; ++which) {
      for (int64_t half = 0; half < 2; ++half) {
        for (int64_t i = 0; i < 2 * blocks; ++i) {
          const int64_t left = std::max<int64_t>(frequencies - i * kFloats, 0), d = half * frequencies + i * kFloats;
          tables[which][half][i] = Numbers<T>::load_last(rows[which], d, left);
        }
      }
    }
  }
  Floats operator()(int64_t which, int64_t half, int64_t d) const {
    const __m512i at = _mm512_loadu_si512(frequency + d);
    const Floats* const own = tables[which][half];
    __m512 found = _mm512_permutex2var_ps(own[0], at, own[1]);
    if constexpr (blocks == 2) {
      const __mmask16 behind = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(32));
      found = _mm512_mask_mov_ps(found, behind, _mm512_permutex2var_ps(own[2], at, own[3]));
    }
    return found;
  }
};
#endif

// Calls `use` with what gives the cosines (0) and sines (1) at a position of a vector of complex columns, from the d-th on,
// of the first half of a head (0) and of the second (1).
template <typename T, typename Use>
inline void with_tables(const Call& call, const Part<T>& part, int64_t n, Turn& turn, const Use& use) {
  const int64_t count = call.frequencies;
  const auto row = [&](const T* tables) { return reinterpret_cast<const char*>(tables + n * call.table_row); };
  const char* const rows[] = {row(part.cos), row(part.sin)};
  if (!call.frequency) {
    return use([=, cos = rows[0], sin = rows[1]](int64_t which, int64_t half, int64_t d) {
      return Numbers<T>::load_last(which ? sin : cos, half * count + d, (2 - half) * count - d);
    });
  }
#ifdef CPU_CAPABILITY_AVX512
  if (count <= 32) return use(InRegisters<T, 1>(rows, count, turn));
  if (count <= 64) return use(InRegisters<T, 2>(rows, count, turn));
#endif
  const float* const tables = turn_at(call, part, n, turn);
  const int64_t size = turn.frequency.size();
  use([=](int64_t which, int64_t half, int64_t d) { return Floats::loadu(tables + (2 * which + half) * size + d); });
}

// to = a key of so many columns, of which the first ones are turned, forward or back as the tables are; it may be the key
// itself. Up to a vector more is written behind it.
template <typename Reader, typename T, typename To>
inline void turn_key(
    const Call& call, const Part<T>& part, int64_t n, Turn& turn, const char* from, int64_t columns, To* to) {
  // By value, since what is written could be what a reference names.
  const auto key = [=](int64_t d) __attribute__((always_inline)) { return Reader::load_last(from, d, columns - d); };
  if (call.turned) {
    with_tables(call, part, n, turn, [=, half = call.turned / 2](const auto table) __attribute__((always_inline)) {
      for (int64_t d = 0; d < half; d += kFloats) {
        const Floats one = key(d), other = key(half + d);
        put(at::vec::fmadd(one, table(0, 0, d), other * table(1, 0, d)), to + d, half - d);
        put(at::vec::fmadd(other, table(0, 1, d), one * table(1, 1, d)), to + half + d, half - d);
      }
    });
  }
  for (int64_t d = call.turned; d < columns; d += kFloats) put(key(d), to + d);
}

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// The same of a key in pairs of a complex column's two numbers, with pairs of a cosine and a sine in registers: up to 32 *
// `blocks` frequencies. Nothing more is written.
template <int64_t blocks>
inline void turn_pairs(
    const Call& call, const c10::BFloat16* cos, const c10::BFloat16* sin, const int32_t* frequency,
    const c10::BFloat16* from, c10::BFloat16* to) {
  const auto read = [](const c10::BFloat16* row, int64_t left) {
    const __mmask16 there = (uint32_t(1) << std::clamp<int64_t>(left, 0, kFloats)) - 1;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, row));
  };
  const auto pairs = [](__m512i first, __m512i second) { return _mm512_or_si512(first, _mm512_slli_epi32(second, 16)); };
  const int64_t count = call.frequencies, half = call.turned / 2;
  __m512i of_first[2 * blocks], of_second[2 * blocks];
  #pragma GCC unroll 4
  for (int64_t i = 0; i < 2 * blocks; ++i) {
    const int64_t d = i * kFloats, left = count - d;
    of_first[i] = pairs(read(cos + d, left), read(sin + d, left));
    of_second[i] = pairs(read(sin + count + d, left), read(cos + count + d, left));
  }
  const auto found = [](const __m512i (&of)[2 * blocks], __m512i at) {
    __m512i some = _mm512_permutex2var_epi32(of[0], at, of[1]);
    if constexpr (blocks == 2) {
      const __mmask16 behind = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(32));
      some = _mm512_mask_mov_epi32(some, behind, _mm512_permutex2var_epi32(of[2], at, of[3]));
    }
    return __m512bh(some);
  };
  for (int64_t d = 0; d < half; d += kFloats) {
    const __m512i at = _mm512_loadu_si512(frequency + d);
    const auto both = __m512bh(pairs(read(from + d, half - d), read(from + half + d, half - d)));
    const auto turned = [&](const __m512i (&of)[2 * blocks]) {
      return Floats(_mm512_dpbf16_ps(_mm512_setzero_ps(), both, found(of, at)));
    };
    Pairs::store(turned(of_first), to + d, half - d);
    Pairs::store(turned(of_second), to + half + d, half - d);
  }
  std::copy(from + call.turned, from + call.plain.columns, to + call.turned);
}
#endif

// Whether a key could be turned in pairs, and was.
template <typename T, typename To>
inline bool turned_in_pairs(const Call& call, const Part<T>& part, int64_t n, const Turn& turn, const char* from, To* to) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, To> && kHasPairs<T>) {
    if (!call.frequency || call.frequencies > 64) return false;
    const T *const cos = part.cos + n * call.table_row, *const sin = part.sin + n * call.table_row;
    const auto by = call.frequencies <= 32 ? turn_pairs<1> : turn_pairs<2>;
    by(call, cos, sin, turn.frequency.data(), reinterpret_cast<const T*>(from), to);
    return true;
  }
#endif
  return false;
}

// The keys that follow values, as they were before rotary positions; one row, written from left to right, and up to a
// vector more.
template <typename T, typename To>
inline void turn_back(const Call& call, const Part<T>& part, int64_t n, Turn& turn, To* row) {
  const int64_t columns = call.plain.columns;
  for (int64_t h = 0; h < call.plain_heads; ++h) {
    const Block block = block_of<T>(call, call.plain, part.b, h, n);
    if (block.scale) {
      to_floats<T>(call.plain, block, n % call.page, turn.key.data());
      const auto* const key = reinterpret_cast<const char*>(turn.key.data());
      turn_key<Numbers<float>>(call, part, n, turn, key, columns, row + h * columns);
    } else if (!turned_in_pairs(call, part, n, turn, block.first, row + h * columns)) {
      turn_key<Numbers<T>>(call, part, n, turn, block.first, columns, row + h * columns);
    }
  }
}

// Memory for arrays of so many floats, each of which begins at a line of the cache, and a line more.
template <size_t count>
std::vector<Line> lines_for(const int64_t (&sizes)[count], float** const (&places)[count]) {
  const auto lines_of = [](int64_t size) { return (size + kLineFloats - 1) / kLineFloats; };
  int64_t total = 1;
  for (const int64_t size : sizes) total += lines_of(size);
  std::vector<Line> lines(total);
  float* next = lines[0].floats;
  for (size_t i = 0; i < count; ++i) {
    *places[i] = next;
    next += lines_of(sizes[i]) * kLineFloats;
  }
  return lines;
}

// The memory of a thread: it adds up in its own, since what different parts leave shares lines of the cache at their ends.
struct Scratch {
  std::vector<Line> lines;
  // Queries [group, query_size], weights [group, kBlock] and sums of these [group, kFloats]; factors of codes, as numbers
  // [group, factors_size] and a tile as it is multiplied, and a page's scales and offsets [factors_size] and a step more; keys
  // that follow values [kBlock, padded columns] and a step more, or codes as bytes; a latent [kBlock, padded columns] and
  // its codes as bytes; keys that are made of it [kBlock, padded(made)]; what the part leaves.
  float *queries, *weights, *totals, *factors, *room, *scales, *lows, *rows, *latent, *latent_codes, *keys, *left;
  int64_t query_size, factors_size;
  Turn turn;

  explicit Scratch(const Call& call)
      : query_size(call.made ? padded(call.made) : place_of(call.keys, call.key_pieces)),
        factors_size(std::max({query_size, sums_size(call), kBlock})), turn(call) {
    const bool codes = call.keys[0].bits || call.values[0].bits;
    const int64_t codes_size = codes ? kBlock * sums_size(call) / int64_t(sizeof(float)) : 0;
    const int64_t plain_size = call.plain_heads ? kBlock * padded(plain_columns(call)) + kStep : 0;
    const int64_t latent_size = call.made ? kBlock * padded(call.keys[0].columns) : 0;
    const int64_t page_size = codes ? factors_size + kStep : 0;
    const int64_t sizes[] = {
        call.group * query_size, call.group * kBlock, call.group * kFloats, codes ? call.group * factors_size : 0,
        codes ? 6 * factors_size : 0, page_size, page_size, std::max(plain_size, codes_size),
        latent_size ? latent_size + kStep : 0, latent_size / int64_t(sizeof(float)),
        call.made ? kBlock * padded(call.made) + kStep : 0, left_size(call)};
    float** const places[] = {
        &queries, &weights, &totals, &factors, &room, &scales, &lows, &rows, &latent, &latent_codes, &keys, &left};
    lines = lines_for(sizes, places);
  }
};

// Factors of a page's codes: numbers [count, size] times its scales, over `depth` columns or positions. Calls `use` with the
// place of each and the vector whose sum is what the page's offsets add to its products.
template <typename T, typename Use>
Factors make_factors(
    const Source& source, const float* numbers, int64_t count, int64_t size, int64_t depth, Scratch& scratch,
    const Use& use) {
  const Floats middle_code(middle<T>(source.bits));
  float *const scales = scratch.scales, *const lows = scratch.lows, *to = scratch.factors;
  for (int64_t d = 0; d < depth; d += kFloats) {
    at::vec::fmadd(Floats::loadu(scales + d), middle_code, Floats::loadu(lows + d)).store(lows + d);
  }
  for (int64_t g = 0; g < count; ++g, numbers += size, to += size) {
    Floats offset(0.0f);
    for (int64_t d = 0; d < depth; d += kFloats) {
      const Floats number = Floats::loadu(numbers + d);
      (number * Floats::loadu(scales + d)).store(to + d);
      offset = at::vec::fmadd(number, Floats::loadu(lows + d), offset);
    }
    use(g, offset);
  }
  return {scratch.factors, size, scratch.room};
}

// Adds the scores [count, kBlock] of queries [count, size] with a page of codes of keys; to nothing, if they are the first.
template <typename T>
void score_codes(
    const Source& source, const Block& keys, int64_t ahead, const float* queries, int64_t count, int64_t size, bool first,
    Scratch& scratch, float* weights) {
  const auto *const scales = reinterpret_cast<const char*>(keys.scale), *const lows = reinterpret_cast<const char*>(keys.low);
  ask_for(scales + ahead, 2 * source.columns);
  ask_for(lows + ahead, 2 * source.columns);
  to_floats<Scales>(scales, source.columns, scratch.scales);
  to_floats<Scales>(lows, source.columns, scratch.lows);
  const auto add_offset = [&](int64_t g, const Floats& offset) {
    const Floats all(sum(offset));
    float* const to = weights + g * kBlock;
    for (int64_t n = 0; n < kBlock; n += kFloats) (first ? all : Floats::loadu(to + n) + all).store(to + n);
  };
  const Factors factors = make_factors<T>(source, queries, count, size, padded(source.columns), scratch, add_offset);
  with_bits(source.bits, [&](auto bits) {
    const auto* const codes = reinterpret_cast<const uint8_t*>(keys.first);
    const int64_t depth = filled(source.columns, bits);
    multiply<T, bits>(codes, keys.row, ahead, kBlock, depth, factors, count, weights, kBlock);
  });
}

// Adds a page of codes of values to the sums [count, size], each position times its weight [count, kBlock].
template <typename T>
void add_codes(
    const Source& source, const Block& values, int64_t ahead, const float* weights, int64_t count, Scratch& scratch,
    float* sums, int64_t size) {
  const auto *const scales = reinterpret_cast<const char*>(values.scale), *const lows = reinterpret_cast<const char*>(values.low);
  ask_for(scales + ahead, 2 * kBlock * source.groups);
  ask_for(lows + ahead, 2 * kBlock * source.groups);
  for (int64_t group = 0; group < source.groups; ++group) {
    const int64_t start = group * source.width, lanes = std::min(source.width, source.columns - start);
    if (source.groups == 1) {
      to_floats<Scales>(scales, kBlock, scratch.scales);
      to_floats<Scales>(lows, kBlock, scratch.lows);
    } else {
      for (int64_t n = 0; n < kBlock; ++n) {
        const int64_t place = n * source.groups + group;
        scratch.scales[n] = float(values.scale[place]), scratch.lows[n] = float(values.low[place]);
      }
    }
    float* const offsets = sums + padded(source.columns) + group * kFloats;
    const auto add_offset = [&](int64_t g, const Floats& offset) {
      (Floats::loadu(offsets + g * size) + offset).store(offsets + g * size);
    };
    const Factors factors = make_factors<T>(source, weights, count, kBlock, kBlock, scratch, add_offset);
    with_bits(source.bits, [&](auto bits) {
      const auto* const codes = reinterpret_cast<const uint8_t*>(values.first) + 4 * start;
      multiply<T, bits>(codes, values.row, ahead, lanes, kBlock, factors, count, sums + start, size);
    });
  }
}

// Adds a page of codes of values that are scaled by channel, as keys are, to the sums [count, size], each position times
// its weight [count, kBlock].
template <typename T>
void add_channels(
    const Source& source, const Block& values, const float* weights, int64_t count, Scratch& scratch, float* sums,
    int64_t size) {
  Floats scale[Scales::kParts], low[Scales::kParts];
  const int64_t lanes = padded(source.columns);
  auto* const codes = reinterpret_cast<uint8_t*>(scratch.rows);
  float* const products = scratch.factors;
  std::fill(products, products + count * lanes, 0.0f);
  with_bits(source.bits, [&](auto bits) {
    transpose<bits>(reinterpret_cast<const uint8_t*>(values.first), values.row, source.columns, codes, 4 * lanes);
  });
  multiply<T, 8>(codes, 4 * lanes, 0, lanes, kBlock, {weights, kBlock, scratch.room}, count, products, lanes);
  for (int64_t g = 0; g < count; ++g) {
    Floats all(0.0f);
    for (int64_t n = 0; n < kBlock; n += kFloats) all = all + Floats::loadu(weights + g * kBlock + n);
    const Floats total(sum(all));
    for (int64_t d = 0; d < source.columns; d += Scales::kWidth) {
      Scales::load(reinterpret_cast<const char*>(values.scale), d, source.columns - d, scale);
      Scales::load(reinterpret_cast<const char*>(values.low), d, source.columns - d, low);
      for (int64_t p = 0; p < Scales::kParts; ++p) {
        float* const to = sums + g * size + d + p * kFloats;
        const Floats product = Floats::loadu(products + g * lanes + d + p * kFloats) * scale[p];
        (Floats::loadu(to) + at::vec::fmadd(total, low[p], product)).store(to);
      }
    }
  }
}

// Whether the values of a block are read behind its keys, row by row and of as many bytes: one asks for the other. Others
// ask for what they will read themselves, of the next block.
inline bool in_turns(const Call& call) {
  const Source &keys = call.keys[0], &values = call.values[0];
  return call.key_heads * call.key_pieces * call.value_pieces == 1 && keys.columns == values.columns &&
      !keys.bits && !values.bits && !call.plain_heads && !call.made;
}

// The latent of the `rows` positions of a block as floats, [kBlock, padded columns]. Those of codes are a whole page.
template <typename T>
void read_latent(const Source& source, const Block& block, int64_t rows, Scratch& scratch) {
  const int64_t columns = source.columns, width = padded(columns);
  if (!block.scale) {
    for (int64_t n = 0; n < rows; ++n) {
      to_floats<Numbers<T>>(block.first + n * block.row, columns, scratch.latent + n * width);
    }
    return;
  }
  auto* const codes = reinterpret_cast<uint8_t*>(scratch.latent_codes);
  with_bits(source.bits, [&](auto bits) {
    transpose<bits>(reinterpret_cast<const uint8_t*>(block.first), block.row, columns, codes, 4 * width);
  });
  Floats scale[Scales::kParts], low[Scales::kParts];
  for (int64_t d = 0; d < columns; d += Scales::kWidth) {
    Scales::load(reinterpret_cast<const char*>(block.scale), d, columns - d, scale);
    Scales::load(reinterpret_cast<const char*>(block.low), d, columns - d, low);
    for (int64_t n = 0; n < kBlock; n += 4) {
      for (int64_t p = 0; p < Scales::kParts; ++p) {
        const int64_t place = d + p * kFloats;
        const Ints read = Ints::loadu(codes + n * width + 4 * place);
        for (int64_t i = 0; i < 4; ++i) {  // the bytes of a column are four positions
          const Floats code = at::vec::convert<float>(read >> Ints(int(8 * i)) & Ints(255));
          at::vec::fmadd(code, scale[p], low[p]).store(scratch.latent + (n + i) * width + place);
        }
      }
    }
  }
}

// The key in `key` over the root of its mean square, times `weight`; all of `size` columns.
inline void norm_key(float* key, const float* weight, int64_t size, float epsilon) {
  Floats squares(0.0f);
  int64_t d = 0;
  for (; d + kFloats <= size; d += kFloats) {
    const Floats some = Floats::loadu(key + d);
    squares = at::vec::fmadd(some, some, squares);
  }
  float total = sum(squares);
  for (; d < size; ++d) total += key[d] * key[d];
  const float scale = 1.0f / std::sqrt(total / float(size) + epsilon);
  for (d = 0; d < size; ++d) key[d] *= scale * weight[d];
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

// Key heads that are made of a latent, normed and turned: one head of the `rows` positions from `n` on.
template <typename Reader, typename T>
Block make_keys(
    const Call& call, const Part<T>& part, int64_t n, const Block& latent, int64_t rows, int64_t head, Scratch& scratch) {
  const int64_t numbers = call.keys[0].columns / Reader::kPacked, to = padded(call.made);
  multiply_rows<Reader, false>(latent.first, latent.row, rows, numbers, call.up + head * numbers * to, to, scratch.keys);
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = scratch.keys + r * to;
    if (call.norm) norm_key(row, call.norm, call.made, call.epsilon);
    turn_key<Numbers<float>>(call, part, n + r, scratch.turn, reinterpret_cast<const char*>(row), call.made, row);
  }
  return {reinterpret_cast<const char*>(scratch.keys), to * int64_t(sizeof(float)), {}, {}};
}

// Where the latent that keys are made of lies, from position `n` on.
template <typename T>
Block latent_block(const Call& call, const Part<T>& part, int64_t n) {
  return block_of<T>(call, call.keys[0], part.b, 0, n);
}

// The scores [group, kBlock] of the `rows` positions from `n` on.
template <typename T>
void score_block(const Call& call, const Part<T>& part, int64_t n, int64_t rows, Scratch& scratch) {
  const int64_t shared = call.group / call.key_heads, size = scratch.query_size;
  for (int64_t i = 0; i < call.key_heads * call.key_pieces; ++i) {
    const int64_t k = i / call.key_pieces, piece = i % call.key_pieces;
    const int64_t head = part.head * call.key_heads + k, next = std::min(n + rows, part.end - 1);
    const Source& source = call.keys[piece];
    float* const weights = scratch.weights + k * shared * kBlock;
    const float* const queries = scratch.queries + k * shared * size + place_of(call.keys, piece);
    const auto start = [&] { if (!piece) std::fill(weights, weights + shared * kBlock, 0.0f); };
    if (call.made) {
      start();
      const Block latent = latent_block(call, part, n);
      if (!k && !pairs_of_latent<T>(call)) read_latent<T>(source, latent, rows, scratch);
      const int64_t row = padded(source.columns) * sizeof(float);
      const Block made = pairs_of_latent<T>(call)
          ? make_keys<AlongRow>(call, part, n, latent, rows, head, scratch)
          : make_keys<Numbers<float>>(call, part, n, {reinterpret_cast<const char*>(scratch.latent), row}, rows, head, scratch);
      in_tiles<kTile>(shared, 0, [&](auto count, int64_t g) {
        score<count, kTile, Numbers<float>>(made, rows, 0, call.made, queries + g * size, size, weights + g * kBlock);
      });
      continue;
    }
    const Block keys = block_of<T>(call, source, part.b, head, n);
    const Block after =
        in_turns(call) ? block_of<T>(call, call.values[0], part.b, head, n) : block_of<T>(call, source, part.b, head, next);
    const int64_t ahead = after.first - keys.first;
    if (keys.scale) {
      score_codes<T>(source, keys, ahead, queries, shared, size, !piece, scratch, weights);
      continue;
    }
    start();
    const auto score_tile = [&](auto tile, auto count, int64_t g) {
      with_key_reader<T>(call, source, [&](auto reader) {
        using Reader = decltype(reader);
        score<count, tile, Reader>(keys, rows, ahead, source.columns, queries + g * size, size, weights + g * kBlock);
      });
    };
    if (shared > kTile) {
      in_tiles<kManyQueries>(shared, 0, [&](auto count, int64_t g) { score_tile(constant<kFewRows>(), count, g); });
    } else {
      in_tiles<kTile>(shared, 0, [&](auto count, int64_t g) { score_tile(constant<kTile>(), count, g); });
    }
  }
}

// Adds the keys that follow the values of the `rows` positions from `n` on; these are made in `to`.
template <typename Reader, typename T, typename To>
void add_plain(const Call& call, const Part<T>& part, int64_t n, int64_t rows, Scratch& scratch, To* to) {
  const int64_t columns = plain_columns(call), width = padded(columns), size = sums_size(call);
  for (int64_t i = 0; i < rows; ++i) {
    if (call.made) {  // known as they were
      put(scratch.latent + i * padded(columns), columns, to + i * width);
    } else {
      turn_back(call, part, n + i, scratch.turn, to + i * width);
    }
  }
  const Block made{reinterpret_cast<const char*>(to), width * int64_t(sizeof(To)), {}, {}};
  add_rows<Reader>(made, rows, 0, columns, scratch.weights, call.group, scratch.left + plain_place(call), size);
}

// Adds the values of the `rows` positions from `n` on, each times its weight.
template <typename T>
void add_block(const Call& call, const Part<T>& part, int64_t n, int64_t rows, Scratch& scratch) {
  const int64_t size = sums_size(call), next = std::min(n + rows, part.end - 1);
  for (int64_t piece = 0; piece < call.value_pieces; ++piece) {
    const Source& source = call.values[piece];
    const Block values = block_of<T>(call, source, part.b, part.head, n);
    const Source& read_next = in_turns(call) ? call.keys[0] : source;
    const int64_t ahead = block_of<T>(call, read_next, part.b, part.head, next).first - values.first;
    float* const sums = scratch.left + place_of(call.values, piece);
    if (!values.scale) {
      with_value_reader<T>(call, source, [&](auto reader) {
        add_rows<decltype(reader)>(values, rows, ahead, source.columns, scratch.weights, call.group, sums, size);
      });
    } else if (source.groups) {
      add_codes<T>(source, values, ahead, scratch.weights, call.group, scratch, sums, size);
    } else {
      add_channels<T>(source, values, scratch.weights, call.group, scratch, sums, size);
    }
  }
  if (!call.plain_heads) return;
  if (pairs_of_latent<T>(call)) {  // known as they were
    float* const sums = scratch.left + plain_place(call);
    add_rows<AcrossRows>(latent_block(call, part, n), rows, 0, call.plain.columns, scratch.weights, call.group, sums, size);
  } else if (pairs_of_values<T>(call)) {
    add_plain<AcrossRows>(call, part, n, rows, scratch, reinterpret_cast<c10::BFloat16*>(scratch.rows));
  } else {
    add_plain<Numbers<float>>(call, part, n, rows, scratch, scratch.rows);
  }
}

// The `group` queries that share a head of values, on the positions of a part, in one pass ("online softmax", Milakov &
// Gimelshein 2018, https://arxiv.org/abs/1805.02867). What it leaves is in the scratch.
template <typename T>
void attend(const Call& call, const Part<T>& part, Scratch& scratch) {
  const int64_t group = call.group, size = sums_size(call);
  float* const highest = scratch.left + group * size;
  std::fill(scratch.queries, scratch.queries + group * scratch.query_size, 0.0f);
  std::fill(scratch.left, scratch.left + left_size(call), 0.0f);
  std::fill(highest, highest + group, kNothing);
  std::fill(scratch.totals, scratch.totals + group * kFloats, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    const T* from = part.query + g * call.query_head;
    if (call.made) {
      Source head{};
      head.columns = call.made;
      scaled(Numbers<T>(), from, head, call.scaling, scratch.queries + g * scratch.query_size);
      continue;
    }
    for (int64_t piece = 0; piece < call.key_pieces; ++piece) {
      const Source& source = call.keys[piece];
      float* const to = scratch.queries + g * scratch.query_size + place_of(call.keys, piece);
      if (pairs_of_keys<T>(call)) {
        std::memcpy(to, from, source.columns * sizeof(T));
        from += source.columns;
        continue;
      }
      with_reader<T>(source, [&](auto reader) { scaled(reader, from, source, call.scaling, to); });
      from += source.columns - source.skipped;
    }
  }
  const int64_t paged = call.paged ? call.paged[part.b] : 0;
  for (int64_t n = part.start, rows; n < part.end; n += rows) {
    rows = std::min(kBlock, part.end - n);
    if (n < paged) {
      rows = std::min({rows, call.page - n % call.page, paged - n});
    } else if (call.tail) {
      rows = std::min(rows, call.tail - (n - paged) % call.tail);
    }
    score_block(call, part, n, rows, scratch);
    for (int64_t g = 0; g < group; ++g) {
      float* const own = scratch.weights + g * kBlock;
      if (pairs_of_keys<T>(call)) {  // whose queries are not scaled
        for (int64_t i = 0; i < kBlock; i += kFloats) (Floats::loadu(own + i) * Floats(call.scaling)).store(own + i);
      }
      if (part.mask) {
        for (int64_t i = 0; i < rows; ++i) own[i] += part.mask[n + i];
      }
      if (n < part.first) std::fill(own, own + part.first - n, kNothing);
      std::fill(own + rows, own + kBlock, kNothing);
      const auto weigh_own = pairs_of_values<T>(call) ? weigh<kHasPairs<T>> : weigh<false>;
      weigh_own(own, highest[g], scratch.totals + g * kFloats, scratch.left + g * size, size);
    }
    add_block(call, part, n, rows, scratch);
  }
  for (int64_t g = 0; g < group; ++g) highest[group + g] = sum(Floats::loadu(scratch.totals + g * kFloats));
}

// Puts together what the parts of a head, one behind the other in `left`, have for query `g` of its group.
template <typename T>
void combine(const Call& call, float* left, int64_t g, T* output) {
  const int64_t size = sums_size(call), next = left_size(call);
  float* const sums = left + g * size;
  const float *const highs = left + call.group * size + g, *const totals = highs + call.group;
  float highest = kNothing, total = 0.0f;
  for (int64_t c = 0; c < call.chunks; ++c) highest = std::max(highest, highs[c * next]);
  for (int64_t c = 0; c < call.chunks; ++c) {
    const float share = highs[c * next] == kNothing ? 0.0f : std::exp(highs[c * next] - highest);
    total += share * totals[c * next];
    for (int64_t d = 0; d < size; d += kFloats) {
      const Floats before = c ? Floats::loadu(sums + d) : Floats(0.0f);
      at::vec::fmadd(Floats(share), Floats::loadu(sums + c * next + d), before).store(sums + d);
    }
  }
  const float scale = total > 0.0f ? 1.0f / total : 0.0f;
  for (int64_t piece = 0; piece < call.value_pieces; ++piece) {
    float* const own = sums + place_of(call.values, piece);
    const Source& source = call.values[piece];
    for (int64_t group = 0; group < source.groups; ++group) {
      const float offset = sum(Floats::loadu(own + padded(source.columns) + group * kFloats));
      const int64_t stop = std::min((group + 1) * source.width, source.columns);
      for (int64_t d = group * source.width; d < stop; ++d) own[d] += offset;
    }
    const auto column = [&](int64_t d) { return source.bits ? d : Folded<T>::place(d, source.columns); };
    for (int64_t d = source.skipped; d < source.columns; ++d) *output++ = static_cast<T>(own[column(d)] * scale);
  }
  const float* const plain = sums + plain_place(call);
  for (int64_t d = 0; d < plain_columns(call); ++d) {
    *output++ = static_cast<T>(plain[pairs_of_values<T>(call) ? Folded<T>::place(d, plain_columns(call)) : d] * scale);
  }
}

// The positions of a row of the batch that are read: those before the first that the mask lets be seen are not.
struct Span {
  int64_t first, length;
  Span(const Call& call, int64_t b)
      : first(call.firsts ? call.firsts[b] : 0), length(call.lengths ? call.lengths[b] : call.length) {
    const float* const mask = call.mask ? call.mask + b * call.mask_batch + before(call) : nullptr;
    while (mask && first < length && mask[first] == kNothing) ++first;
  }
  // Positions of the mask and the tables that pad this row on the left.
  int64_t before(const Call& call) const { return call.padded_right ? 0 : call.length - length; }
  // Where one of so many parts begins: blocks are not cut.
  int64_t start(int64_t part, int64_t parts) const {
    const int64_t block = first / kBlock, blocks = (length + kBlock - 1) / kBlock - block;
    return std::min((block + blocks * part / parts) * kBlock, length);
  }
};

// Whether the positions of every row of the batch are in its pages and behind them: nothing beyond is read.
bool fits(const Call& call, const Source& source) {
  if (!call.lengths) return call.length <= source.row_count;
  const auto has = [](const int64_t* addresses, int64_t count, int64_t most) {
    return count <= most && std::find(addresses, addresses + count, 0) == addresses + count;
  };
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t paged = call.paged[b], behind = call.lengths[b] - paged;
    if (paged < 0 || behind < 0) return false;
    if (paged && !has(source.pages + b * source.page_batch, (paged + call.page - 1) / call.page, source.page_count)) return false;
    if (!source.tails && behind > source.row_count) return false;
    if (source.tails && behind &&
        !has(source.tails + b * source.tail_batch, (behind + call.tail - 1) / call.tail, source.tail_count)) return false;
  }
  return true;
}

// --- several queries -------------------------------------------------------------------------------------------------
//
// A piece of a prompt attends to pages of codes and to numbers behind them. A block of keys, and one of values, becomes
// numbers once for all queries of a head, as the right side of a product: floats, or pairs of two columns of a key or of
// two positions of values.

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

// What makes keys, of two columns of the latent each: [heads, columns / 2, padded(made)].
std::vector<float> pairs_of_up(const Call& call) {
  const int64_t width = padded(call.made), rows = call.heads * call.key_heads * call.keys[0].columns / 2;
  std::vector<float> pairs(rows * width);
  for (int64_t i = 0; i < rows * width; i += kFloats) {
    const float* const from = call.up + i / width * 2 * width + i % width;
    Pairs::across(Floats::loadu(from), Floats::loadu(from + width)).store(pairs.data() + i);
  }
  return pairs;
}

// Returns whether there is what is to be read; if not, nothing is done.
template <typename T>
bool run(const Call& given) {
  Call call = given;
  const std::vector<float> up = pairs_of_latent<T>(call) ? pairs_of_up(call) : std::vector<float>();
  if (!up.empty()) call.up = up.data();
  const auto all_fit = [&](const Source* pieces, int64_t count) {
    return std::all_of(pieces, pieces + count, [&](const Source& piece) { return fits(call, piece); });
  };
  if (!all_fit(call.keys, call.key_pieces) || !all_fit(call.values, call.value_pieces)) return false;
  if (call.plain_heads && !fits(call, call.plain)) return false;
  if (call.queries) return run_several<T>(call), true;
  const int64_t heads = call.batch * call.heads, chunks = call.chunks, size = left_size(call);
  const auto* const query = static_cast<const T*>(call.query);
  const auto *const cos = static_cast<const T*>(call.cos), *const sin = static_cast<const T*>(call.sin);
  auto* const output = static_cast<T*>(call.output);
  const auto finish = [&](int64_t head, int64_t g, float* left) {
    const int64_t b = head / call.heads, h = head % call.heads;
    combine<T>(call, left, g, output + b * call.output_batch + (h * call.group + g) * call.output_head);
  };
  std::vector<float> all(chunks > 1 ? heads * chunks * size : 0);
#pragma omp parallel num_threads(call.threads)
  {
    Scratch scratch(call);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < heads * chunks; ++i) {
      // Part by part: what rows of the batch share stays in the processor's caches.
      const int64_t head = i % heads, chunk = i / heads, b = head / call.heads, h = head % call.heads;
      const Span span(call, b);
      const int64_t before = span.before(call), table = b * call.table_batch + before * call.table_row;
      const Part<T> part{
          query + b * call.query_batch + h * call.group * call.query_head,
          cos ? cos + table : nullptr,
          sin ? sin + table : nullptr,
          call.mask ? call.mask + b * call.mask_batch + before : nullptr,
          b, h, span.first, span.start(chunk, chunks), span.start(chunk + 1, chunks)};
      attend<T>(call, part, scratch);
      if (chunks > 1) {
        std::copy(scratch.left, scratch.left + size, all.begin() + (head * chunks + chunk) * size);
      } else {
        for (int64_t g = 0; g < call.group; ++g) finish(head, g, scratch.left);
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
  return true;
}

}  // namespace

extern "C" bool attend_float32(const Call* call) { return run<float>(*call); }
extern "C" bool attend_bfloat16(const Call* call) { return run<c10::BFloat16>(*call); }
extern "C" bool attend_float16(const Call* call) { return run<c10::Half>(*call); }
