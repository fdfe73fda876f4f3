// decodegrid::routed_experts on the CPU. Semantics: kernels/moe.py, routed_experts.
//
// float32 tokens with bfloat16 weights read each visited expert once, at half the bytes, and widen
// it in registers; a token's result has the same bits whatever tokens are beside it. With weights
// of the tokens' own type, a handful of (token, expert) pairs streams its expert once a pair, and
// larger batches gather the tokens of each expert and take the library's product. Work is (tokens x
// experts per token) in every way.

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "bf16_rows.h"
#include "experts.h"

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

// Shapes of one expert product, and buffers for a chunk of its tokens.
struct Chunk {
  int64_t dim, inner, limit_rows;
  std::vector<float> rows, joined, hidden, packed, part;

  Chunk(int64_t dim, int64_t inner, int64_t tokens)
      : dim(dim), inner(inner),
        limit_rows(std::min(decodegrid::rows_per_chunk(std::max(dim, inner)), tokens)),
        rows(limit_rows * decodegrid::packed_row_size(dim)), joined(limit_rows * 2 * inner),
        hidden(inner), packed(limit_rows * decodegrid::packed_row_size(inner)),
        part(limit_rows * dim) {}
};

const uint16_t* bits(const at::Tensor& weight) {
  return reinterpret_cast<const uint16_t*>(weight.const_data_ptr<at::BFloat16>());
}

// w13 (E, 2 * I, D) and w2 (E, D, I), both dense: an output's weights side by side.
at::Tensor widened_experts(
    const at::Tensor& x_in, const at::Tensor& ids, const at::Tensor& weights_in,
    const at::Tensor& w13, const at::Tensor& w2, double limit) {
  const at::Tensor x = x_in.contiguous(), weights = weights_in.contiguous();
  const int64_t experts = w13.size(0), top_k = ids.size(1), dim = w13.size(2), inner = w2.size(2);
  at::Tensor out = at::zeros(x.sizes(), x.options());
  const float* source = x.const_data_ptr<float>();
  const float* scales = weights.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  Chunk chunk(dim, inner, x.size(0));
  const int64_t row_size = decodegrid::packed_row_size(dim);
  const int64_t hidden_size = decodegrid::packed_row_size(inner);
  const auto pairs = decodegrid::pairs_by_expert(ids, experts);
  for (int64_t expert = 0; expert < experts; ++expert) {
    const uint16_t* first = bits(w13) + expert * 2 * inner * dim;
    const uint16_t* second = bits(w2) + expert * dim * inner;
    const int64_t total = static_cast<int64_t>(pairs[expert].size());
    for (int64_t start = 0; start < total; start += chunk.limit_rows) {
      const int64_t count = std::min(chunk.limit_rows, total - start);
      const int64_t* pair = pairs[expert].data() + start;
      for (int64_t r = 0; r < count; ++r)
        decodegrid::pack_row(source + pair[r] / top_k * dim, dim, &chunk.rows[r * row_size]);
      decodegrid::rows_product(
          chunk.rows.data(), count, dim, first, dim, 2 * inner, chunk.joined.data(), 2 * inner);
      for (int64_t r = 0; r < count; ++r) {
        decodegrid::scaled_swiglu(
            &chunk.joined[r * 2 * inner], inner, static_cast<float>(limit), scales[pair[r]],
            chunk.hidden.data());
        decodegrid::pack_row(chunk.hidden.data(), inner, &chunk.packed[r * hidden_size]);
      }
      decodegrid::rows_product(
          chunk.packed.data(), count, inner, second, inner, dim, chunk.part.data(), dim);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t d = 0; d < dim; ++d)
          target[pair[r] / top_k * dim + d] += chunk.part[r * dim + d];
    }
  }
  return out;
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
    decodegrid::scaled_swiglu(joined.data(), inner, limit, scales[pair], hidden.data());
    const float* second = w2.const_data_ptr<float>() + expert * inner * dim;
    vector_matrix(hidden.data(), second, part.data(), inner, dim);
    for (int64_t d = 0; d < dim; ++d) target[token * dim + d] += part[d];
  }
  return out;
}

at::Tensor routed_experts(
    const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& w13,
    const at::Tensor& w2, double limit) {
  if (x.scalar_type() == at::kFloat && w13.scalar_type() == at::kBFloat16 &&
      w2.scalar_type() == at::kBFloat16)
    return widened_experts(
        x, ids, weights, w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous(), limit);
  if (x.scalar_type() == at::kFloat && w13.scalar_type() == at::kFloat &&
      w2.scalar_type() == at::kFloat && ids.numel() <= MAX_PAIRS && w13.is_contiguous() &&
      w2.is_contiguous())
    return stream_pairs(x, ids, weights, w13, w2, limit);
  const auto own = x.scalar_type();
  return decodegrid::gathered_experts(
      x, ids, weights, w13.size(0), limit, [&](int64_t expert) { return w13[expert].to(own); },
      [&](int64_t expert) { return w2[expert].to(own); });
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("routed_experts", routed_experts); }
