// decodegrid::select_entries on the CPU: index scores, exact top-k and candidate blocks over a
// paged pool. Semantics: kernels/select_entries.py.
//
// Work per token follows its own visible length. Ties go to the lower index by construction: a
// threshold from the k-th largest value, then all above it and the first of those equal to it.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "records.h"

namespace {

template <typename T>
struct Scratch {
  std::vector<T> scores, sorted, best, key;
  std::vector<uint8_t> marks, kept;
};

// The key in one row of a pool of keys, or of records, which are decoded into `space`.
template <typename T>
const T* key_at(const at::Tensor& keys, int64_t row, int64_t dim, std::vector<T>& space) {
  if (keys.scalar_type() != at::kByte) return keys.const_data_ptr<T>() + row * dim;
  space.resize(dim);
  const uint8_t* record = keys.const_data_ptr<uint8_t>() + row * keys.size(1);
  decodegrid::decode_record(record, decodegrid::kQ4x, dim, space.data());
  return space.data();
}

// Marks the k largest entries; hidden (-inf) ones never.
template <typename T>
void mark_top_k(
    const std::vector<T>& scores, int64_t k, std::vector<T>& sorted, std::vector<uint8_t>& mark) {
  const int64_t count = static_cast<int64_t>(scores.size());
  const T hidden = -std::numeric_limits<T>::infinity();
  mark.resize(count);
  T cut = hidden;
  int64_t room = count;
  if (k < count) {
    sorted = scores;
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<T>());
    cut = sorted[k - 1];
    room = k;
    for (const T score : scores) room -= score > cut;
  }
  for (int64_t i = 0; i < count; ++i) {
    bool kept = scores[i] > cut;
    if (!kept && scores[i] == cut && room > 0) {
      kept = true;
      --room;
    }
    mark[i] = kept && scores[i] > hidden;
  }
}

// Sum over heads of weight * relu(query . key).
template <typename T>
T score_entry(const T* query, const T* weight, const T* key, int64_t heads, int64_t dim) {
  T total = 0;
  for (int64_t head = 0; head < heads; ++head) {
    const T* q = query + head * dim;
    T lane[8] = {};
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8)
      for (int i = 0; i < 8; ++i) lane[i] += q[d + i] * key[d + i];
    T dot = ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
            ((lane[1] + lane[5]) + (lane[3] + lane[7]));
    for (; d < dim; ++d) dot += q[d] * key[d];
    total += weight[head] * (dot > 0 ? dot : T(0));
  }
  return total;
}

// Candidate marks of one token; the newest block is always kept.
template <typename T>
void write_candidates(
    Scratch<T>& s, int64_t block_size, int64_t num_blocks, bool* candidates, int64_t step) {
  const int64_t count = static_cast<int64_t>(s.scores.size());
  s.best.assign((count + block_size - 1) / block_size, -std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < count; ++i)
    s.best[i / block_size] = std::max(s.best[i / block_size], s.scores[i]);
  s.best.back() = std::numeric_limits<T>::infinity();
  mark_top_k(s.best, num_blocks, s.sorted, s.kept);
  for (int64_t i = 0; i < count; ++i) candidates[i * step] = s.kept[i / block_size] != 0;
}

template <typename T>
void select(
    const at::Tensor& query, const at::Tensor& weights, const at::Tensor& keys,
    const at::Tensor& block_table, const at::Tensor& token_slot, const at::Tensor& lengths,
    int64_t per_block, int64_t mode, int64_t candidate_block, int64_t candidate_count,
    const at::Tensor& candidates, const at::Tensor& entry_out) {
  const int64_t heads = query.size(1), dim = query.size(2), top_k = entry_out.size(1);
  const int64_t out_step = entry_out.stride(1), mark_step = candidates.stride(1);
  Scratch<T> s;
  for (int64_t token = 0; token < query.size(0); ++token) {
    int64_t* out = entry_out.mutable_data_ptr<int64_t>() + token * entry_out.stride(0);
    for (int64_t place = 0; place < top_k; ++place) out[place * out_step] = -1;
    const int64_t count = lengths.const_data_ptr<int64_t>()[token];
    if (count <= 0) continue;
    const int64_t slot = token_slot.const_data_ptr<int64_t>()[token];
    const int64_t* table = block_table.const_data_ptr<int64_t>() + slot * block_table.stride(0);
    bool* candidate = candidates.mutable_data_ptr<bool>() + token * candidates.stride(0);
    const auto row_of = [&](int64_t entry) {
      return table[entry / per_block] * per_block + entry % per_block;
    };
    s.marks.assign(count, 1);
    if (count > top_k || mode != 0) {
      s.scores.assign(count, -std::numeric_limits<T>::infinity());
      const T* q = query.const_data_ptr<T>() + token * heads * dim;
      const T* w = weights.const_data_ptr<T>() + token * heads;
      for (int64_t entry = 0; entry < count; ++entry)
        if (mode != 2 || candidate[entry * mark_step])
          s.scores[entry] =
              score_entry(q, w, key_at(keys, row_of(entry), dim, s.key), heads, dim);
      if (mode == 1) write_candidates(s, candidate_block, candidate_count, candidate, mark_step);
      mark_top_k(s.scores, top_k, s.sorted, s.marks);
    }
    int64_t place = 0;
    for (int64_t entry = 0; entry < count && place < top_k; ++entry)
      if (s.marks[entry]) out[place++ * out_step] = row_of(entry);
  }
}

void select_entries(
    const at::Tensor& query, const at::Tensor& weights, const at::Tensor& index_keys,
    const at::Tensor& block_table, const at::Tensor& token_slot, const at::Tensor& lengths,
    int64_t ratio, int64_t block_size, int64_t candidate_mode, int64_t candidate_block,
    int64_t candidate_count, const at::Tensor& candidates, const at::Tensor& entry_out) {
  const auto dtype = c10::promoteTypes(query.scalar_type(), at::kFloat);
  const at::Tensor q = query.to(dtype).contiguous(), w = weights.to(dtype).contiguous();
  const bool is_records = index_keys.scalar_type() == at::kByte;
  const int64_t width = decodegrid::record_bytes(decodegrid::kQ4x, query.size(2));
  TORCH_CHECK(
      !is_records || index_keys.size(1) == width, "select_entries: records of ",
      index_keys.size(1), " bytes, allowed are ", width);
  // Lower precisions convert the pool; only the reference back end of such models pays for it.
  const at::Tensor keys = (is_records ? index_keys : index_keys.to(dtype)).contiguous();
  const at::Tensor table = block_table.contiguous(), slot = token_slot.contiguous();
  const at::Tensor count = lengths.contiguous();
  const auto run = dtype == at::kDouble ? select<double> : select<float>;
  run(q, w, keys, table, slot, count, block_size / ratio, candidate_mode, candidate_block,
      candidate_count, candidates, entry_out);
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("select_entries", select_entries); }
