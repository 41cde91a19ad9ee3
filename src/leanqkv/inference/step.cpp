// What a decoding step computes beside attention: matrix products of a few rows, RMSNorm, rotary positions and gates.
//
// Sums are in float32, results are rounded once. Strides are in elements; the last dimension of every tensor is contiguous.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

// How far ahead of a product its weights are asked for: rows are too short, and too many are read at once, for what the
// processor foresees by itself.
constexpr int64_t kAhead = 20 << 10;
// Rows of input that a weight is read for at once.
constexpr int64_t kRows = kFloats == 16 ? 8 : 6;
// Less work than this, in multiplications, is done before another thread has begun.
constexpr int64_t kAlone = 1 << 15;

template <typename T>
constexpr int64_t kParts = Numbers<T>::kParts;

// A vector of floats of the next `left` elements; zeros in place of those there are not.
template <typename T>
inline Floats floats(const T* from, int64_t left) {
  return Numbers<T>::load_last(reinterpret_cast<const char*>(from), 0, std::min(left, kFloats));
}

// --- matrix products ----------------------------------------------------------------------------------------------------

// One of the maps of the same input; the same, in the same order, as `_Map` in step.py.
struct Map {
  const void* weight;  // [outputs, inputs]
  const void* bias;    // [outputs], or null
  int64_t outputs;
};

// Rows of weights whose sums with `count` rows of input are kept in registers; a power of two.
template <typename T>
constexpr int64_t weights_at_once(int64_t count) {
  const int64_t most = (kFloats == 16 ? kParts<T> == 2 ? 24 : 32 : 12) / count;
  return most >= 8 ? 8 : most >= 4 ? 4 : 2;
}

// `count` rows of input [count, size] times kFloats rows of weights, of which there are `outputs`: [count, kFloats].
template <int64_t count, typename T>
void multiply_tile(
    const T* weight, int64_t outputs, int64_t inputs, const float* input, int64_t size, Floats* sums) {
  using Reader = Multiplied<T>;
  constexpr int64_t rows = weights_at_once<T>(count), parts = Reader::kParts;
  Floats products[count][kFloats / 2];
  for (int64_t n = 0; n < kFloats; n += rows) {
    const T* at[rows];
    Floats totals[count][rows];
    #pragma GCC unroll 8
    for (int64_t r = 0; r < rows; ++r) {
      at[r] = weight + std::min(n + r, outputs - 1) * inputs;
      #pragma GCC unroll 8
      for (int64_t g = 0; g < count; ++g) totals[g][r] = Floats(0.0f);
    }
    for (int64_t d = 0; d < inputs; d += Reader::kWidth) {
      Floats read[rows][parts];
      #pragma GCC unroll 8
      for (int64_t r = 0; r < rows; ++r) {
        Reader::load(reinterpret_cast<const char*>(at[r]), d, inputs - d, read[r]);
        __builtin_prefetch(reinterpret_cast<const char*>(at[r] + d) + kAhead, 0, 1);  // into the second cache
      }
      #pragma GCC unroll 8
      for (int64_t g = 0; g < count; ++g) {
        #pragma GCC unroll 8
        for (int64_t p = 0; p < parts; ++p) {
          const Floats one = kept(Floats::loadu(input + g * size + d / Reader::kPacked + p * kFloats));
          #pragma GCC unroll 8
          for (int64_t r = 0; r < rows; ++r) totals[g][r] = Reader::multiply(read[r][p], one, totals[g][r]);
        }
      }
    }
    #pragma GCC unroll 8
    for (int64_t g = 0; g < count; ++g) {
      #pragma GCC unroll 8
      for (int64_t r = 0; r < rows; r += 2) products[g][(n + r) / 2] = pair_sums(totals[g][r], totals[g][r + 1]);
    }
  }
  #pragma GCC unroll 8
  for (int64_t g = 0; g < count; ++g) sums[g] = sums_of(products[g]);
}

// Floats that a row of input takes, as weights are read.
template <typename T>
int64_t row_size(int64_t inputs) {
  constexpr int64_t width = Multiplied<T>::kWidth;
  return (inputs + width - 1) / width * width / Multiplied<T>::kPacked;
}

// Rows of input as weights are read, [rows, row_size], with zeros behind them; valid until the next call in this thread.
template <typename T>
const float* as_read(const T* input, int64_t rows, int64_t inputs) {
  using Reader = Multiplied<T>;
  static thread_local std::vector<Line> kept;
  const int64_t size = row_size<T>(inputs);
  kept.resize(std::max<size_t>(kept.size(), rows * size * sizeof(float) / kLine + 1));
  float* const to = kept[0].floats;
  for (int64_t m = 0; m < rows; ++m) {
    Floats read[Reader::kParts];
    for (int64_t d = 0; d < inputs; d += Reader::kWidth) {
      Reader::load(reinterpret_cast<const char*>(input + m * inputs), d, inputs - d, read);
      for (int64_t p = 0; p < Reader::kParts; ++p) read[p].store(to + m * size + d / Reader::kPacked + p * kFloats);
    }
  }
  return to;
}

// x W^T + b of every map: outputs[i] is [rows, outputs of map i]. Threads have the same number of weights, and read these
// in the order in which they lie.
template <typename T>
void multiply(
    const Map* maps, int64_t count, int64_t inputs, const T* input, int64_t rows, void* const* outputs,
    int64_t threads) {
  const int64_t size = row_size<T>(inputs);
  const float* const read = as_read(input, rows, inputs);
  const auto blocks_of = [](const Map& map) { return (map.outputs + kFloats - 1) / kFloats; };
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) blocks += blocks_of(maps[i]);
#pragma omp parallel for schedule(static) num_threads(threads) if (blocks * kFloats * inputs * rows > kAlone)
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t i = 0, block = b;
    for (; block >= blocks_of(maps[i]); ++i) block -= blocks_of(maps[i]);
    const Map& map = maps[i];
    const int64_t start = block * kFloats, left = map.outputs - start;
    const T* const weight = static_cast<const T*>(map.weight) + start * inputs;
    const Floats bias = map.bias ? floats(static_cast<const T*>(map.bias) + start, left) : Floats(0.0f);
    T* const output = static_cast<T*>(outputs[i]) + start;
    in_tiles<kRows>(rows, 0, [&](auto tile, int64_t m) {
      Floats sums[tile];
      multiply_tile<tile>(weight, std::min(left, kFloats), inputs, read + m * size, size, sums);
      for (int64_t g = 0; g < tile; ++g) store(sums[g] + bias, output + (m + g) * map.outputs, left);
    });
  }
}

// What `by_head` is called with; the same, in the same order, as `_ByHead` in step.py.
struct ByHead {
  const void* weight;  // [heads, outputs, inputs]
  const void* bias;    // [heads, outputs], or null
  const void* input;   // [batch, heads * group, inputs], of which `group` that follow each other share a head
  void* output;        // [batch, heads * group, outputs]
  // Of every complex column of a latent its frequency; null: there are none. Then the weight is [heads, 2, outputs / 2].
  const int64_t* frequency;
  int64_t batch, heads, group, outputs, inputs, threads;
};

// `ComplexUp.absorb` of model/latent.py: what a query is on complex columns, each of which has one frequency.
template <typename T>
void by_column(const ByHead& call) {
  const int64_t rows = call.batch * call.heads * call.group, half = call.inputs / 2, columns = call.outputs / 2;
#pragma omp parallel for schedule(static) num_threads(call.threads) if (rows * columns * 4 > kAlone)
  for (int64_t i = 0; i < rows; ++i) {
    const T* const real = static_cast<const T*>(call.weight) + i / call.group % call.heads * call.outputs;
    const T* const query = static_cast<const T*>(call.input) + i * call.inputs;
    T* const output = static_cast<T*>(call.output) + i * call.outputs;
    static thread_local std::vector<float> asked;
    asked.resize(std::max<size_t>(asked.size(), call.outputs));
    for (int64_t c = 0; c < columns; ++c) {
      asked[c] = float(query[call.frequency[c]]), asked[columns + c] = float(query[half + call.frequency[c]]);
    }
    for (int64_t c = 0; c < columns; c += kFloats) {
      const int64_t left = columns - c;
      const Floats a = floats(real + c, left), b = floats(real + columns + c, left);
      const Floats x = floats(&asked[c], left), y = floats(&asked[columns + c], left);
      store(at::vec::fmadd(b, y, a * x), output + c, left);
      store(a * y - b * x, output + columns + c, left);
    }
  }
}

// x_h W_h^T + b_h of every head h.
template <typename T>
void by_head(const ByHead& call) {
  if (call.frequency) return by_column<T>(call);
  const T *const weight = static_cast<const T*>(call.weight), *const bias = static_cast<const T*>(call.bias);
  const T* const input = static_cast<const T*>(call.input);
  T* const output = static_cast<T*>(call.output);
  const int64_t batch = call.batch, heads = call.heads, group = call.group, threads = call.threads;
  const int64_t outputs = call.outputs, inputs = call.inputs;
  const int64_t size = row_size<T>(inputs);
#pragma omp parallel for schedule(static) num_threads(threads) if (batch * heads * group * outputs * inputs > kAlone)
  for (int64_t i = 0; i < batch * heads; ++i) {
    const int64_t head = i % heads;
    const float* const read = as_read(input + i * group * inputs, group, inputs);
    for (int64_t start = 0; start < outputs; start += kFloats) {
      const int64_t place = head * outputs + start, left = outputs - start;
      const Floats added = bias ? floats(bias + place, left) : Floats(0.0f);
      in_tiles<kRows>(group, 0, [&](auto tile, int64_t m) {
        Floats sums[tile];
        multiply_tile<tile>(weight + place * inputs, std::min(left, kFloats), inputs, read + m * size, size, sums);
        for (int64_t g = 0; g < tile; ++g) {
          store(sums[g] + added, output + (i * group + m + g) * outputs + start, left);
        }
      });
    }
  }
}

// --- norms, rotary positions, gates -------------------------------------------------------------------------------------

// What RMSNorm multiplies a row by: 1 / rms of its numbers less their mean.
template <typename T>
Floats row_scale(const T* from, int64_t width, float mean, float eps) {
  Floats squares(0.0f);
  for (int64_t d = 0; d < width; d += kFloats) {
    const Floats read = floats(from + d, width - d) - Floats(mean);
    const Floats there = Floats::set(Floats(0.0f), read, std::min(width - d, kFloats));
    squares = at::vec::fmadd(there, there, squares);
  }
  return Floats(1.0f / std::sqrt(sum(squares) / float(width) + eps));
}

// `input * (offset + weight) / rms(input) + bias`, [rows, width]; see OffsetRMSNorm in model/layers.py. A LayerNorm takes
// off the mean before. The bias may be null.
template <typename T>
void norm(
    const T* input, int64_t rows, int64_t width, const T* weight, const T* bias, bool centered, float offset, float eps,
    T* output, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > kAlone)
  for (int64_t m = 0; m < rows; ++m) {
    const T* const from = input + m * width;
    Floats all(0.0f);
    for (int64_t d = 0; centered && d < width; d += kFloats) all = all + floats(from + d, width - d);
    const float mean = sum(all) / float(width);
    const Floats scale = row_scale(from, width, mean, eps);
    for (int64_t d = 0; d < width; d += kFloats) {
      const Floats factor = floats(weight + d, width - d) + Floats(offset);
      const Floats added = bias ? floats(bias + d, width - d) : Floats(0.0f);
      const Floats read = floats(from + d, width - d) - Floats(mean);
      store(at::vec::fmadd(read * scale, factor, added), output + m * width + d, width - d);
    }
  }
}

// Heads and the tables that turn them; the same, in the same order, as `_Turn` in step.py.
struct Turn {
  const void* heads;  // [batch, heads, positions, head_dim]
  const void *cos, *sin;  // [batch or 1, positions, turned]
  void* output;  // [batch, heads, positions, head_dim], contiguous
  int64_t batch, num_heads, positions, head_dim, turned;
  int64_t batch_stride, head_stride, position_stride;
  int64_t table_batch, table_position;
  int64_t threads;
  // Of every pair of numbers its place among the `frequencies` of the tables; null: they have the same order.
  const int64_t* frequency;
  int64_t frequencies;
};

// `rotate` of model/position.py.
template <typename T>
void turn(const Turn& call) {
  const int64_t rows = call.batch * call.num_heads * call.positions, half = call.turned / 2;
#pragma omp parallel for schedule(static) num_threads(call.threads) if (rows * call.head_dim > kAlone)
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t t = i % call.positions, h = i / call.positions % call.num_heads;
    const int64_t b = i / call.positions / call.num_heads, at = b * call.table_batch + t * call.table_position;
    const T* const from = static_cast<const T*>(call.heads) + b * call.batch_stride + h * call.head_stride +
        t * call.position_stride;
    const T *const cos = static_cast<const T*>(call.cos) + at, *const sin = static_cast<const T*>(call.sin) + at;
    T* const to = static_cast<T*>(call.output) + i * call.head_dim;
    for (int64_t d = 0; call.frequency && d < half; ++d) {
      const int64_t f = call.frequency[d], g = f + call.frequencies;
      const float first(from[d]), second(from[half + d]);
      to[d] = T(std::fma(second, float(sin[f]), first * float(cos[f])));
      to[half + d] = T(std::fma(first, float(sin[g]), second * float(cos[g])));
    }
    for (int64_t d = 0; !call.frequency && d < half; d += kFloats) {
      const int64_t left = half - d, e = half + d;
      const Floats first = floats(from + d, left), second = floats(from + e, left);
      store(at::vec::fmadd(second, floats(sin + d, left), first * floats(cos + d, left)), to + d, left);
      store(at::vec::fmadd(first, floats(sin + e, left), second * floats(cos + e, left)), to + e, left);
    }
    std::copy(from + call.turned, from + call.head_dim, to + call.turned);
  }
}

// `act(gate) * up` of so many numbers, or without `up` the activation alone: SiLU is x sigmoid(x), GELU x times the
// probability that a normal number is below x, and GELU with a tanh x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
enum Activation : int64_t { kSilu, kGeluTanh, kGelu };

inline Floats activated(const Floats& x, int64_t activation) {
  const Floats one(1.0f);
  if (activation == kGelu) return x * Floats(0.5f) * (one + (x * Floats(0.70710678118654752f)).erf());
  if (activation == kSilu) return x / (one + (x * Floats(-1.0f)).exp());
  return x / (one + (x * at::vec::fmadd(Floats(-0.07135481282812f), x * x, Floats(-1.5957691216057308f))).exp());
}

template <typename T>
void gate(const T* gate, const T* up, int64_t size, int64_t activation, T* output, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (size > kAlone)
  for (int64_t d = 0; d < size; d += kFloats) {
    const Floats y = up ? floats(up + d, size - d) : Floats(1.0f);
    store(activated(floats(gate + d, size - d), activation) * y, output + d, size - d);
  }
}

// --- several operations in one call -------------------------------------------------------------------------------------

enum Kind : int64_t { kMultiply, kNorm, kTurn, kGate, kAdd, kByHead, kCopy, kActivate, kScale };

// An operation on buffers, which are named by number; the same, in the same order, as `_Operation` in step.py.
struct Operation {
  int64_t kind, first, second, output;  // second: of a norm, whether it takes off the mean
  int64_t width;        // of a row of the first buffer; of a head of those normed, turned or multiplied each by its own
  int64_t count;        // maps, whose outputs are buffers that follow each other; heads; the activation; or, of a scale,
                        // the width of a row of the second buffer, by whose rms the first is divided
  const void* data;     // maps, the norm's weight, or the frequencies that heads are turned by
  const void* bias;     // of a norm; or null
  float offset, eps;    // of a norm; what a sum is multiplied by; of a scale, eps
};

struct Tables {
  const void *cos, *sin;  // [batch or 1, 1, turned]
  int64_t turned, batch;
};

// What `run` is called with; the same, in the same order, as `_Run` in layer.py.
struct Run {
  const Operation* operations;
  int64_t count;
  void* const* given;  // the first `num_given` buffers; the others last as long as the call
  int64_t num_given;
  const int64_t* widths;  // of the `num_buffers` buffers [rows, width]
  int64_t num_buffers, rows;
  const Tables* tables;
  int64_t threads;
};

template <typename T>
bool run(const Run& call) {
  const auto [operations, count, given, num_given, widths, num_buffers, rows, tables, threads] = call;
  const auto size_of = [&](int64_t i) { return (rows * widths[i] * int64_t(sizeof(T)) + kLine - 1) / kLine; };
  static thread_local std::vector<Line> kept;
  static thread_local std::vector<void*> buffers;
  size_t lines = 0;
  for (int64_t i = num_given; i < num_buffers; ++i) lines += size_of(i);
  kept.resize(std::max(kept.size(), lines + 1));
  buffers.assign(given, given + num_given);
  Line* next = kept.data();
  for (int64_t i = num_given; i < num_buffers; next += size_of(i++)) buffers.push_back(next);
  for (const Operation* one = operations; one < operations + count; ++one) {
    const T* const first = static_cast<const T*>(buffers[one->first]);
    const T* const second = static_cast<const T*>(buffers[one->second]);
    T* const output = static_cast<T*>(buffers[one->output]);
    const int64_t width = one->width;
    switch (one->kind) {
      case kMultiply:
        multiply<T>(
            static_cast<const Map*>(one->data), one->count, width, first, rows, &buffers[one->output], threads);
        break;
      case kNorm: {
        const T* const weight = static_cast<const T*>(one->data);
        norm<T>(
            first, rows * one->count, width, weight, static_cast<const T*>(one->bias), one->second, one->offset, one->eps,
            output, threads);
        break;
      }
      case kTurn: {
        const int64_t* const frequency = static_cast<const int64_t*>(one->data);
        const int64_t turned = frequency ? width : tables->turned;
        turn<T>(
            {first, tables->cos, tables->sin, output, rows, one->count, 1, width, turned, one->count * width, width,
             width, tables->batch, tables->turned, threads, frequency, tables->turned / 2});
        break;
      }
      case kByHead: {
        ByHead call = *static_cast<const ByHead*>(one->data);
        call.input = first, call.output = output, call.batch = rows, call.group = one->count / call.heads;
        call.threads = threads;
        by_head<T>(call);
        break;
      }
      case kGate:
        gate<T>(first, second, rows * width, one->count, output, threads);
        break;
      case kAdd:
        for (int64_t d = 0; d < rows * width; d += kFloats) {
          const int64_t left = rows * width - d;
          store((floats(first + d, left) + floats(second + d, left)) * Floats(one->offset), output + d, left);
        }
        break;
      case kCopy:
        std::copy(first, first + rows * width, output);
        break;
      case kActivate:
        gate<T>(first, nullptr, rows * width, one->count, output, threads);
        break;
      case kScale:
        for (int64_t m = 0; m < rows; ++m) {
          const Floats scale = row_scale(second + m * one->count, one->count, 0.0f, one->eps);
          for (int64_t d = m * width; d < (m + 1) * width; d += kFloats) {
            const int64_t left = (m + 1) * width - d;
            store(floats(first + d, left) * scale, output + d, left);
          }
        }
    }
  }
  return true;
}

// --- steps ----------------------------------------------------------------------------------------------------------

// One new position of every head, and where it goes; the same, in the same order, as `_Write` in step.py.
struct Write {
  const char* from;  // [batch, heads, row]
  char* to;          // [batch, heads, places, row], or from where pages lie
  const int64_t* places;  // of every row of the batch; or null: `place`
  int64_t batch, heads, row;  // bytes of a row
  int64_t from_batch, from_head, to_batch, to_head, to_place;  // strides, in bytes
  int64_t place;
};

// A call that a step made, which returns whether it did its work; the same, in the same order, as `_Noted` in repeat.py.
struct Noted {
  bool (*function)(const void*);
  const void* arguments;
};

}  // namespace

#define FUNCTIONS(name, T)                                                                                             \
  extern "C" void multiply_##name(                                                                                     \
      const Map* maps, int64_t count, int64_t inputs, const T* input, int64_t rows, void* const* outputs,              \
      int64_t threads) {                                                                                               \
    multiply<T>(maps, count, inputs, input, rows, outputs, threads);                                                   \
  }                                                                                                                    \
  extern "C" bool by_head_##name(const ByHead* call) { return by_head<T>(*call), true; }                               \
  extern "C" void norm_##name(                                                                                         \
      const T* input, int64_t rows, int64_t width, const T* weight, const T* bias, int64_t centered, float offset,     \
      float eps, T* output, int64_t threads) {                                                                         \
    norm<T>(input, rows, width, weight, bias, centered, offset, eps, output, threads);                                 \
  }                                                                                                                    \
  extern "C" bool turn_##name(const Turn* call) { return turn<T>(*call), true; }                                       \
  extern "C" void gate_##name(                                                                                         \
      const T* input, const T* up, int64_t size, int64_t activation, T* output, int64_t threads) {                     \
    gate<T>(input, up, size, activation, output, threads);                                                             \
  }                                                                                                                    \
  extern "C" bool run_##name(const Run* call) { return run<T>(*call); }
FUNCTIONS(float32, float)
FUNCTIONS(bfloat16, c10::BFloat16)
FUNCTIONS(float16, c10::Half)

extern "C" bool write_head_rows(const Write* call) {
  for (int64_t b = 0; b < call->batch; ++b) {
    const int64_t place = call->places ? call->places[b] : call->place;
    for (int64_t h = 0; h < call->heads; ++h) {
      char* const to = call->to + b * call->to_batch + h * call->to_head + place * call->to_place;
      std::memcpy(to, call->from + b * call->from_batch + h * call->from_head, call->row);
    }
  }
  return true;
}

// Makes all of these calls; returns how many did their work, and stops behind the first that did not.
extern "C" int64_t repeat_calls(const Noted* calls, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!calls[i].function(calls[i].arguments)) return i;
  }
  return count;
}
