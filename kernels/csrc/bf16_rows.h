// Products of float32 rows with a bfloat16 matrix that is widened in registers.

#pragma once

#include <cstdint>

namespace decodegrid {

// Floats that one packed row of `columns` values takes.
int64_t packed_row_size(int64_t columns);

// Lays a row out as rows_product reads it.
void pack_row(const float* row, int64_t columns, float* packed);

// How many rows to give to rows_product at once, so that they stay in the first cache.
int64_t rows_per_chunk(int64_t columns);

// out[r * out_stride + n] = row r . weight[n] for all rows and all n of 0 .. outputs - 1.
//
// rows: packed, packed_row_size(columns) apart. weight: bfloat16 bits, (outputs, columns), rows
// `weight_stride` apart. A result's bits depend on its own row and weights alone.
void rows_product(
    const float* rows, int64_t num_rows, int64_t columns, const uint16_t* weight,
    int64_t weight_stride, int64_t outputs, float* out, int64_t out_stride);

// Weight rows that one tile computes on.
constexpr int64_t TILE_OUTPUTS = 4;

// The same for up to TILE_OUTPUTS weight rows that are float32 already: `weight` holds TILE_OUTPUTS
// rows, laid out and spaced like `rows` (any order of the columns that both share).
void wide_rows_product(
    const float* rows, int64_t num_rows, int64_t columns, const float* weight, int64_t outputs,
    float* out, int64_t out_stride);

}  // namespace decodegrid
