// decodegrid::linear and decodegrid::grouped_linear on the CPU. Semantics: kernels/linear.py.
//
// float32 rows with a bfloat16 weight stream the weight at half the bytes and widen it in
// registers; a row's result has the same bits whatever rows are beside it. Every other pair of
// types is the library's product.

#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "bf16_rows.h"

namespace {

// out (rows, outputs) = x (rows, columns) . weight (outputs, columns) transposed, for one group.
void widened_product(
    const float* x, int64_t x_stride, int64_t rows, int64_t columns, const uint16_t* weight,
    int64_t weight_stride, int64_t outputs, float* packed, float* out, int64_t out_stride) {
  const int64_t chunk = decodegrid::rows_per_chunk(columns);
  const int64_t size = decodegrid::packed_row_size(columns);
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t count = std::min(chunk, rows - first);
    for (int64_t r = 0; r < count; ++r)
      decodegrid::pack_row(x + (first + r) * x_stride, columns, packed + r * size);
    decodegrid::rows_product(
        packed, count, columns, weight, weight_stride, outputs, out + first * out_stride,
        out_stride);
  }
}

std::unique_ptr<float[]> chunk_buffer(int64_t rows, int64_t columns) {
  const int64_t count = std::min(rows, decodegrid::rows_per_chunk(columns));
  // Not value-initialised: every float is written before it is read.
  return std::unique_ptr<float[]>(new float[count * decodegrid::packed_row_size(columns)]);
}

const uint16_t* bits(const at::Tensor& weight) {
  return reinterpret_cast<const uint16_t*>(weight.const_data_ptr<at::BFloat16>());
}

bool is_widened(const at::Tensor& x, const at::Tensor& weight) {
  return x.scalar_type() == at::kFloat && weight.scalar_type() == at::kBFloat16;
}

at::Tensor dense_last(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

at::Tensor linear(const at::Tensor& x_in, const at::Tensor& weight_in) {
  TORCH_CHECK(
      x_in.dim() == 2 && weight_in.dim() == 2 && x_in.size(1) == weight_in.size(1), "linear: x ",
      x_in.sizes(), " and weight ", weight_in.sizes(), ", allowed (T, K) and (N, K)");
  if (!is_widened(x_in, weight_in)) return at::linear(x_in, weight_in.to(x_in.scalar_type()));
  const at::Tensor x = dense_last(x_in), weight = dense_last(weight_in);
  const int64_t rows = x.size(0), columns = x.size(1), outputs = weight.size(0);
  at::Tensor out = at::empty({rows, outputs}, x.options());
  const auto packed = chunk_buffer(rows, columns);
  widened_product(
      x.const_data_ptr<float>(), x.stride(0), rows, columns, bits(weight), weight.stride(0),
      outputs, packed.get(), out.mutable_data_ptr<float>(), outputs);
  return out;
}

at::Tensor grouped_linear(const at::Tensor& x_in, const at::Tensor& weight_in) {
  TORCH_CHECK(
      x_in.dim() == 3 && weight_in.dim() == 3 && x_in.size(1) == weight_in.size(0) &&
          x_in.size(2) == weight_in.size(2),
      "grouped_linear: x ", x_in.sizes(), " and weight ", weight_in.sizes(),
      ", allowed (T, G, K) and (G, N, K)");
  if (!is_widened(x_in, weight_in)) {
    const at::Tensor weight = weight_in.to(x_in.scalar_type()).transpose(1, 2);
    return at::bmm(x_in.transpose(0, 1), weight).transpose(0, 1).contiguous();
  }
  const at::Tensor x = dense_last(x_in), weight = dense_last(weight_in);
  const int64_t rows = x.size(0), groups = x.size(1), columns = x.size(2);
  const int64_t outputs = weight.size(1);
  at::Tensor out = at::empty({rows, groups, outputs}, x.options());
  const auto packed = chunk_buffer(rows, columns);
  for (int64_t group = 0; group < groups; ++group)
    widened_product(
        x.const_data_ptr<float>() + group * x.stride(1), x.stride(0), rows, columns,
        bits(weight) + group * weight.stride(0), weight.stride(1), outputs, packed.get(),
        out.mutable_data_ptr<float>() + group * outputs, groups * outputs);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) {
  library.impl("linear", linear);
  library.impl("grouped_linear", grouped_linear);
}
