// The verify budget's walk on the host; semantics: capture/total_scan.py. Called through ctypes,
// see kernels/total_scan.py, which checks sizes and types once.

#include <algorithm>
#include <cstdint>

struct Memory {
  const float* terms;
  float* sums;
  const int64_t* first;
  const int64_t* last;
  const double* ms;
  int64_t num_drafts;
  int64_t num_columns;
  int64_t width;
};

extern "C" bool decodegrid_rates_in_order(const Memory* memory) {
  const float* rate = memory->terms;
  int rising = 0;
  // Both loops run over all rates, so that nothing branches on them.
  for (int64_t offset = 0; offset + 1 < memory->width; ++offset) {
    for (int64_t at = offset; at + 1 < memory->num_drafts; at += memory->width) {
      rising |= !(rate[at + 1] <= rate[at]);
    }
  }
  return rising == 0;
}

// Drafts in the low 32 bits of the result, the column above them.
extern "C" int64_t decodegrid_best_total(const Memory* memory, int64_t num_columns) {
  const int64_t count = memory->num_drafts;
  const float* term = memory->terms;
  float* sum = memory->sums;
  // One after the other: the order is part of the definition.
  float total = term[count];
  sum[0] = total;
  for (int64_t index = 1; index <= count; ++index) {
    total += term[count - index];
    sum[index] = total;
  }
  num_columns = std::min(num_columns, memory->num_columns);
  int64_t column = 0;
  double best = 0.0;
  for (int64_t index = 0; index < num_columns; ++index) {
    const double rate = static_cast<double>(sum[memory->last[index]]) / memory->ms[index];
    if (index == 0 || rate > best) {
      best = rate;
      column = index;
    }
  }
  // A draft that changes nothing in fp32 is not worth a query token.
  const float* low = sum + memory->first[column];
  const float* high = sum + memory->last[column];
  return column << 32 | (std::lower_bound(low, high, *high) - sum);
}
