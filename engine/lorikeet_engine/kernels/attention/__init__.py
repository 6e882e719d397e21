"""Attention over paged keys and values: the protocol and its back ends."""

from lorikeet_engine.kernels.attention.protocol import AttentionBackend, PagedSequences
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention

__all__ = ["AttentionBackend", "PagedSequences", "SdpaAttention"]
