// Codes of 8, 4 or 2 bits made of whole blocks of tokens: `PageLayout.quantize` of model/cache_quantized.py, bit by bit.

#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kBlock = 64;
// Numbers that take less time than handing a part of them to another thread.
constexpr int64_t kAlone = 1 << 13;

// The same, in the same order, as `_Quantize` in codes.py. Strides of states are in numbers.
struct Quantize {
  const void* states;  // [batch, heads, blocks * kBlock, columns]
  uint8_t* pages;      // [batch, blocks, page_bytes]
  int64_t batch, heads, blocks, columns;
  int64_t state_batch, state_head, state_token;
  int64_t page_bytes, code_bytes, bits, lanes, depth;
  int64_t per_token, groups, width, head_scales;
  int64_t threads;
};

// The nearest bfloat16 that is not above `exact`, or not below it.
c10::BFloat16 rounded(float exact, bool up) {
  c10::BFloat16 near(exact);
  const float found(near);
  if (up ? found < exact : found > exact) {
    const bool negative = near.x & 0x8000;
    if (found == 0.0f) near.x = up ? 0x0001 : 0x8001;
    else near.x += up == negative ? -1 : 1;
  }
  return near;
}

// Codes of a head of a block, [lanes, width], of its numbers, and a scale and an offset of every column and group of lanes.
void encode(const Quantize& call, const float* numbers, uint8_t* codes, c10::BFloat16* scales, c10::BFloat16* offsets) {
  const int64_t width = call.per_token ? kBlock : call.columns, size = call.per_token ? call.width : call.lanes;
  const float levels = float((1 << call.bits) - 1);
  int32_t made[kFloats];
  for (int64_t first = 0, group = 0; first < call.lanes; first += size, ++group) {
    const int64_t last = std::min(first + size, call.lanes);
    for (int64_t c = 0; c < width; c += kFloats) {
      const int64_t left = std::min(width - c, kFloats);
      Floats least = Floats::loadu(numbers + first * width + c, left), most = least;
      for (int64_t lane = first + 1; lane < last; ++lane) {
        const Floats read = Floats::loadu(numbers + lane * width + c, left);
        least = at::vec::minimum(least, read), most = at::vec::maximum(most, read);  // which keep what is not a number
      }
      float offset[kFloats], step[kFloats];
      least.store(offset), most.store(step);
      for (int64_t d = 0; d < left; ++d) {
        const c10::BFloat16 low = rounded(offset[d], false), scale = rounded((step[d] - float(low)) / levels, true);
        const int64_t place = (c + d) * (call.per_token ? call.groups : 1) + group;
        offsets[place] = low, scales[place] = scale;
        offset[d] = low, step[d] = float(scale) > 0.0f ? float(scale) : 1.0f;
      }
      const Floats offset_of = Floats::loadu(offset), step_of = Floats::loadu(step);
      for (int64_t lane = first; lane < last; ++lane) {
        const Floats read = Floats::loadu(numbers + lane * width + c, left);
        at::vec::convert_to_int_of_same_size(((read - offset_of) / step_of).round()).store(made);
        for (int64_t d = 0; d < left; ++d) codes[lane * width + c + d] = uint8_t(made[d]);  // of what is not finite, any
      }
    }
  }
}

// Codes as they lie in a page: see PageLayout.
void pack(const Quantize& call, const uint8_t* codes, uint32_t* to) {
  const int64_t places = 8 / call.bits, width = call.per_token ? kBlock : call.columns;
  for (int64_t chunk = 0; chunk < call.depth / (4 * places); ++chunk, to += call.lanes) {
    std::fill(to, to + call.lanes, 0u);
    for (int64_t place = 0; place < places; ++place) {
      const int64_t first = (chunk * places + place) * 4, left = width - first;
      if (left <= 0) break;  // what fills them up is zero
      const uint32_t there = left < 4 ? (1u << (8 * left)) - 1 : ~0u;
      for (int64_t lane = 0; lane < call.lanes; ++lane) {
        uint32_t four;
        std::memcpy(&four, codes + lane * width + first, 4);
        to[lane] |= (four & there) << (place * call.bits);
      }
    }
  }
}

template <typename T>
void quantize(const Quantize& call) {
  const int64_t numbers = kBlock * call.columns, units = call.batch * call.blocks * call.heads;
#pragma omp parallel num_threads(call.threads) if (units * numbers > kAlone)
  {
    std::vector<float> read(numbers), turned(numbers);
    std::vector<uint8_t> codes(numbers + 4);  // which are read by four
    std::vector<uint32_t> packed(call.depth * call.lanes * call.bits / 32);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units; ++i) {
      const int64_t head = i % call.heads, block = i / call.heads % call.blocks, b = i / call.heads / call.blocks;
      const T* const from = static_cast<const T*>(call.states) + b * call.state_batch + head * call.state_head +
          block * kBlock * call.state_token;
      for (int64_t t = 0; t < kBlock; ++t) {
        const T* const row = from + t * call.state_token;
        for (int64_t c = 0; c < call.columns; ++c) read[t * call.columns + c] = float(row[c]);
      }
      uint8_t* const page = call.pages + (b * call.blocks + block) * call.page_bytes;
      std::vector<c10::BFloat16> scales(2 * call.head_scales);
      c10::BFloat16* const offsets = scales.data() + call.head_scales;
      if (call.per_token) {
        at::vec::transpose_mxn(read.data(), call.columns, turned.data(), kBlock, int(kBlock), int(call.columns));
      }
      encode(call, (call.per_token ? turned : read).data(), codes.data(), scales.data(), offsets);
      pack(call, codes.data(), packed.data());
      // Pages need not begin at a multiple of four bytes.
      const int64_t code_bytes = call.code_bytes / call.heads, scale_bytes = call.head_scales * sizeof(c10::BFloat16);
      std::memcpy(page + head * code_bytes, packed.data(), code_bytes);
      std::memcpy(page + call.code_bytes + head * scale_bytes, scales.data(), scale_bytes);
      std::memcpy(page + call.code_bytes + (call.heads + head) * scale_bytes, offsets, scale_bytes);
    }
  }
}

}  // namespace

extern "C" void quantize_float32(const Quantize* call) { quantize<float>(*call); }
extern "C" void quantize_bfloat16(const Quantize* call) { quantize<c10::BFloat16>(*call); }
extern "C" void quantize_float16(const Quantize* call) { quantize<c10::Half>(*call); }
