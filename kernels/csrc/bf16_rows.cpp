// The tile loops behind bf16_rows.h.
//
// A bfloat16 is the upper half of a float, so two neighbours in one 32-bit lane widen with a shift
// (the even one) and a mask (the odd one). Rows are packed to match: of 16 values the 8 even ones
// first, then the 8 odd ones, zeros behind the last. Every result has one accumulator of 8 lanes,
// fed in the order of the columns and summed by one tree, whatever the tile.
//
// Few rows widen in the tile and are bound by reading the weight: hardware prefetchers stop at every
// page, so lines are asked for some weight rows ahead. Many rows widen four weight rows once into
// the first cache, which leaves the tiles nothing but products.

#include "bf16_rows.h"

#include <algorithm>
#include <cstring>
#include <memory>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace decodegrid {
namespace {

constexpr int64_t STEP = 16, HALF = 8;
constexpr int64_t CHUNK_FLOATS = 6144;  // 24 KiB of packed rows
constexpr int64_t TILE_ROWS = 3;
constexpr int64_t MAX_DIRECT_ROWS = 6;
constexpr int64_t AHEAD = 16;  // weight rows

#if defined(__AVX2__) && defined(__FMA__)

using Lanes = __m256;

inline Lanes load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, Lanes lanes) { _mm256_storeu_ps(at, lanes); }
inline Lanes zero() { return _mm256_setzero_ps(); }
inline Lanes even(const uint16_t* at) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
inline Lanes odd(const uint16_t* at) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, mask));
}
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm256_fmadd_ps(a, b, sum); }
inline void sum_four(const Lanes (&sums)[TILE_OUTPUTS], float* out) {
  const Lanes pairs = _mm256_hadd_ps(sums[0], sums[1]), more = _mm256_hadd_ps(sums[2], sums[3]);
  const Lanes quarters = _mm256_hadd_ps(pairs, more);
  const __m128 low = _mm256_castps256_ps128(quarters);
  _mm_storeu_ps(out, _mm_add_ps(low, _mm256_extractf128_ps(quarters, 1)));
}

#else

struct Lanes {
  float at[HALF];
};

inline Lanes load(const float* at) {
  Lanes lanes;
  std::memcpy(lanes.at, at, sizeof(lanes));
  return lanes;
}
inline void store(float* at, const Lanes& lanes) { std::memcpy(at, lanes.at, sizeof(lanes)); }
inline Lanes zero() { return Lanes{}; }
inline Lanes every_other(const uint16_t* at) {
  uint32_t bits[HALF];
  for (int64_t i = 0; i < HALF; ++i) bits[i] = static_cast<uint32_t>(at[2 * i]) << 16;
  Lanes lanes;
  std::memcpy(lanes.at, bits, sizeof(lanes));
  return lanes;
}
inline Lanes even(const uint16_t* at) { return every_other(at); }
inline Lanes odd(const uint16_t* at) { return every_other(at + 1); }
inline Lanes multiply_add(const Lanes& a, const Lanes& b, Lanes sum) {
  for (int64_t i = 0; i < HALF; ++i) sum.at[i] += a.at[i] * b.at[i];
  return sum;
}
inline void sum_four(const Lanes (&sums)[TILE_OUTPUTS], float* out) {
  for (int64_t n = 0; n < TILE_OUTPUTS; ++n) {
    const float* v = sums[n].at;
    out[n] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
}

#endif

// Weight rows as they are stored.
struct Narrow {
  const uint16_t* first;
  int64_t stride;

  Lanes evens(int64_t n, int64_t k) const {
    const uint16_t* at = first + n * stride + k;
    __builtin_prefetch(at + AHEAD * stride);
    return even(at);
  }
  Lanes odds(int64_t n, int64_t k) const { return odd(first + n * stride + k); }
};

// Weight rows widened by widen_rows.
struct Wide {
  const float* first;
  int64_t stride;

  Lanes evens(int64_t n, int64_t k) const { return load(first + n * stride + k); }
  Lanes odds(int64_t n, int64_t k) const { return load(first + n * stride + k + HALF); }
};

void widen_rows(
    const uint16_t* weight, int64_t weight_stride, int64_t count, int64_t columns, float* wide) {
  const int64_t size = packed_row_size(columns), full = columns / STEP * STEP;
  for (int64_t n = 0; n < count; ++n) {
    const uint16_t* source = weight + n * weight_stride;
    float* target = wide + n * size;
    for (int64_t k = 0; k < full; k += STEP) {
      __builtin_prefetch(source + AHEAD * weight_stride + k);
      store(target + k, even(source + k));
      store(target + k + HALF, odd(source + k));
    }
    if (full < columns) {
      uint16_t rest[STEP] = {0};
      std::memcpy(rest, source + full, static_cast<size_t>(columns - full) * sizeof(uint16_t));
      store(target + full, even(rest));
      store(target + full + HALF, odd(rest));
    }
  }
}

// ROWS x `count` results; `weight` holds TILE_OUTPUTS rows, `count` of them wanted.
template <int ROWS, typename Weight>
void tile(const float* rows, int64_t row_size, Weight weight, int64_t count, float* out,
          int64_t out_stride) {
  Lanes sums[ROWS][TILE_OUTPUTS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < TILE_OUTPUTS; ++n) sums[r][n] = zero();
  for (int64_t k = 0; k < row_size; k += STEP) {
    Lanes x[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) x[r] = load(rows + r * row_size + k);
#pragma GCC unroll 4
    for (int n = 0; n < TILE_OUTPUTS; ++n) {
      const Lanes w = weight.evens(n, k);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[r][n] = multiply_add(w, x[r], sums[r][n]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) x[r] = load(rows + r * row_size + k + HALF);
#pragma GCC unroll 4
    for (int n = 0; n < TILE_OUTPUTS; ++n) {
      const Lanes w = weight.odds(n, k);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[r][n] = multiply_add(w, x[r], sums[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    if (count == TILE_OUTPUTS) {
      sum_four(sums[r], out + r * out_stride);
    } else {
      float some[TILE_OUTPUTS];
      sum_four(sums[r], some);
      std::copy(some, some + count, out + r * out_stride);
    }
  }
}

// `count` results of every row, in tiles of up to TILE_ROWS rows.
template <typename Weight>
void tile_rows(
    const float* rows, int64_t num_rows, int64_t row_size, Weight weight, int64_t count,
    float* out, int64_t out_stride) {
  for (int64_t row = 0; row < num_rows;) {
    const int64_t left = num_rows - row;
    // Four rows are two tiles of two: the weight is loaded for every tile.
    const int64_t height = left == 4 ? 2 : std::min(left, TILE_ROWS);
    const float* first = rows + row * row_size;
    float* target = out + row * out_stride;
    if (height == 3)
      tile<3>(first, row_size, weight, count, target, out_stride);
    else if (height == 2)
      tile<2>(first, row_size, weight, count, target, out_stride);
    else
      tile<1>(first, row_size, weight, count, target, out_stride);
    row += height;
  }
}

}  // namespace

int64_t packed_row_size(int64_t columns) { return (columns + STEP - 1) / STEP * STEP; }

int64_t rows_per_chunk(int64_t columns) {
  const int64_t fitting = CHUNK_FLOATS / std::max(packed_row_size(columns), STEP);
  return std::max(fitting / TILE_ROWS, int64_t{2}) * TILE_ROWS;
}

void pack_row(const float* row, int64_t columns, float* packed) {
  const int64_t full = columns / STEP * STEP;
  for (int64_t k = 0; k < full; k += STEP)
    for (int64_t i = 0; i < HALF; ++i) {
      packed[k + i] = row[k + 2 * i];
      packed[k + HALF + i] = row[k + 2 * i + 1];
    }
  for (int64_t i = 0; full < columns && i < HALF; ++i) {
    packed[full + i] = full + 2 * i < columns ? row[full + 2 * i] : 0.0f;
    packed[full + HALF + i] = full + 2 * i + 1 < columns ? row[full + 2 * i + 1] : 0.0f;
  }
}

void rows_product(
    const float* rows, int64_t num_rows, int64_t columns, const uint16_t* weight,
    int64_t weight_stride, int64_t outputs, float* out, int64_t out_stride) {
  const int64_t row_size = packed_row_size(columns);
  const bool is_direct = num_rows <= MAX_DIRECT_ROWS && row_size == columns;
  std::unique_ptr<float[]> wide;
  for (int64_t n = 0; n < outputs; n += TILE_OUTPUTS) {
    const uint16_t* first = weight + n * weight_stride;
    const int64_t count = std::min(TILE_OUTPUTS, outputs - n);
    if (is_direct && count == TILE_OUTPUTS) {
      const Narrow source{first, weight_stride};
      tile_rows(rows, num_rows, row_size, source, count, out + n, out_stride);
      continue;
    }
    // The last tile may lack weight rows: it computes on what the buffer holds and drops it.
    if (!wide) wide = std::make_unique<float[]>(TILE_OUTPUTS * row_size);
    widen_rows(first, weight_stride, count, columns, wide.get());
    const Wide source{wide.get(), row_size};
    tile_rows(rows, num_rows, row_size, source, count, out + n, out_stride);
  }
}

void wide_rows_product(
    const float* rows, int64_t num_rows, int64_t columns, const float* weight, int64_t outputs,
    float* out, int64_t out_stride) {
  const int64_t row_size = packed_row_size(columns);
  tile_rows(rows, num_rows, row_size, Wide{weight, row_size}, outputs, out, out_stride);
}

}  // namespace decodegrid
