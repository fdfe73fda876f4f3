// Rows of E4M3 and E2M1 codes with E8M0 scales, and products that decode weight rows on the way.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>

#include "bf16_rows.h"
#include "records.h"

namespace decodegrid {

constexpr int64_t SCALE_BLOCK = 32;  // channels, and rows of a tile, that share a scale

// Values by arithmetic instead of the tables of records.h, so that loops over a row vectorise. A
// code without a leading one ("small") is read with one, which is then subtracted: exact, and
// without subnormal operands, which many CPUs multiply slowly.

// code: a byte; 0x7f and 0xff are NaN.
inline float e4m3_lane(uint32_t code) {
  const uint32_t magnitude = code & 0x7F;
  const bool small = magnitude < 8;
  const uint32_t bits = (magnitude << 20) + ((small ? 121u : 120u) << 23);
  const float value = std::bit_cast<float>(bits) - (small ? 0x1p-6f : 0.0f);
  const uint32_t found = magnitude == 0x7F ? 0x7FC00000u : std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(found | ((code & 0x80) << 24));
}

// code: 0 .. 15.
inline float e2m1_lane(uint32_t code) {
  const uint32_t magnitude = code & 7;
  const bool small = magnitude < 2;
  const uint32_t bits = (magnitude << 22) + ((small ? 127u : 126u) << 23);
  const float value = std::bit_cast<float>(bits) - (small ? 1.0f : 0.0f);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | ((code & 8) << 28));
}

inline void decode_e4m3_block(
    const uint8_t* __restrict codes, float scale, int64_t count, float* __restrict out) {
  for (int64_t k = 0; k < count; ++k) out[k] = e4m3_lane(codes[k]) * scale;
}

// One row of `columns` E4M3 codes in their own order; a scale for each SCALE_BLOCK of them.
inline void decode_e4m3_row(
    const uint8_t* codes, const uint8_t* scales, int64_t columns, float* out) {
  const int64_t full = columns / SCALE_BLOCK * SCALE_BLOCK;
  for (int64_t k = 0; k < full; k += SCALE_BLOCK)
    decode_e4m3_block(codes + k, e8m0_value(scales[k / SCALE_BLOCK]), SCALE_BLOCK, out + k);
  if (full < columns)
    decode_e4m3_block(
        codes + full, e8m0_value(scales[full / SCALE_BLOCK]), columns - full, out + full);
}

// One row of `columns` (a multiple of SCALE_BLOCK) E2M1 codes, two a byte, in the order of
// pack_row: of 16 values the 8 even ones (the low halves of 8 bytes) first, then the 8 odd ones.
inline void decode_e2m1_row(
    const uint8_t* codes, const uint8_t* scales, int64_t columns, float* __restrict out) {
  constexpr uint64_t HALVES = 0x0F0F0F0F0F0F0F0F;
  for (int64_t k = 0; k < columns; k += SCALE_BLOCK) {
    const float scale = e8m0_value(scales[k / SCALE_BLOCK]);
    uint64_t bytes[2];
    std::memcpy(bytes, codes + k / 2, sizeof(bytes));
    const uint64_t halves[4] = {
        bytes[0] & HALVES, bytes[0] >> 4 & HALVES, bytes[1] & HALVES, bytes[1] >> 4 & HALVES};
    uint8_t split[SCALE_BLOCK];
    std::memcpy(split, halves, sizeof(split));
    for (int64_t i = 0; i < SCALE_BLOCK; ++i) out[k + i] = e2m1_lane(split[i]) * scale;
  }
}

// out[r * out_stride + n] = row r . weight row n, of `outputs` weight rows.
//
// rows: packed_row_size(columns) apart, zeros behind the last column. decode(n, target) writes
// weight row n in the order of the rows' columns. Each weight row is decoded once; a result's bits
// depend on its own row and weights alone.
template <typename Decode>
void decoded_product(
    const float* rows, int64_t num_rows, int64_t columns, int64_t outputs, const Decode& decode,
    float* out, int64_t out_stride) {
  constexpr int64_t BLOCK_FLOATS = 16384;  // 64 KiB of decoded rows
  const int64_t size = packed_row_size(columns), chunk = rows_per_chunk(columns);
  const int64_t tiles = BLOCK_FLOATS / std::max(size * TILE_OUTPUTS, int64_t{1});
  const int64_t block = std::clamp(tiles, int64_t{1}, int64_t{16}) * TILE_OUTPUTS;
  // Zeros at first, so that padding behind the columns and rows that are lacking compute cleanly.
  const auto wide = std::make_unique<float[]>(block * size);
  for (int64_t start = 0; start < outputs; start += block) {
    const int64_t count = std::min(block, outputs - start);
    for (int64_t n = 0; n < count; ++n) decode(start + n, wide.get() + n * size);
    for (int64_t row = 0; row < num_rows; row += chunk)
      for (int64_t n = 0; n < count; n += TILE_OUTPUTS)
        wide_rows_product(
            rows + row * size, std::min(chunk, num_rows - row), columns, wide.get() + n * size,
            std::min(TILE_OUTPUTS, count - n), out + row * out_stride + start + n, out_stride);
  }
}

}  // namespace decodegrid
