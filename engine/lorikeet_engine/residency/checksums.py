"""Checksums of images, which reveal damage in memory or on a disk.

The bytes of each layer are added up as 64-bit integers, modulo 2⁶⁴. One changed word always changes
the sum; random damage to many words keeps it with a probability of 2⁻⁶⁴. Exchanged words are not
detected. A piece of an image on the GPU (gpu/arena.py) is a run of layers, so its sum is the sum of
its layers' sums.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

LayerSums = tuple[int, ...]
"""Checksum of each layer of an image, as a signed 64-bit integer."""


def word_sum(elements: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 64-bit words, modulo 2⁶⁴: [] int64, on the tensor's device.

    elements: tensor of any dtype, whose size is a multiple of 8 bytes.
    """
    words = elements.view(torch.int64)
    if words.is_cuda:
        return words.sum()
    # By numpy, since torch's threads wait for each other: 84 MB took 12 ms on one thread, and 18 to
    # 200 ms on two threads of a busy machine.
    return torch.tensor(words.numpy().sum())


def layer_sums(image: torch.Tensor, layers: Sequence[int]) -> LayerSums:
    """Return the checksum of each layer of an adapter's packed image on the CPU.

    layers: index of the image's element at which each layer begins, ascending.
    """
    ends = pairwise((*layers, len(image)))
    return tuple(int(word_sum(image[begin:end])) for begin, end in ends)


def added(sums: Iterable[int]) -> int:
    """Add up layers' checksums, modulo 2⁶⁴: the `word_sum` of all these layers together."""
    return (sum(sums) + 2**63) % 2**64 - 2**63
