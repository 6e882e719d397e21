"""Elementwise functions of the sampling kernels.

They compute tokens' weights, which are unnormalised probabilities; the integers by which weights
are sorted; and hashes of integers, from which random numbers are made.
"""

import triton
import triton.language as tl

from lorikeet_engine.kernels import sampling

_LEAST_EXPONENT = tl.constexpr(sampling.LEAST_EXPONENT)
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = map(tl.constexpr, sampling.POWERS)
_MIX_1, _MIX_2 = map(tl.constexpr, sampling.MIXERS)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # its sum with a float32 has no fraction
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_MANTISSA = tl.constexpr((127 << 23) - (1 << 23))


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(x: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the int64 weights of float32 logits x, in units of 2 ** −44.

    A weight is 2 ** ((x − best) · scale).

    best: largest logit of the row.
    scale: log₂(e) / temperature.
    """
    z = tl.maximum((x - best) * scale, _LEAST_EXPONENT)
    whole = (z - 0.5) + _ROUNDER
    part = z - (whole - _ROUNDER)
    power = ((_C6 * part + _C5) * part + _C4) * part + _C3
    power = ((power * part + _C2) * part + _C1) * part + _C0
    mantissa = power.to(tl.int32, bitcast=True) - _MANTISSA
    shift = _ROUNDER_BITS - whole.to(tl.int32, bitcast=True)
    return (mantissa.to(tl.int64) << 21) >> shift.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def key_of(x: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """Return int32 keys that compare as the float32 values x do.

    bits: 16 if x was bfloat16, else 32.
    """
    key = x.to(tl.int32, bitcast=True)
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    return key >> (32 - bits)


@triton.jit  # type: ignore[untyped-decorator]
def mix_of(bits: tl.tensor) -> tl.tensor:
    """Mix 64 bits by the hash SplitMix64."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)
