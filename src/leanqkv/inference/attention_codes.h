// Products of attention with codes.
//
// A page's codes of a head are a matrix [depth, lanes]: of keys [columns, positions], of values [positions, columns]. Four
// of a lane lie in four bytes, whose lowest bits are those of the first four, the next bits those of the next four
// (PageLayout in model/cache_quantized.py). Both products of attention are those of factors [count, depth] with such a
// matrix: of keys the factors are queries times scales by column, of values weights times scales by position.

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

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

}  // namespace
