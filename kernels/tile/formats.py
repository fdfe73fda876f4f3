"""Block number formats as tile-level expressions: E4M3, E2M1 and E8M0 in integer arithmetic.

Owns the macros that the other kernels of this folder encode and decode with; no kernel of its own.
They work on bits, not on conversion instructions, so that the same source gives the same bits on
every architecture and in the CPU tests, and so that a record may mix formats in one byte buffer.
Bytes are int32 values 0..255 here. Bit for bit the formats of kernels/quant.py, for finite values.

Source: OCP Microscaling Formats v1.0; IEEE 754 round to nearest, ties to even, by adding a power
of two whose unit in the last place is the step of the target's subnormals.
"""

import numpy as np
import tilelang.language as T

from decodegrid.kernels.quant import E2M1_MAX, E4M3_MAX

E4M3_RECIPROCAL = float(np.float32(1.0 / E4M3_MAX))
E2M1_RECIPROCAL = float(np.float32(1.0 / E2M1_MAX))
Q8_FLOOR = float(np.float32(1e-4))
Q4X_FLOOR = 6.0 * 2.0**-126
Q4N_FLOOR = 6.0 * 2.0**-9

# 1.5 * 2 ** 23 would do for integers; these have steps of 2 ** -9 and 0.5.
_E4M3_STEP = 2.0**14
_E2M1_STEP = 2.0**22


@T.macro
def power_of_two_scale(amax, floor, reciprocal):
    """E8M0 byte of the least power of two that is >= max(amax, floor) * reciprocal, as int32."""
    bounded = T.max(amax, T.float32(floor)) * T.float32(reciprocal)
    bits = T.reinterpret(bounded, T.int32)
    byte = (bits >> 23) + T.Select((bits & 0x7FFFFF) != 0, 1, 0)
    return byte


@T.macro
def e8m0_inverse(byte):
    """2 ** (127 - byte) as float32, for bytes 1..253: it multiplies where a scale divides."""
    value = T.reinterpret((254 - byte) << 23, T.float32)
    return value


@T.macro
def e8m0_value(byte):
    """2 ** (byte - 127) as float32; 255 is NaN."""
    bits = T.Select(byte == 0, T.int32(0x00400000), byte << 23)
    value = T.reinterpret(T.Select(byte == 255, T.int32(0x7FC00000), bits), T.float32)
    return value


@T.macro
def e4m3_byte(value):
    """E4M3 byte of a float32, clamped to +-448."""
    raw = T.reinterpret(value, T.int32)
    magnitude = T.min(T.reinterpret(raw & 0x7FFFFFFF, T.float32), T.float32(E4M3_MAX))
    bits = T.reinterpret(magnitude, T.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    raised = T.reinterpret(magnitude + T.float32(_E4M3_STEP), T.int32)
    small = raised - T.int32((127 + 14) << 23)
    sign = (raw >> 24) & 0x80
    byte = sign | T.Select(magnitude < T.float32(2.0**-6), small, normal)
    return byte


@T.macro
def e4m3_value(byte):
    """float32 of an E4M3 byte; 0x7f and 0xff are NaN."""
    # The seven bits at the place of exponent and mantissa are the value times 2 ** -120.
    scaled = T.reinterpret((byte & 0x7F) << 20, T.float32) * T.float32(2.0**120)
    bits = T.Select((byte & 0x7F) == 0x7F, T.int32(0x7FC00000), T.reinterpret(scaled, T.int32))
    value = T.reinterpret(bits | ((byte & 0x80) << 24), T.float32)
    return value


@T.macro
def e2m1_code(value):
    """E2M1 code 0..15 of a float32, clamped to +-6."""
    raw = T.reinterpret(value, T.int32)
    magnitude = T.min(T.reinterpret(raw & 0x7FFFFFFF, T.float32), T.float32(E2M1_MAX))
    bits = T.reinterpret(magnitude, T.int32)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    raised = T.reinterpret(magnitude + T.float32(_E2M1_STEP), T.int32)
    small = raised - T.int32((127 + 22) << 23)
    sign = (raw >> 28) & 8
    code = sign | T.Select(magnitude < T.float32(1.0), small, normal)
    return code


@T.macro
def e2m1_value(code):
    """float32 of an E2M1 code 0..15."""
    magnitude = code & 7
    wide = T.reinterpret((magnitude << 22) + T.int32(126 << 23), T.int32)
    half = T.reinterpret(T.cast(magnitude, T.float32) * T.float32(0.5), T.int32)
    bits = T.Select(magnitude < 2, half, wide)
    value = T.reinterpret(bits | ((code & 8) << 28), T.float32)
    return value
