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
#include <iterator>
#include <vector>

#include "vectors.h"
#include "attention_call.h"
#include "attention_rows.h"
#include "attention_codes.h"
#include "attention_turns.h"
#include "attention_several.h"

namespace {

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
        for (int64_t i = std::max<int64_t>(part.first - n, 0); i < rows; ++i) own[i] += part.mask[n + i];
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
