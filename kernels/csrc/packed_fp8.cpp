// decodegrid::packed_linear, packed_grouped_linear and packed_rows on the CPU. Semantics:
// kernels/packed.py.
//
// float32 rows decode each weight row once per call and take their products from the first caches;
// a row's result has the same bits whatever rows are beside it. Other types expand the weight and
// take the library's product.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "bf16_rows.h"
#include "packed_values.h"

namespace {

using decodegrid::SCALE_BLOCK;

int64_t num_blocks(int64_t channels) { return (channels + SCALE_BLOCK - 1) / SCALE_BLOCK; }

at::Tensor dense_last(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

// A matrix (outputs, columns) of E4M3 codes with a scale for each tile.
struct Tiles {
  const uint8_t* codes;
  int64_t code_stride;
  const uint8_t* scales;
  int64_t scale_stride;
  int64_t outputs, columns;

  void decode(int64_t n, float* target) const {
    decodegrid::decode_e4m3_row(
        codes + n * code_stride, scales + n / SCALE_BLOCK * scale_stride, columns, target);
  }
};

// codes and scales: two axes, the last one dense.
Tiles tiles_of(const at::Tensor& codes, const at::Tensor& scales) {
  return {codes.const_data_ptr<uint8_t>(), codes.stride(0), scales.const_data_ptr<uint8_t>(),
          scales.stride(0), codes.size(0), codes.size(1)};
}

at::Tensor expanded(const Tiles& tiles, const at::Tensor& like) {
  at::Tensor out = at::empty({tiles.outputs, tiles.columns}, like.options().dtype(at::kFloat));
  float* target = out.mutable_data_ptr<float>();
  for (int64_t n = 0; n < tiles.outputs; ++n) tiles.decode(n, target + n * tiles.columns);
  return out.to(like.scalar_type());
}

// out (rows, outputs) = x (rows, columns) . tiles transposed; packed: room for all rows.
void product(
    const float* x, int64_t x_stride, int64_t rows, const Tiles& tiles, float* packed, float* out,
    int64_t out_stride) {
  const int64_t columns = tiles.columns, size = decodegrid::packed_row_size(columns);
  for (int64_t r = 0; r < rows; ++r) {
    float* target = packed + r * size;
    std::copy_n(x + r * x_stride, columns, target);
    std::fill(target + columns, target + size, 0.0f);
  }
  decodegrid::decoded_product(
      packed, rows, columns, tiles.outputs,
      [&](int64_t n, float* target) { tiles.decode(n, target); }, out, out_stride);
}

std::unique_ptr<float[]> row_buffer(int64_t rows, int64_t columns) {
  // Not value-initialised: every float is written before it is read.
  return std::unique_ptr<float[]>(new float[rows * decodegrid::packed_row_size(columns)]);
}

at::Tensor packed_linear(
    const at::Tensor& x_in, const at::Tensor& codes_in, const at::Tensor& scales_in) {
  TORCH_CHECK(
      x_in.dim() == 2 && codes_in.dim() == 2 && scales_in.dim() == 2 &&
          x_in.size(1) == codes_in.size(1) && scales_in.size(0) == num_blocks(codes_in.size(0)) &&
          scales_in.size(1) == num_blocks(codes_in.size(1)),
      "packed_linear: x ", x_in.sizes(), ", codes ", codes_in.sizes(), " and scales ",
      scales_in.sizes(), ", allowed (T, K), (N, K) and (N / 32, K / 32)");
  const at::Tensor codes = dense_last(codes_in), scales = dense_last(scales_in);
  const Tiles tiles = tiles_of(codes, scales);
  if (x_in.scalar_type() != at::kFloat) return at::linear(x_in, expanded(tiles, x_in));
  const at::Tensor x = dense_last(x_in);
  const int64_t rows = x.size(0);
  at::Tensor out = at::empty({rows, tiles.outputs}, x.options());
  const auto packed = row_buffer(rows, tiles.columns);
  product(
      x.const_data_ptr<float>(), x.stride(0), rows, tiles, packed.get(),
      out.mutable_data_ptr<float>(), tiles.outputs);
  return out;
}

at::Tensor packed_grouped_linear(
    const at::Tensor& x_in, const at::Tensor& codes_in, const at::Tensor& scales_in) {
  TORCH_CHECK(
      x_in.dim() == 3 && codes_in.dim() == 3 && scales_in.dim() == 3 &&
          x_in.size(1) == codes_in.size(0) && x_in.size(2) == codes_in.size(2) &&
          scales_in.size(0) == codes_in.size(0) &&
          scales_in.size(1) == num_blocks(codes_in.size(1)) &&
          scales_in.size(2) == num_blocks(codes_in.size(2)),
      "packed_grouped_linear: x ", x_in.sizes(), ", codes ", codes_in.sizes(), " and scales ",
      scales_in.sizes(), ", allowed (T, G, K), (G, N, K) and (G, N / 32, K / 32)");
  const at::Tensor x = dense_last(x_in);
  const at::Tensor codes = dense_last(codes_in), scales = dense_last(scales_in);
  const int64_t rows = x.size(0), groups = x.size(1), outputs = codes.size(1);
  at::Tensor out = at::empty({rows, groups, outputs}, x.options());
  const bool is_float = x.scalar_type() == at::kFloat;
  const auto packed = row_buffer(is_float ? rows : 0, x.size(2));
  for (int64_t group = 0; group < groups; ++group) {
    const at::Tensor group_codes = codes[group], group_scales = scales[group];
    const Tiles tiles = tiles_of(group_codes, group_scales);
    if (!is_float) {
      out.select(1, group).copy_(at::linear(x.select(1, group), expanded(tiles, x)));
      continue;
    }
    product(
        x.const_data_ptr<float>() + group * x.stride(1), x.stride(0), rows, tiles, packed.get(),
        out.mutable_data_ptr<float>() + group * outputs, groups * outputs);
  }
  return out;
}

at::Tensor packed_rows(
    const at::Tensor& index_in, const at::Tensor& codes_in, const at::Tensor& scales_in) {
  TORCH_CHECK(
      codes_in.dim() == 2 && scales_in.dim() == 2 && codes_in.size(0) == scales_in.size(0) &&
          codes_in.size(1) == scales_in.size(1) * SCALE_BLOCK,
      "packed_rows: codes ", codes_in.sizes(), " and scales ", scales_in.sizes(),
      ", allowed (R, D) and (R, D / 32)");
  // Only rows that are asked for are touched: the table may be far larger than memory.
  TORCH_CHECK(
      dense_last(codes_in).is_same(codes_in) && dense_last(scales_in).is_same(scales_in),
      "packed_rows: the last axis of codes and scales must be dense");
  const at::Tensor index = index_in.contiguous();
  const int64_t rows = codes_in.size(0), dim = codes_in.size(1);
  auto sizes = index.sizes().vec();
  sizes.push_back(dim);
  at::Tensor out = at::empty(sizes, codes_in.options().dtype(at::kFloat));
  const int64_t* wanted = index.const_data_ptr<int64_t>();
  const uint8_t* codes = codes_in.const_data_ptr<uint8_t>();
  const uint8_t* scales = scales_in.const_data_ptr<uint8_t>();
  float* target = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < index.numel(); ++i) {
    const int64_t row = wanted[i];
    TORCH_CHECK(row >= 0 && row < rows, "packed_rows: row ", row, " of a table of ", rows);
    decodegrid::decode_e4m3_row(
        codes + row * codes_in.stride(0), scales + row * scales_in.stride(0), dim,
        target + i * dim);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) {
  library.impl("packed_linear", packed_linear);
  library.impl("packed_grouped_linear", packed_grouped_linear);
  library.impl("packed_rows", packed_rows);
}
