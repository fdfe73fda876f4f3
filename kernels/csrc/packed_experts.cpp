// decodegrid::packed_experts on the CPU. Semantics: kernels/packed.py, packed_experts.
//
// Only experts that a token visits are decoded, each of their weight rows once. float32 tokens take
// their products from the first caches, and a token's result has the same bits whatever tokens are
// beside it; other types expand one visited expert at a time and take the library's product.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bf16_rows.h"
#include "experts.h"
#include "packed_values.h"

namespace {

using decodegrid::SCALE_BLOCK;

// One matrix (outputs, columns) per expert, as dense E2M1 codes and scales.
struct Stack {
  at::Tensor codes_held, scales_held;
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t outputs, columns;

  Stack(const at::Tensor& codes_in, const at::Tensor& scales_in)
      : codes_held(codes_in.contiguous()), scales_held(scales_in.contiguous()),
        codes(codes_held.const_data_ptr<uint8_t>()), scales(scales_held.const_data_ptr<uint8_t>()),
        outputs(codes_held.size(1)), columns(2 * codes_held.size(2)) {}

  // In the order of pack_row.
  void decode(int64_t expert, int64_t n, float* target) const {
    const int64_t row = expert * outputs + n;
    decodegrid::decode_e2m1_row(
        codes + row * columns / 2, scales + row * columns / SCALE_BLOCK, columns, target);
  }

  // (columns, outputs) in `type`.
  at::Tensor expanded(int64_t expert, at::ScalarType type) const {
    at::Tensor out = at::empty({outputs, columns}, codes_held.options().dtype(at::kFloat));
    float* target = out.mutable_data_ptr<float>();
    std::vector<float> split(columns);
    for (int64_t n = 0; n < outputs; ++n, target += columns) {
      decode(expert, n, split.data());
      for (int64_t k = 0; k < columns; ++k)
        target[k] = split[k / 16 * 16 + k % 2 * 8 + k % 16 / 2];
    }
    return out.to(type).t();
  }
};

at::Tensor float_experts(
    const at::Tensor& x_in, const at::Tensor& ids, const at::Tensor& weights_in,
    const Stack& first, const Stack& second, int64_t experts, float limit) {
  const at::Tensor x = x_in.contiguous(), weights = weights_in.contiguous();
  const int64_t top_k = ids.size(1), dim = first.columns, inner = second.columns;
  at::Tensor out = at::zeros(x.sizes(), x.options());
  const float* source = x.const_data_ptr<float>();
  const float* scales = weights.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  const auto pairs = decodegrid::pairs_by_expert(ids, experts);
  std::vector<float> rows, joined, hidden(inner), packed, part;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t count = static_cast<int64_t>(pairs[expert].size());
    if (count == 0) continue;
    const int64_t* pair = pairs[expert].data();
    // `columns` are multiples of SCALE_BLOCK, so a packed row has no padding.
    rows.resize(count * dim);
    joined.resize(count * 2 * inner);
    packed.resize(count * inner);
    part.resize(count * dim);
    for (int64_t r = 0; r < count; ++r)
      decodegrid::pack_row(source + pair[r] / top_k * dim, dim, &rows[r * dim]);
    decodegrid::decoded_product(
        rows.data(), count, dim, 2 * inner,
        [&](int64_t n, float* row) { first.decode(expert, n, row); }, joined.data(), 2 * inner);
    for (int64_t r = 0; r < count; ++r) {
      decodegrid::scaled_swiglu(
          &joined[r * 2 * inner], inner, limit, scales[pair[r]], hidden.data());
      decodegrid::pack_row(hidden.data(), inner, &packed[r * inner]);
    }
    decodegrid::decoded_product(
        packed.data(), count, inner, dim,
        [&](int64_t n, float* row) { second.decode(expert, n, row); }, part.data(), dim);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t d = 0; d < dim; ++d) target[pair[r] / top_k * dim + d] += part[r * dim + d];
  }
  return out;
}

bool is_stack(const at::Tensor& codes, const at::Tensor& scales) {
  return codes.dim() == 3 && scales.dim() == 3 && codes.size(0) == scales.size(0) &&
      codes.size(1) == scales.size(1) && 2 * codes.size(2) == SCALE_BLOCK * scales.size(2);
}

at::Tensor packed_experts(
    const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
    const at::Tensor& w13_codes, const at::Tensor& w13_scales, const at::Tensor& w2_codes,
    const at::Tensor& w2_scales, double limit) {
  TORCH_CHECK(
      x.dim() == 2 && ids.dim() == 2 && weights.sizes() == ids.sizes() &&
          ids.size(0) == x.size(0) && is_stack(w13_codes, w13_scales) &&
          is_stack(w2_codes, w2_scales) && w13_codes.size(0) == w2_codes.size(0) &&
          x.size(1) == 2 * w13_codes.size(2) && w2_codes.size(1) == x.size(1) &&
          w13_codes.size(1) == 4 * w2_codes.size(2),
      "packed_experts: x ", x.sizes(), ", ids ", ids.sizes(), ", w13 ", w13_codes.sizes(), " and ",
      w13_scales.sizes(), ", w2 ", w2_codes.sizes(), " and ", w2_scales.sizes(),
      ", allowed (T, D), (T, k), (E, 2 * I, D / 2), (E, 2 * I, D / 32), (E, D, I / 2) and (E, D, "
      "I / 32)");
  const Stack first(w13_codes, w13_scales), second(w2_codes, w2_scales);
  const int64_t experts = w13_codes.size(0);
  if (x.scalar_type() == at::kFloat)
    return float_experts(
        x, ids, weights, first, second, experts, static_cast<float>(limit));
  const auto own = x.scalar_type();
  return decodegrid::gathered_experts(
      x, ids, weights, experts, limit,
      [&](int64_t expert) { return first.expanded(expert, own); },
      [&](int64_t expert) { return second.expanded(expert, own); });
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("packed_experts", packed_experts); }
