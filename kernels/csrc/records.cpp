// decodegrid::encode_records, take_records and round_records on the CPU. Semantics, to the bit:
// kernels/records.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Float8_e4m3fn.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "records.h"

namespace {

using decodegrid::decode_record;
using decodegrid::kQ4n;
using decodegrid::kQ8;

constexpr float kE4m3Max = 448.0f, kE2m1Max = 6.0f;
constexpr float kQ8Floor = 1e-4f, kQ4xFloor = 0x1.8p-124f, kQ4nFloor = 0x1.8p-7f;

uint8_t encode_e4m3(float value) {
  // A NaN passes std::clamp, as it passes torch's.
  return c10::Float8_e4m3fn(std::clamp(value, -kE4m3Max, kE4m3Max)).x;
}

// Ties go to the even code; what rounds to zero keeps its sign.
uint8_t encode_e2m1(float value) {
  const float m = std::fabs(value);
  const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                   (m >= 3.5f) + (m > 5.0f);
  return static_cast<uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

// Largest magnitude, at least `floor`. As integers, magnitudes order with NaN on top.
float largest(const float* values, int64_t count, float floor) {
  uint32_t top = std::bit_cast<uint32_t>(floor);
  for (int64_t i = 0; i < count; ++i)
    top = std::max(top, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  return std::bit_cast<float>(top);
}

// E8M0 byte of 2^ceil(log2(scaled)), by exponent field and mantissa.
uint8_t power_of_two(float scaled) {
  const uint32_t bits = std::bit_cast<uint32_t>(scaled);
  return static_cast<uint8_t>((bits >> 23) + ((bits & 0x7fffffu) != 0));
}

uint8_t encode_scale(const float* values, int64_t format, int64_t block) {
  // Reciprocals are rounded to float32 first, as the released kernels do.
  if (format == kQ8)
    return power_of_two(largest(values, block, kQ8Floor) * static_cast<float>(1.0 / kE4m3Max));
  if (format == kQ4n) return encode_e4m3(largest(values, block, kQ4nFloor) / kE2m1Max);
  return power_of_two(largest(values, block, kQ4xFloor) * static_cast<float>(1.0 / kE2m1Max));
}

void encode_record(const float* x, int64_t format, int64_t dim, uint8_t* record) {
  const int64_t block = decodegrid::scale_block(format);
  uint8_t* scales = record + decodegrid::record_data_bytes(format, dim);
  for (int64_t start = 0; start < dim; start += block) {
    const float* values = x + start;
    const uint8_t code = encode_scale(values, format, block);
    const float scale = decodegrid::scale_value(format, code);
    *scales++ = code;
    if (format == kQ8) {
      for (int64_t i = 0; i < block; ++i) record[start + i] = encode_e4m3(values[i] / scale);
      continue;
    }
    for (int64_t i = 0; i < block; i += 2)
      record[(start + i) / 2] = static_cast<uint8_t>(
          encode_e2m1(values[i] / scale) | (encode_e2m1(values[i + 1] / scale) << 4));
  }
}

void check_format(int64_t format, int64_t dim, const char* op) {
  TORCH_CHECK(format >= 0 && format <= 2, op, ": format ", format, ", allowed 0..2");
  TORCH_CHECK(
      dim > 0 && dim % 32 == 0, op, ": ", dim, " channels, allowed are multiples of 32");
}

at::Tensor encode_records(const at::Tensor& x_in, int64_t format) {
  const int64_t dim = x_in.size(-1), width = decodegrid::record_bytes(format, dim);
  check_format(format, dim, "encode_records");
  const at::Tensor x = x_in.to(at::kFloat).contiguous();
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  at::Tensor records = at::empty(sizes, x.options().dtype(at::kByte));
  const float* from = x.const_data_ptr<float>();
  uint8_t* to = records.mutable_data_ptr<uint8_t>();
  const int64_t rows = x.numel() / dim;
  for (int64_t row = 0; row < rows; ++row)
    encode_record(from + row * dim, format, dim, to + row * width);
  return records;
}

template <typename T>
void take(
    const at::Tensor& records, const at::Tensor& index, int64_t format, int64_t dim, T* out) {
  const uint8_t* from = records.const_data_ptr<uint8_t>();
  const int64_t* wanted = index.const_data_ptr<int64_t>();
  const int64_t count = index.numel(), rows = records.size(0), step = records.stride(0);
  for (int64_t i = 0; i < count; ++i, out += dim) {
    const int64_t row = wanted[i];
    TORCH_CHECK_INDEX(row < rows, "take_records: row ", row, " of ", rows);
    if (row < 0)
      std::fill_n(out, dim, T(0));
    else
      decode_record(from + row * step, format, dim, out);
  }
}

at::Tensor take_records(
    const at::Tensor& records_in, const at::Tensor& index_in, int64_t format, int64_t dim,
    at::ScalarType dtype) {
  check_format(format, dim, "take_records");
  TORCH_CHECK(
      records_in.dim() == 2 && records_in.size(1) == decodegrid::record_bytes(format, dim),
      "take_records: records ", records_in.sizes(), ", allowed (rows, ",
      decodegrid::record_bytes(format, dim), ")");
  const at::Tensor records = records_in.stride(1) == 1 ? records_in : records_in.contiguous();
  const at::Tensor index = index_in.contiguous();
  std::vector<int64_t> sizes = index.sizes().vec();
  sizes.push_back(dim);
  const bool wide = dtype == at::kDouble;
  at::Tensor out = at::empty(sizes, records.options().dtype(wide ? at::kDouble : at::kFloat));
  if (wide)
    take(records, index, format, dim, out.mutable_data_ptr<double>());
  else
    take(records, index, format, dim, out.mutable_data_ptr<float>());
  return out.to(dtype);
}

template <typename T>
void round_rows(const at::Tensor& x, int64_t format, int64_t dim, T* out) {
  std::vector<uint8_t> record(decodegrid::record_bytes(format, dim));
  const float* from = x.const_data_ptr<float>();
  const int64_t rows = x.numel() / dim;
  for (int64_t row = 0; row < rows; ++row) {
    encode_record(from + row * dim, format, dim, record.data());
    decode_record(record.data(), format, dim, out + row * dim);
  }
}

at::Tensor round_records(const at::Tensor& x_in, int64_t format) {
  const int64_t dim = x_in.size(-1);
  check_format(format, dim, "round_records");
  const at::Tensor x = x_in.to(at::kFloat).contiguous();
  const bool wide = x_in.scalar_type() == at::kDouble;
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(wide ? at::kDouble : at::kFloat));
  if (wide)
    round_rows(x, format, dim, out.mutable_data_ptr<double>());
  else
    round_rows(x, format, dim, out.mutable_data_ptr<float>());
  return out.to(x_in.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) {
  library.impl("encode_records", encode_records);
  library.impl("take_records", take_records);
  library.impl("round_records", round_records);
}
