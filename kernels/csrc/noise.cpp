// Noise as a pure function of (seed, position, token id), the CPU kernels of
// decodegrid::gumbel_noise and decodegrid::uniform_noise.
//
// The hash is that of kernels/sampling.py on uint32. The logarithms are series of our own, so that
// the bits do not depend on a maths library, the row order or the number of rows.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr uint32_t ID_STRIDE = 0x3C6EF35Fu;
constexpr uint32_t POSITION_STRIDE = 0x1B873593u;
constexpr float SCALE = 2.3283064365386963e-10f;  // 2^-32
constexpr float LN2 = 0.6931471805599453f;

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 12;
  x *= 0x297A2D39u;
  return x ^ (x >> 15);
}

// 2 * atanh(z) for |z| <= 1/3: error below 1e-8 relative.
inline float twice_atanh(float z) {
  const float s = z * z;
  float sum = 1.0f / 13.0f;
  sum = sum * s + 1.0f / 11.0f;
  sum = sum * s + 1.0f / 9.0f;
  sum = sum * s + 1.0f / 7.0f;
  sum = sum * s + 1.0f / 5.0f;
  sum = sum * s + 1.0f / 3.0f;
  sum = sum * s + 1.0f;
  return 2.0f * z * sum;
}

// Natural logarithm of a normal positive float.
inline float log_positive(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // Mantissa in [sqrt(1/2), sqrt(2)): 0x3F3504F3 is sqrt(1/2).
  const uint32_t shifted = bits - 0x3F3504F3u;
  const int32_t exponent = static_cast<int32_t>(shifted) >> 23;
  const uint32_t mantissa = bits - (static_cast<uint32_t>(exponent) << 23);
  float m;
  std::memcpy(&m, &mantissa, 4);
  return static_cast<float>(exponent) * LN2 + twice_atanh((m - 1.0f) / (m + 1.0f));
}

inline float gumbel(uint32_t bits) {
  // Exponential E = -log(1 - u), u = (bits + 1/2) / 2^32. Below one half by a series in u, which
  // keeps small E exact; above by the logarithm of 1 - u, whose bits are the complement.
  const float low = (static_cast<float>(bits) + 0.5f) * SCALE;
  const float high = (static_cast<float>(~bits) + 0.5f) * SCALE;
  const float small = twice_atanh(low / (2.0f - low));
  const float large = -log_positive(high);
  return -log_positive((bits >> 31) ? large : small);
}

// Hash of a row, to which token ids are added.
inline uint32_t row_key(int64_t seed, int64_t position) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  const uint64_t place = static_cast<uint64_t>(position);
  const uint32_t key = mix(mix(static_cast<uint32_t>(bits)) ^ static_cast<uint32_t>(bits >> 32));
  return mix(key ^ static_cast<uint32_t>(place * POSITION_STRIDE));
}

// Rows with a temperature of 0 (or less) get zeros and cost nothing else.
at::Tensor gumbel_noise(
    const at::Tensor& seed, const at::Tensor& position, const at::Tensor& temperature,
    int64_t vocab_size) {
  const at::Tensor seeds = seed.contiguous(), positions = position.contiguous();
  const at::Tensor heat = temperature.to(at::kDouble).contiguous();
  const int64_t rows = seeds.numel();
  at::Tensor out = at::empty({rows, vocab_size}, seed.options().dtype(at::kFloat));
  for (int64_t row = 0; row < rows; ++row) {
    float* target = out.mutable_data_ptr<float>() + row * vocab_size;
    if (!(heat.const_data_ptr<double>()[row] > 0.0)) {
      std::memset(target, 0, static_cast<size_t>(vocab_size) * sizeof(float));
      continue;
    }
    const uint32_t key =
        row_key(seeds.const_data_ptr<int64_t>()[row], positions.const_data_ptr<int64_t>()[row]);
    const uint32_t count = static_cast<uint32_t>(vocab_size);
    for (uint32_t token = 0; token < count; ++token)
      target[token] = gumbel(mix(mix(key ^ (token * ID_STRIDE)) ^ token));
  }
  return out;
}

// The bits of token 0, in the middle of their interval: exact in a double, never 0 or 1.
at::Tensor uniform_noise(const at::Tensor& seed, const at::Tensor& position) {
  const at::Tensor seeds = seed.contiguous(), positions = position.contiguous();
  at::Tensor out = at::empty({seeds.numel()}, seed.options().dtype(at::kDouble));
  for (int64_t row = 0; row < seeds.numel(); ++row) {
    const uint32_t key =
        row_key(seeds.const_data_ptr<int64_t>()[row], positions.const_data_ptr<int64_t>()[row]);
    out.mutable_data_ptr<double>()[row] = (static_cast<double>(mix(mix(key))) + 0.5) * 0x1p-32;
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(decodegrid, CPU, library) {
  library.impl("gumbel_noise", gumbel_noise);
  library.impl("uniform_noise", uniform_noise);
}
