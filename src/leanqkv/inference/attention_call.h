// A call of attention: where queries, keys and values lie, in which blocks their positions are read, and as what numbers.

#include <algorithm>
#include <cstdint>
#include <limits>

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

}  // namespace
