// decodegrid::routed_experts on the CPU. Semantics: kernels/moe.py, routed_experts.
//
// A handful of (token, expert) pairs is bound by reading the experts' weights: each pair streams
// its expert once. Larger batches gather the tokens of each expert and take the library's product,
// which reads an expert once for all its tokens. Work is (tokens x experts per token) either way.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

namespace {

constexpr int64_t MAX_PAIRS = 64;

// out[0 .. columns) = x . weight, weight (rows, columns) row-major.
void vector_matrix(
    const float* x, const float* weight, float* out, int64_t rows, int64_t columns) {
  constexpr int64_t TILE = 64;
  for (int64_t first = 0; first < columns; first += TILE) {
    const int64_t width = columns - first < TILE ? columns - first : TILE;
    float sum[TILE] = {0};
    if (width == TILE) {
      for (int64_t row = 0; row < rows; ++row) {
        const float value = x[row];
        const float* line = weight + row * columns + first;
        for (int64_t j = 0; j < TILE; ++j) sum[j] += value * line[j];
      }
    } else {
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t j = 0; j < width; ++j) sum[j] += x[row] * weight[row * columns + first + j];
    }
    for (int64_t j = 0; j < width; ++j) out[first + j] = sum[j];
  }
}

at::Tensor stream_pairs(
    const at::Tensor& x_in, const at::Tensor& ids_in, const at::Tensor& weights_in,
    const at::Tensor& w13, const at::Tensor& w2, double limit_in) {
  const at::Tensor x = x_in.contiguous(), ids = ids_in.contiguous();
  const at::Tensor weights = weights_in.contiguous();
  const int64_t tokens = x.size(0), top_k = ids.size(1), experts = w13.size(0);
  const int64_t dim = x.size(1), inner = w2.size(1);
  const float limit = static_cast<float>(limit_in);
  at::Tensor out = at::zeros({tokens, dim}, x.options());
  const float* source = x.const_data_ptr<float>();
  const int64_t* chosen = ids.const_data_ptr<int64_t>();
  const float* scales = weights.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  std::vector<float> joined(2 * inner), hidden(inner), part(dim);
  for (int64_t pair = 0; pair < tokens * top_k; ++pair) {
    const int64_t expert = chosen[pair], token = pair / top_k;
    if (expert < 0 || expert >= experts) continue;
    const float* first = w13.const_data_ptr<float>() + expert * dim * 2 * inner;
    vector_matrix(source + token * dim, first, joined.data(), dim, 2 * inner);
    for (int64_t i = 0; i < inner; ++i) {
      const float gate = joined[i] > limit ? limit : joined[i];
      float up = joined[inner + i];
      up = up > limit ? limit : (up < -limit ? -limit : up);
      hidden[i] = gate / (1.0f + std::exp(-gate)) * up * scales[pair];
    }
    const float* second = w2.const_data_ptr<float>() + expert * inner * dim;
    vector_matrix(hidden.data(), second, part.data(), inner, dim);
    for (int64_t d = 0; d < dim; ++d) target[token * dim + d] += part[d];
  }
  return out;
}

at::Tensor routed_experts(
    const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& w13,
    const at::Tensor& w2, double limit) {
  if (x.scalar_type() == at::kFloat && ids.numel() <= MAX_PAIRS && w13.is_contiguous() &&
      w2.is_contiguous())
    return stream_pairs(x, ids, weights, w13, w2, limit);
  const auto wide = c10::promoteTypes(x.scalar_type(), at::kFloat);
  const int64_t tokens = x.size(0), top_k = ids.size(1), experts = w13.size(0);
  at::Tensor out = at::zeros(x.sizes(), x.options().dtype(wide));
  const at::Tensor flat_ids = ids.contiguous();
  const at::Tensor flat_weights = weights.reshape({-1, 1});
  std::vector<std::vector<int64_t>> pairs(experts);
  const int64_t* chosen = flat_ids.const_data_ptr<int64_t>();
  for (int64_t pair = 0; pair < tokens * top_k; ++pair)
    if (chosen[pair] >= 0 && chosen[pair] < experts) pairs[chosen[pair]].push_back(pair);
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (pairs[expert].empty()) continue;
    const at::Tensor pair = at::tensor(pairs[expert], ids.options());
    const at::Tensor token = pair.floor_divide(top_k);
    const auto halves = at::mm(x.index_select(0, token), w13[expert]).to(wide).chunk(2, 1);
    const at::Tensor gate = halves[0].clamp_max(limit);
    const at::Tensor up = halves[1].clamp(-limit, limit);
    const at::Tensor scale = flat_weights.index_select(0, pair);
    const at::Tensor hidden = at::silu(gate).mul(up).mul(scale);
    out.index_add_(0, token, at::mm(hidden.to(x.scalar_type()), w2[expert]).to(wide));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("routed_experts", routed_experts); }
