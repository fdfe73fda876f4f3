"""Choice of tokens: the counter noise.

Owns two kernels over rows (n, vocab):

* `uniform_bits`: the 32 hash bits of every token id, as int32; bit for bit `uniform_bits` of
  kernels/sampling.py.
* `gumbel_noise`: standard Gumbel noise from those bits, zero rows where the temperature is 0. The
  logarithms are the series of the native CPU kernel, so that no maths library decides the bits.

seed and position are int64; temperature is float32.

Source: kernels/sampling.py and kernels/csrc/noise.cpp.
"""

from typing import Any

import tilelang.language as T

_ID_STRIDE, _POSITION_STRIDE = 0x3C6EF35F, 0x1B873593
_HALF_ROOT = 0x3F3504F3
_LN2 = 0.6931471805599453


@T.macro
def mix(x):
    """Avalanche of 32 bits; unsigned products wrap.

    A variable, here and below: a chain of named values would be inlined into one expression that
    doubles with each step."""
    state = T.alloc_var(T.uint32)
    state = x
    state = (state ^ (state >> T.uint32(16))) * T.uint32(0x7FEB352D)
    state = (state ^ (state >> T.uint32(15))) * T.uint32(0x2C1B3C6D)
    state = (state ^ (state >> T.uint32(12))) * T.uint32(0x297A2D39)
    state = state ^ (state >> T.uint32(15))
    return state


@T.macro
def row_key(seed, position):
    """Hash of a row, to which token ids are added."""
    low = T.cast(seed & T.int64(0xFFFFFFFF), T.uint32)
    high = T.cast((seed >> T.int64(32)) & T.int64(0xFFFFFFFF), T.uint32)
    first = mix(mix(low) ^ high)
    place = T.cast(position & T.int64(0xFFFFFFFF), T.uint32) * T.uint32(_POSITION_STRIDE)
    key = mix(first ^ place)
    return key


@T.macro
def token_bits(key, token):
    """Hash bits of a token id under a row's key, uint32."""
    number = T.cast(token, T.uint32)
    inner = mix(key ^ (number * T.uint32(_ID_STRIDE)))
    bits = mix(inner ^ number)
    return bits


@T.macro
def twice_atanh(argument):
    """2 * atanh(z) for |z| <= 1/3, within 1e-8 relative."""
    z = T.alloc_var(T.float32)
    s = T.alloc_var(T.float32)
    total = T.alloc_var(T.float32)
    z = argument
    s = z * z
    total = T.float32(1.0 / 13.0)
    for odd in (11, 9, 7, 5, 3, 1):
        total = total * s + T.float32(1.0 / odd)
    total = T.float32(2.0) * z * total
    return total


@T.macro
def log_positive(argument):
    """Natural logarithm of a normal positive float32."""
    bits = T.alloc_var(T.int32)
    exponent = T.alloc_var(T.int32)
    m = T.alloc_var(T.float32)
    bits = T.reinterpret(argument, T.int32)
    exponent = (bits - T.int32(_HALF_ROOT)) >> 23
    m = T.reinterpret(bits - (exponent << 23), T.float32)
    logarithm = twice_atanh((m - T.float32(1.0)) / (m + T.float32(1.0)))
    m = T.cast(exponent, T.float32) * T.float32(_LN2) + logarithm
    return m


@T.macro
def gumbel(bits):
    """-log(E), E = -log(1 - u), u = (bits + 1/2) / 2 ** 32."""
    low = T.alloc_var(T.float32)
    high = T.alloc_var(T.float32)
    low = (T.cast(bits, T.float32) + T.float32(0.5)) * T.float32(2.0**-32)
    high = (T.cast(bits ^ T.uint32(0xFFFFFFFF), T.float32) + T.float32(0.5)) * T.float32(2.0**-32)
    low = twice_atanh(low / (T.float32(2.0) - low))
    high = T.float32(0.0) - log_positive(high)
    low = T.Select(bits >= T.uint32(0x80000000), high, low)
    high = T.float32(0.0) - log_positive(low)
    return high


def uniform_bits(vocab: int, columns: int = 1024) -> Any:
    """seed, position (n,) int64, bits (n, vocab) int32, written."""
    n = T.dynamic("n")

    @T.prim_func
    def uniform_bits_kernel(
        seed: T.Tensor((n,), T.int64),
        position: T.Tensor((n,), T.int64),
        bits: T.Tensor((n, vocab), T.int32),
    ):
        with T.Kernel(T.ceildiv(vocab, columns), n, threads=256) as (bx, by):
            key = row_key(seed[by], position[by])
            for j in T.Parallel(columns):
                if bx * columns + j < vocab:
                    bits[by, bx * columns + j] = T.reinterpret(
                        token_bits(key, bx * columns + j), T.int32
                    )

    return uniform_bits_kernel


def gumbel_noise(vocab: int, columns: int = 1024) -> Any:
    """seed, position (n,) int64, temperature (n,) float32, noise (n, vocab) float32, written."""
    n = T.dynamic("n")

    @T.prim_func
    def gumbel_noise_kernel(
        seed: T.Tensor((n,), T.int64),
        position: T.Tensor((n,), T.int64),
        temperature: T.Tensor((n,), T.float32),
        noise: T.Tensor((n, vocab), T.float32),
    ):
        with T.Kernel(T.ceildiv(vocab, columns), n, threads=256) as (bx, by):
            key = row_key(seed[by], position[by])
            for j in T.Parallel(columns):
                if bx * columns + j < vocab:
                    if temperature[by] > T.float32(0.0):
                        noise[by, bx * columns + j] = gumbel(token_bits(key, bx * columns + j))
                    else:
                        noise[by, bx * columns + j] = T.float32(0.0)

    return gumbel_noise_kernel
