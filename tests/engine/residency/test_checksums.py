"""Checksums of images: the same for every way of adding, and different after any change."""

import random

import pytest
import torch

from lorikeet_engine.residency.checksums import added, layer_sums, word_sum

LAYERS = (0, 64, 64, 4096, 70_000)
ELEMENTS = 131_072


def image_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_of_layers_add_up_to_the_sum_of_the_image(dtype):
    image = image_of(dtype)
    sums = layer_sums(image, LAYERS)
    assert sums[1] == 0, "a layer without anything"
    assert added(sums) == int(word_sum(image))
    front, back = image[: LAYERS[3]], image[LAYERS[3] :]
    assert (added(sums[:3]), added(sums[3:])) == (int(word_sum(front)), int(word_sum(back)))


def test_the_sum_is_modulo_2_to_the_64():
    words = torch.full((3,), 2**62, dtype=torch.int64)
    assert int(word_sum(words)) == 3 * 2**62 - 2**64
    assert added([2**63 - 1, 1]) == -(2**63)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flipped_bit_changes_only_the_sum_of_its_layer(dtype):
    image, chance = image_of(dtype), random.Random(1)
    good = layer_sums(image, LAYERS)
    data = image.view(torch.uint8)
    for _ in range(100):
        at, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        data[at] ^= bit
        bad = layer_sums(image, LAYERS)
        data[at] ^= bit
        layer = max(n for n, begin in enumerate(LAYERS) if begin * dtype.itemsize <= at)
        assert [n for n in range(len(LAYERS)) if good[n] != bad[n]] == [layer]


@pytest.mark.gpu
def test_a_gpu_computes_the_same_sum():
    image = image_of(torch.bfloat16)
    assert int(word_sum(image.cuda())) == int(word_sum(image))
