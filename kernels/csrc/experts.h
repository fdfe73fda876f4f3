// What the two expert kernels share: pairs by expert, the clamped SwiGLU, and products by torch.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace decodegrid {

// hidden[0 .. inner) = silu(min(gate, limit)) * clamp(up, -limit, limit) * scale; joined: gate, up.
inline void scaled_swiglu(
    const float* joined, int64_t inner, float limit, float scale, float* hidden) {
  for (int64_t i = 0; i < inner; ++i) {
    const float gate = joined[i] > limit ? limit : joined[i];
    float up = joined[inner + i];
    up = up > limit ? limit : (up < -limit ? -limit : up);
    hidden[i] = gate / (1.0f + std::exp(-gate)) * up * scale;
  }
}

// Pairs (token * top_k + rank) of every expert, in the order of the tokens.
inline std::vector<std::vector<int64_t>> pairs_by_expert(
    const at::Tensor& ids_in, int64_t experts) {
  const at::Tensor ids = ids_in.contiguous();
  const int64_t* chosen = ids.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> pairs(experts);
  for (int64_t pair = 0; pair < ids.numel(); ++pair)
    if (chosen[pair] >= 0 && chosen[pair] < experts) pairs[chosen[pair]].push_back(pair);
  return pairs;
}

// The experts' sum by the library's products. first_of and second_of give a visited expert's
// matrices (D, 2 * I) and (I, D) in the tokens' type.
template <typename First, typename Second>
at::Tensor gathered_experts(
    const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, int64_t experts,
    double limit, const First& first_of, const Second& second_of) {
  const auto own = x.scalar_type(), wide = c10::promoteTypes(own, at::kFloat);
  const int64_t top_k = ids.size(1);
  at::Tensor out = at::zeros(x.sizes(), x.options().dtype(wide));
  const at::Tensor flat_weights = weights.reshape({-1, 1});
  const auto pairs = pairs_by_expert(ids, experts);
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (pairs[expert].empty()) continue;
    const at::Tensor pair = at::tensor(pairs[expert], ids.options());
    const at::Tensor token = pair.floor_divide(top_k);
    const auto halves = at::mm(x.index_select(0, token), first_of(expert)).to(wide).chunk(2, 1);
    const at::Tensor gate = halves[0].clamp_max(limit);
    const at::Tensor up = halves[1].clamp(-limit, limit);
    const at::Tensor scale = flat_weights.index_select(0, pair);
    const at::Tensor hidden = at::silu(gate).mul(up).mul(scale);
    out.index_add_(0, token, at::mm(hidden.to(own), second_of(expert)).to(wide));
  }
  return out;
}

}  // namespace decodegrid
