// decodegrid::routed_experts on the CPU. Semantics: kernels/moe.py, routed_experts.
//
// float32 tokens with bfloat16 weights read each visited expert once, at half the bytes, and widen
// it in registers; a token's result has the same bits whatever tokens are beside it. With weights
// of the tokens' own type, a handful of (token, expert) pairs streams its expert once a pair, and
// larger batches gather the tokens of each expert and take the library's product. Work is (tokens x
// experts per token) in every way.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bf16_rows.h"

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

// hidden[0 .. inner) = silu(min(gate, limit)) * clamp(up, -limit, limit) * scale; joined: gate, up.
void scaled_swiglu(const float* joined, int64_t inner, float limit, float scale, float* hidden) {
  for (int64_t i = 0; i < inner; ++i) {
    const float gate = joined[i] > limit ? limit : joined[i];
    float up = joined[inner + i];
    up = up > limit ? limit : (up < -limit ? -limit : up);
    hidden[i] = gate / (1.0f + std::exp(-gate)) * up * scale;
  }
}

// Pairs (token * top_k + rank) of every expert, in the order of the tokens.
std::vector<std::vector<int64_t>> pairs_by_expert(const at::Tensor& ids_in, int64_t experts) {
  const at::Tensor ids = ids_in.contiguous();
  const int64_t* chosen = ids.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> pairs(experts);
  for (int64_t pair = 0; pair < ids.numel(); ++pair)
    if (chosen[pair] >= 0 && chosen[pair] < experts) pairs[chosen[pair]].push_back(pair);
  return pairs;
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
  const auto pairs = pairs_by_expert(ids, experts);
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
        scaled_swiglu(
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
    scaled_swiglu(joined.data(), inner, limit, scales[pair], hidden.data());
    const float* second = w2.const_data_ptr<float>() + expert * inner * dim;
    vector_matrix(hidden.data(), second, part.data(), inner, dim);
    for (int64_t d = 0; d < dim; ++d) target[token * dim + d] += part[d];
  }
  return out;
}

at::Tensor gathered_experts(
    const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& w13,
    const at::Tensor& w2, double limit) {
  const auto own = x.scalar_type(), wide = c10::promoteTypes(own, at::kFloat);
  const int64_t top_k = ids.size(1), experts = w13.size(0);
  at::Tensor out = at::zeros(x.sizes(), x.options().dtype(wide));
  const at::Tensor flat_weights = weights.reshape({-1, 1});
  const auto pairs = pairs_by_expert(ids, experts);
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (pairs[expert].empty()) continue;
    const at::Tensor pair = at::tensor(pairs[expert], ids.options());
    const at::Tensor token = pair.floor_divide(top_k);
    const at::Tensor first = w13[expert].to(own), second = w2[expert].to(own);
    const auto halves = at::mm(x.index_select(0, token), first).to(wide).chunk(2, 1);
    const at::Tensor gate = halves[0].clamp_max(limit);
    const at::Tensor up = halves[1].clamp(-limit, limit);
    const at::Tensor scale = flat_weights.index_select(0, pair);
    const at::Tensor hidden = at::silu(gate).mul(up).mul(scale);
    out.index_add_(0, token, at::mm(hidden.to(own), second).to(wide));
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
  return gathered_experts(x, ids, weights, w13, w2, limit);
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("routed_experts", routed_experts); }
