// decodegrid::top_logits on the CPU. Semantics: kernels/top_logits.py.
//
// One pass over a row with a short sorted list: a later token enters only above the smallest kept
// one, so equal ones stay in the order of their ids.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>

namespace {

template <typename T>
void top_row(const T* row, int64_t vocab, int64_t count, T* values, int64_t* ids) {
  int64_t kept = 0;
  for (int64_t token = 0; token < vocab; ++token) {
    const T value = row[token];
    if (kept == count && !(value > values[kept - 1])) continue;
    int64_t place = kept < count ? kept++ : count - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = token;
  }
}

template <typename T>
void top_rows(
    const at::Tensor& logits, const at::Tensor& wanted, int64_t count, at::Tensor& values,
    at::Tensor& ids) {
  const int64_t vocab = logits.size(1);
  for (int64_t row = 0; row < logits.size(0); ++row)
    if (wanted.const_data_ptr<bool>()[row])
      top_row(
          logits.const_data_ptr<T>() + row * vocab, vocab, count,
          values.mutable_data_ptr<T>() + row * count, ids.mutable_data_ptr<int64_t>() + row * count);
}

std::tuple<at::Tensor, at::Tensor> top_logits(
    const at::Tensor& logits, const at::Tensor& wanted, int64_t count) {
  TORCH_CHECK(
      logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble,
      "top_logits: logits are ", logits.scalar_type(), ", allowed are float and double");
  const at::Tensor source = logits.contiguous(), rows = wanted.contiguous();
  at::Tensor values = at::full(
      {logits.size(0), count}, -std::numeric_limits<double>::infinity(), logits.options());
  at::Tensor ids = at::full({logits.size(0), count}, -1, logits.options().dtype(at::kLong));
  if (count > 0) {
    const auto run = logits.scalar_type() == at::kDouble ? top_rows<double> : top_rows<float>;
    run(source, rows, count, values, ids);
  }
  return {values, ids};
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("top_logits", top_logits); }
