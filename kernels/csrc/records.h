// Values of cache records: data bytes, then scale bytes. Semantics: kernels/records.py.

#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace decodegrid {

enum RecordFormat : int64_t { kQ8 = 0, kQ4n = 1, kQ4x = 2 };

inline int64_t scale_block(int64_t format) { return format == kQ4n ? 16 : 32; }

inline int64_t record_data_bytes(int64_t format, int64_t dim) {
  return format == kQ8 ? dim : dim / 2;
}

inline int64_t record_bytes(int64_t format, int64_t dim) {
  return record_data_bytes(format, dim) + dim / scale_block(format);
}

inline constexpr std::array<float, 16> kE2m1 = {
    0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

constexpr float e4m3_value(uint32_t code) {
  const uint32_t exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
  // Units of the last place: 2^-9 below the first normal, 2^(exponent - 10) from there on.
  const uint32_t unit_exponent = exponent == 0 ? 118 : exponent + 117;
  const float unit = std::bit_cast<float>(unit_exponent << 23);
  const float magnitude = static_cast<float>(exponent == 0 ? mantissa : mantissa + 8) * unit;
  return code & 128 ? -magnitude : magnitude;
}

constexpr std::array<float, 256> e4m3_values() {
  std::array<float, 256> values{};
  for (uint32_t code = 0; code < 256; ++code) values[code] = e4m3_value(code);
  return values;
}

inline constexpr std::array<float, 256> kE4m3 = e4m3_values();

inline float e8m0_value(uint8_t code) {
  // 2^-127 is subnormal in float32; 255 is NaN.
  if (code == 0) return std::bit_cast<float>(0x00400000u);
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 23);
}

inline float scale_value(int64_t format, uint8_t code) {
  return format == kQ4n ? kE4m3[code] : e8m0_value(code);
}

// Writes the `dim` values of one record. Each is a float32 product, then widened.
template <typename T>
void decode_record(const uint8_t* record, int64_t format, int64_t dim, T* out) {
  const int64_t block = scale_block(format);
  const uint8_t* scales = record + record_data_bytes(format, dim);
  for (int64_t start = 0; start < dim; start += block) {
    const float scale = scale_value(format, *scales++);
    T* values = out + start;
    if (format == kQ8) {
      const uint8_t* codes = record + start;
      for (int64_t i = 0; i < block; ++i) values[i] = static_cast<T>(kE4m3[codes[i]] * scale);
      continue;
    }
    const uint8_t* pairs = record + start / 2;
    for (int64_t i = 0; i < block / 2; ++i) {
      values[2 * i] = static_cast<T>(kE2m1[pairs[i] & 15] * scale);
      values[2 * i + 1] = static_cast<T>(kE2m1[pairs[i] >> 4] * scale);
    }
  }
}

}  // namespace decodegrid
