// Rows that are made before they are read: numbers of codes, and keys turned by rotary positions or back.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

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

}  // namespace
