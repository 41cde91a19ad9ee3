// What all kernels are made of: vectors of floats, and how rows of other numbers become these.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using Floats = at::vec::Vectorized<float>;
constexpr int64_t kFloats = Floats::size();

constexpr int64_t kLine = 64;
constexpr int64_t kLineFloats = kLine / int64_t(sizeof(float));
// Sums that begin at a line of the cache: vectors that lie across two lines are slower.
struct alignas(kLine) Line {
  float floats[kLineFloats];
};

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

// How rows are read: `load` makes floats of kWidth columns from the d-th on; zeros of columns beyond the `left` ones that
// there are. `place` says where in these floats a column is. Pointers are to bytes.
template <typename T>
struct Numbers {
  static constexpr int64_t kWidth = at::vec::Vectorized<T>::size(), kParts = kWidth / kFloats;
  static int64_t place(int64_t d, int64_t columns) { return d; }
  static int64_t bytes(int64_t columns) { return columns * int64_t(sizeof(T)); }
  static at::vec::Vectorized<T> raw(const char* row, int64_t d, int64_t left) {
    const T* const from = reinterpret_cast<const T*>(row) + d;
    if (left >= kWidth) return at::vec::Vectorized<T>::loadu(from);
#ifdef CPU_CAPABILITY_AVX2  // for which ATen copies them through memory
    constexpr int64_t each = 4 / int64_t(sizeof(T));
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i whole = _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(left / each)), places);
    __m256i read = _mm256_maskload_epi32(reinterpret_cast<const int*>(from), whole);
    if (left % each) {
      uint16_t last;
      std::memcpy(&last, from + left - 1, sizeof(last));
      const __m256i here = _mm256_cmpeq_epi32(_mm256_set1_epi32(int32_t(left / each)), places);
      read = _mm256_or_si256(read, _mm256_and_si256(here, _mm256_set1_epi32(last)));
    }
    if constexpr (std::is_same_v<T, float>) return _mm256_castsi256_ps(read);
    else return read;
#else
    return at::vec::Vectorized<T>::loadu(from, left);
#endif
  }
  // Rows that are read at once, and numbers of a row in a float: not one of both, if these are pairs.
  static constexpr int64_t kRows = 1, kPacked = 1;
  static Floats multiply(const Floats& read, const Floats& factor, const Floats& total) {
    return at::vec::fmadd(read, factor, total);
  }
  static void load(const char* row, int64_t d, int64_t left, Floats (&to)[kParts]) {
    if constexpr (std::is_same_v<T, float>) {
      to[0] = raw(row, d, left);
    } else {
      std::tie(to[0], to[1]) = at::vec::convert_to_float<T>(raw(row, d, left));
    }
  }
  // The last columns, of which there are no more than kFloats, in their order.
  static Floats load_last(const char* row, int64_t d, int64_t left) {
    Floats to[kParts];
    Numbers::load(row, d, left, to);
    return to[0];
  }
};

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
// Of bfloat16, every second column and then those between them: a bfloat16 is the upper half of a float, so that two
// columns in four bytes are two floats by one operation each, and need not be moved apart.
struct Halves : Numbers<c10::BFloat16> {
  static int64_t place(int64_t d, int64_t columns) {
    const int64_t first = d / kWidth * kWidth;
    return columns - first <= kFloats ? d : first + d % 2 * kFloats + (d - first) / 2;
  }
  static void load(const char* row, int64_t d, int64_t left, Floats (&to)[kParts]) {
    using Ints = at::vec::Vectorized<int32_t>;
    const Ints both(raw(row, d, left));
    to[0] = at::vec::cast<float>(both << Ints(16));
    to[1] = at::vec::cast<float>(both & Ints(int32_t(0xffff0000)));
  }
};
template <typename T>
using Folded = std::conditional_t<std::is_same_v<T, c10::BFloat16>, Halves, Numbers<T>>;
#else
template <typename T>
using Folded = Numbers<T>;
#endif

// Of bfloat16, pairs that lie where a float would, which one operation multiplies with others and adds up in float32.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
template <typename T>
constexpr bool kHasPairs = std::is_same_v<T, c10::BFloat16>;

struct Pairs {
  static Floats multiply(const Floats& read, const Floats& factor, const Floats& total) {
    return _mm512_dpbf16_ps(total, __m512bh(__m512(read)), __m512bh(__m512(factor)));
  }
  // 2 * kFloats floats as pairs.
  static Floats of(const Floats& first, const Floats& second) { return __m512(_mm512_cvtne2ps_pbh(second, first)); }
  // kFloats pairs of a number of each.
  static Floats across(const Floats& first, const Floats& second) {
    const auto half = [](const Floats& of) { return _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(of))); };
    return _mm512_castsi512_ps(_mm512_or_si512(half(first), _mm512_slli_epi32(half(second), 16)));
  }
  static void store(const Floats& from, c10::BFloat16* to, int64_t left = kFloats) {
    const __mmask16 there = (uint32_t(1) << std::min(left, kFloats)) - 1;
    _mm256_mask_storeu_epi16(to, there, __m256i(_mm512_cvtneps_pbh(from)));
  }
  static int64_t bytes(int64_t columns) { return columns * int64_t(sizeof(c10::BFloat16)); }
  static __m512i raw(const char* row, int64_t d, int64_t left) {
    const char* const from = row + bytes(d);
    if (left >= 32) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16((uint32_t(1) << left) - 1, from);
  }
};

// Pairs of neighbors in a row.
struct AlongRow : Pairs {
  static constexpr int64_t kWidth = 2 * kFloats, kParts = 1, kPacked = 2;
  static void load(const char* row, int64_t d, int64_t left, Floats (&to)[kParts]) {
    to[0] = _mm512_castsi512_ps(raw(row, d, left));
  }
};

// Pairs of two rows' numbers of a column; columns are in the order of Halves.
struct AcrossRows : Pairs {
  static constexpr int64_t kWidth = 2 * kFloats, kParts = 2, kRows = 2;
  static void load(const char* row, const char* next, int64_t d, int64_t left, Floats (&to)[kParts]) {
    const __m512i first = raw(row, d, left), second = next ? raw(next, d, left) : _mm512_setzero_si512();
    to[0] = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, first, _mm512_slli_epi32(second, 16)));
    to[1] = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second));
  }
  static Floats load_last(const char* row, const char* next, int64_t d, int64_t left) {
    const __m512i first = raw(row, d, left), second = next ? raw(next, d, left) : _mm512_setzero_si512();
    const auto spread = [](__m512i of) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(of)); };
    return _mm512_castsi512_ps(_mm512_or_si512(spread(first), _mm512_slli_epi32(spread(second), 16)));
  }
};
#else
template <typename T>
constexpr bool kHasPairs = false;
// By these nothing is read.
struct Pairs : Numbers<float> {
  static Floats of(const Floats& first, const Floats& second) { return first; }
  static Floats across(const Floats& first, const Floats& second) { return first; }
  static void store(const Floats& from, c10::BFloat16* to, int64_t left = kFloats) {}
};
struct AlongRow : Pairs {};
struct AcrossRows : Pairs {
  using Pairs::load_last;
  static Floats load_last(const char* row, const char* next, int64_t d, int64_t left) { return Floats(0.0f); }
};
#endif
// How rows are read that are multiplied with others of their type.
template <typename T>
using Multiplied = std::conditional_t<kHasPairs<T>, AlongRow, Folded<T>>;

// The first `left` of these numbers, or all.
template <typename T>
inline void store(const Floats& from, T* to, int64_t left) {
  left = std::min(left, kFloats);
  if constexpr (std::is_same_v<T, float>) {
    from.store(to, left);
  } else {
    at::vec::convert_from_float<T>(from, Floats(0.0f)).store(to, left);
  }
}

inline float sum(const Floats& of) {
  return at::vec::vec_reduce_all<float>([](const Floats& a, const Floats& b) { return a + b; }, of);
}

// Sums of neighbors, of one vector and then of the other.
inline Floats pair_sums(const Floats& one, const Floats& other) {
  const auto [even, odd] = at::vec::deinterleave2(one, other);
  return even + odd;
}

// The sums of as many vectors as a vector has elements, in their order, of which the pair sums are given.
inline Floats sums_of(Floats (&of)[kFloats / 2]) {
  for (int64_t count = kFloats / 4; count; count /= 2) {
    for (int64_t i = 0; i < count; ++i) of[i] = pair_sums(of[2 * i], of[2 * i + 1]);
  }
  return of[0];
}

// Keeps a number in a register. Compilers read it from memory for each of its uses, of which a processor reads but two at
// once.
inline Floats kept(Floats number) {
#ifdef CPU_CAPABILITY_AVX512
  __m512 raw = number;
  asm("" : "+v"(raw));
  number = raw;
#endif
  return number;
}

template <int64_t value>
using constant = std::integral_constant<int64_t, value>;

// Calls `tile` with a constant of at most `most` and the first of them, for all of `count`: tiles of sizes as even as can
// be.
template <int64_t most, int64_t size = most, typename Tile>
inline void in_tiles(int64_t count, int64_t first, const Tile& tile) {
  const int64_t tiles = (count + most - 1) / most;
  if constexpr (size > 1) {
    if (count < tiles * size) return in_tiles<most, size - 1>(count, first, tile);
  }
  if (!count) return;
  tile(constant<size>(), first);
  in_tiles<most>(count - size, first + size, tile);
}

}  // namespace
