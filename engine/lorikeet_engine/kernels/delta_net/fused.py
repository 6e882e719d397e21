"""Gated delta net in Triton: the operators that kernels/delta_net/__init__.py calls on CUDA."""

from lorikeet_engine.kernels.delta_net.convolution import decode_convolution, prefill_convolution
from lorikeet_engine.kernels.delta_net.delta_rule import decode_delta_rule, prefill_delta_rule

__all__ = [
    "decode_convolution",
    "decode_delta_rule",
    "prefill_convolution",
    "prefill_delta_rule",
]
