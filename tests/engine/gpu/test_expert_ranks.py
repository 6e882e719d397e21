"""Two GPUs that share a mixture of experts score prompts as one GPU does."""

from pathlib import Path

import pytest
import torch

from loadtest.engine.random_checkpoint import write_checkpoint
from loadtest.engine.random_model import QWEN3_30B_A3B
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import BaseShape
from tests.engine.blobs import Shelf
from tests.engine.gpu.test_ranks import RANKS, TOLERANCE, logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
# All experts of each token: rounding could select other ones of a few than on one GPU.
CONFIG = {
    **QWEN3_30B_A3B,
    "vocab_size": 4096,
    "hidden_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder / "model", CONFIG, torch.device("cuda"))
    return folder


@pytest.fixture(scope="module")
def refs(folder: Path) -> list[AdapterRef]:
    """Adapters of attention and all experts, which displace one another on the GPU.

    They leave the router alone: adapters this large would turn every rounding into another
    mixture.
    """
    shape, shelf = BaseShape.from_config(CONFIG), Shelf(folder / "made")
    linears = [n for n, linear in enumerate(shape.linears) if linear.group != "router"]
    places = [(layer, linear) for layer in range(shape.layers) for linear in linears]
    (folder / "blobs").mkdir()
    refs = [shelf.make(f"r{rank}", dict.fromkeys(places, rank), shape=shape) for rank in RANKS]
    for ref in refs:
        (folder / "blobs" / ref.digest).write_bytes(shelf.blob(ref.name).read_bytes())
    return refs


def test_prompts_have_equal_log_probabilities_on_one_gpu_and_two(
    folder: Path, refs: list[AdapterRef]
) -> None:
    one, two = (logprobs(folder, refs, gpus) for gpus in (1, 2))
    assert (one - two).square().mean(1).sqrt().max() < TOLERANCE
    assert one[0].sub(one[1]).square().mean().sqrt() > 3 * TOLERANCE, "what adapters change"
