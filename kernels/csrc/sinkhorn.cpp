// Sinkhorn normalisation of many small square matrices, the CPU kernel of decodegrid::sinkhorn.
//
// Same operations in the same order as kernels/hyper_connection.py: softmax over the last axis plus
// eps, a column step, then (iters - 1) times a row step and a column step, every divisor plus eps.
// LANES matrices are worked on side by side, so that the compiler vectorises across them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>

namespace {

constexpr int LANES = 8;
constexpr int MAX_SIZE = 8;

template <typename T>
struct Block {
  T cell[MAX_SIZE][MAX_SIZE][LANES];
};

template <typename T>
inline void softmax_rows(Block<T>& block, int size, T eps) {
  for (int i = 0; i < size; ++i) {
    T top[LANES], total[LANES];
    for (int lane = 0; lane < LANES; ++lane) top[lane] = block.cell[i][0][lane];
    for (int j = 1; j < size; ++j)
      for (int lane = 0; lane < LANES; ++lane)
        top[lane] = block.cell[i][j][lane] > top[lane] ? block.cell[i][j][lane] : top[lane];
    for (int lane = 0; lane < LANES; ++lane) total[lane] = 0;
    for (int j = 0; j < size; ++j)
      for (int lane = 0; lane < LANES; ++lane) {
        block.cell[i][j][lane] = std::exp(block.cell[i][j][lane] - top[lane]);
        total[lane] += block.cell[i][j][lane];
      }
    for (int j = 0; j < size; ++j)
      for (int lane = 0; lane < LANES; ++lane)
        block.cell[i][j][lane] = block.cell[i][j][lane] / total[lane] + eps;
  }
}

template <typename T>
inline void divide_rows(Block<T>& block, int size, T eps) {
  for (int i = 0; i < size; ++i) {
    T total[LANES];
    for (int lane = 0; lane < LANES; ++lane) total[lane] = block.cell[i][0][lane];
    for (int j = 1; j < size; ++j)
      for (int lane = 0; lane < LANES; ++lane) total[lane] += block.cell[i][j][lane];
    for (int lane = 0; lane < LANES; ++lane) total[lane] += eps;
    for (int j = 0; j < size; ++j)
      for (int lane = 0; lane < LANES; ++lane) block.cell[i][j][lane] /= total[lane];
  }
}

template <typename T>
inline void divide_columns(Block<T>& block, int size, T eps) {
  for (int j = 0; j < size; ++j) {
    T total[LANES];
    for (int lane = 0; lane < LANES; ++lane) total[lane] = block.cell[0][j][lane];
    for (int i = 1; i < size; ++i)
      for (int lane = 0; lane < LANES; ++lane) total[lane] += block.cell[i][j][lane];
    for (int lane = 0; lane < LANES; ++lane) total[lane] += eps;
    for (int i = 0; i < size; ++i)
      for (int lane = 0; lane < LANES; ++lane) block.cell[i][j][lane] /= total[lane];
  }
}

// SIZE 0 means that the size is known at run time only.
template <typename T, int SIZE>
void sinkhorn(const T* logits, T* out, int64_t count, int size_in, int iters, T eps) {
  const int size = SIZE == 0 ? size_in : SIZE;
  const int cells = size * size;
  for (int64_t first = 0; first < count; first += LANES) {
    const int live = count - first < LANES ? static_cast<int>(count - first) : LANES;
    Block<T> block;
    for (int lane = 0; lane < LANES; ++lane) {
      // Idle lanes repeat the first matrix, so that they stay finite.
      const T* source = logits + (first + (lane < live ? lane : 0)) * cells;
      for (int i = 0; i < size; ++i)
        for (int j = 0; j < size; ++j) block.cell[i][j][lane] = source[i * size + j];
    }
    softmax_rows(block, size, eps);
    divide_columns(block, size, eps);
    for (int round = 1; round < iters; ++round) {
      divide_rows(block, size, eps);
      divide_columns(block, size, eps);
    }
    for (int lane = 0; lane < live; ++lane) {
      T* target = out + (first + lane) * cells;
      for (int i = 0; i < size; ++i)
        for (int j = 0; j < size; ++j) target[i * size + j] = block.cell[i][j][lane];
    }
  }
}

template <typename T>
void run(const at::Tensor& logits, const at::Tensor& out, int size, int iters, double eps) {
  const T* source = logits.const_data_ptr<T>();
  T* target = out.mutable_data_ptr<T>();
  const int64_t count = logits.numel() / (size * size);
  if (size == 4)
    sinkhorn<T, 4>(source, target, count, size, iters, static_cast<T>(eps));
  else
    sinkhorn<T, 0>(source, target, count, size, iters, static_cast<T>(eps));
}

at::Tensor normalise(const at::Tensor& logits, int64_t iters, double eps) {
  const int64_t size = logits.size(-1);
  TORCH_CHECK(size >= 1 && size <= MAX_SIZE, "sinkhorn: matrix side ", size, ", allowed 1..8");
  TORCH_CHECK(iters >= 1, "sinkhorn: ", iters, " rounds, at least 1 is needed");
  const at::Tensor dense = logits.contiguous();
  at::Tensor out = at::empty_like(dense);
  if (dense.scalar_type() == at::kDouble)
    run<double>(dense, out, static_cast<int>(size), static_cast<int>(iters), eps);
  else
    run<float>(dense, out, static_cast<int>(size), static_cast<int>(iters), eps);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) { library.impl("sinkhorn", normalise); }
