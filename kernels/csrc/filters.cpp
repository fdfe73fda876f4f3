// decodegrid::filter_logits on the CPU: temperature, then min-p, top-p and top-k over one order.
// Semantics: kernels/filters.py.
//
// A row that filters builds a heap and takes tokens from it in order until a filter is met, so
// that its cost follows the tokens that survive. Other rows are only divided.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr double MIN_TEMPERATURE = 1e-5;

// exp(x) for x <= 0 within 2 ulp; 0 below the normal range, -inf and NaN included. Our own, so that
// the loop vectorises and the bits do not depend on a maths library.
inline double exp_nonpositive(double x) {
  constexpr double LOG2_E = 1.4426950408889634, LN2_HIGH = 6.93147180369123816490e-01,
                   LN2_LOW = 1.90821492927058770002e-10;
  const bool normal = x >= -708.0;
  const double bounded = normal ? x : 0.0;
  const double power = std::floor(bounded * LOG2_E + 0.5);
  const double r = (bounded - power * LN2_HIGH) - power * LN2_LOW;
  // Taylor: |r| <= 0.35, so the term after the last is below 1e-17.
  double sum = 1.0 / 6227020800.0;
  sum = sum * r + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  const int64_t bits = (static_cast<int64_t>(static_cast<int32_t>(power)) + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, 8);
  return normal ? sum * scale : 0.0;
}

template <typename T>
struct Scratch {
  std::vector<T> row;
  std::vector<double> mass;
  std::vector<int64_t> heap;
};

// Masses relative to the peak's; tokens further below it than `floor` count nothing.
template <typename T>
double fill_masses(Scratch<T>& s, int64_t vocab, double peak, double floor) {
  s.mass.resize(vocab);
  for (int64_t i = 0; i < vocab; ++i)
    s.mass[i] = exp_nonpositive(static_cast<double>(s.row[i]) - peak);
  if (floor > -std::numeric_limits<double>::infinity()) {
    for (int64_t i = 0; i < vocab; ++i)
      if (static_cast<double>(s.row[i]) - peak < floor) s.mass[i] = 0.0;
  }
  double lane[8] = {};
  int64_t i = 0;
  for (; i + 8 <= vocab; i += 8)
    for (int j = 0; j < 8; ++j) lane[j] += s.mass[i + j];
  for (; i < vocab; ++i) lane[0] += s.mass[i];
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// `out` holds the scaled row; of the tokens that are not below the peak by more than `floor` says,
// keeps the first `limit` of the order up to the mass `top_p`.
template <typename T>
void filter_row(
    T* out, int64_t vocab, double top_p, int64_t limit, double floor, Scratch<T>& s) {
  constexpr T NEVER = -std::numeric_limits<T>::infinity();
  const bool by_mass = top_p < 1.0;
  const double peak = *std::max_element(out, out + vocab);
  if (!by_mass && limit == vocab) {
    for (int64_t i = 0; i < vocab; ++i)
      if (static_cast<double>(out[i]) - peak < floor) out[i] = NEVER;
    return;
  }
  s.row.assign(out, out + vocab);
  const double allowed = by_mass ? top_p * fill_masses(s, vocab, peak, floor) : 0.0;
  s.heap.resize(vocab);
  std::iota(s.heap.begin(), s.heap.end(), int64_t{0});
  const auto later = [row = s.row.data()](int64_t a, int64_t b) {
    return row[a] < row[b] || (row[a] == row[b] && a > b);
  };
  std::make_heap(s.heap.begin(), s.heap.end(), later);
  std::fill(out, out + vocab, NEVER);
  double before = 0.0;
  for (int64_t rank = 0; rank < limit; ++rank) {
    if (rank > 0 && by_mass && before > allowed) break;
    std::pop_heap(s.heap.begin(), s.heap.end() - rank, later);
    const int64_t token = s.heap[vocab - 1 - rank];
    if (rank > 0 && static_cast<double>(s.row[token]) - peak < floor) break;
    out[token] = s.row[token];
    if (by_mass) before += s.mass[token];
  }
}

template <typename T>
void filter(
    const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_p,
    const at::Tensor& top_k, const at::Tensor& min_p, at::Tensor& out) {
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  Scratch<T> scratch;
  for (int64_t row = 0; row < rows; ++row) {
    const double heat = temperature.const_data_ptr<double>()[row];
    const T divisor = heat > 0.0 ? static_cast<T>(std::max(heat, MIN_TEMPERATURE)) : T(1);
    const T* source = logits.const_data_ptr<T>() + row * vocab;
    T* target = out.mutable_data_ptr<T>() + row * vocab;
    for (int64_t i = 0; i < vocab; ++i) target[i] = source[i] / divisor;
    const double mass = top_p.const_data_ptr<double>()[row];
    const int64_t count = top_k.const_data_ptr<int64_t>()[row];
    const int64_t limit = count > 0 && count < vocab ? count : vocab;
    const double share = min_p.const_data_ptr<double>()[row];
    const double floor = share > 0.0 ? std::log(std::min(share, 1.0))
                                     : -std::numeric_limits<double>::infinity();
    if (heat > 0.0 && vocab > 0 && (mass < 1.0 || limit < vocab || share > 0.0))
      filter_row(target, vocab, mass, limit, floor, scratch);
  }
}

at::Tensor filter_logits(
    const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_p,
    const at::Tensor& top_k, const at::Tensor& min_p) {
  TORCH_CHECK(
      logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble,
      "filter_logits: logits are ", logits.scalar_type(), ", allowed are float and double");
  const at::Tensor source = logits.contiguous(), counts = top_k.contiguous();
  const at::Tensor heat = temperature.to(at::kDouble).contiguous();
  const at::Tensor mass = top_p.to(at::kDouble).contiguous();
  const at::Tensor share = min_p.to(at::kDouble).contiguous();
  at::Tensor out = at::empty(logits.sizes(), logits.options());
  const auto run = logits.scalar_type() == at::kDouble ? filter<double> : filter<float>;
  run(source, heat, mass, counts, share, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("filter_logits", filter_logits); }
