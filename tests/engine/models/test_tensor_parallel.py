"""Two processes pack their shards and exchange what the schemes say: the unsharded layer results.

Each computes its part of every linear's W x + B A x for one batch of several adapters.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec
from lorikeet_engine.kernels.lora.reference import expand, shrink
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments
from lorikeet_engine.residency.packing import PackedLayout, pack
from lorikeet_engine.residency.shard import Shard
from tests.engine.blobs import Shelf

WORLD = 2
ALPHA = 6.0
TOKENS = 9
SHAPES = {
    "two kv heads": BaseShape(
        "qwen3", 1, hidden=24, intermediate=36, heads=4, kv_heads=2, head_dim=10, vocabulary=64
    ),
    "one kv head": BaseShape(
        "llama", 1, hidden=32, intermediate=48, heads=4, kv_heads=1, head_dim=8, vocabulary=64
    ),
}
LINEARS = [linear.name for linear in SHAPES["one kv head"].linears]
SCHEMES = {"sharded": False, "fully sharded": True}
# One batch: ranks below and above the number of processes, odd, mixed, and linears left out.
ADAPTERS = {
    "thin": {(0, linear): 1 for linear in range(7)},
    "even": {(0, linear): 8 for linear in range(7)},
    "mixed": {(0, linear): 3 + 2 * linear for linear in range(7)},
    "some": {(0, 0): 5, (0, 2): 16, (0, 5): 2, (0, 6): 7},
}
SEGMENTS = {"thin": (0, 2), "even": (2, 1), "mixed": (3, 3), "some": (6, 2)}  # the last has none


def base_layer(shape):
    """(x, W) of every linear; those of one fused group share x."""
    random = torch.Generator().manual_seed(5)
    layer = {}
    for group in shape.groups.values():
        x = torch.randn(TOKENS, shape.dims(group[0])[0], generator=random)
        for linear in group:
            layer[linear] = x, torch.randn(*shape.dims(linear)[::-1], generator=random)
    return layer


def unsharded(shape, folder):
    """{linear: W x + B A x}, from PEFT's files."""
    outputs = {linear: x @ w.T for linear, (x, w) in base_layer(shape).items()}
    for name, (start, length) in SEGMENTS.items():
        tensors = load_file(folder / f"{name}-peft" / "adapter_model.safetensors")
        rows = slice(start, start + length)
        for (layer, linear), rank in ADAPTERS[name].items():
            module = f"base_model.model.{shape.linears[linear].path(layer)}"
            a, b = (tensors[f"{module}.lora_{side}.weight"] for side in "AB")
            x = base_layer(shape)[linear][0]
            outputs[linear][rows] += x[rows] @ a.T @ b.T * (ALPHA / rank)
    return outputs


class Process:
    """One of the processes that share the layer; its images lie side by side in one arena."""

    def __init__(self, shape, shard, folder):
        self.shape, self.shard, self.ranges = shape, shard, shard.ranges(shape)
        specs = [read_spec(folder / name, shape, AdapterLimits(64, 1 << 20)) for name in ADAPTERS]
        layouts = [PackedLayout.of(spec, shape, shard) for spec in specs]
        ends = torch.tensor([layout.elements for layout in layouts]).cumsum(0).tolist()
        arena, rows = torch.full((ends[-1],), torch.nan), []
        for name, spec, layout, end in zip(ADAPTERS, specs, layouts, ends, strict=True):
            pack(folder / name, spec, layout, arena[end - layout.elements : end])
            rows.append(layout.rows_at(end - layout.elements))
        self.weights = LoraWeights(arena, torch.stack(rows))
        self.segments = self._segments(max(spec.max_rank for spec in specs))
        self.outputs = {}  # by linear: the columns that this process has in the end

    def run(self):
        for group in self.shape.groups.values():
            if group[0] in (3, 6):
                self._row_parallel(group[0])
            else:
                self._column_parallel(group)
        return self.outputs

    def _column_parallel(self, group):
        widths = tuple(len(self.ranges[linear].outputs) for linear in group)
        lora = LoraGroup(group, self.shape.hidden, widths)
        layer = base_layer(self.shape)
        x = layer[group[0]][0]
        w = torch.cat([layer[n][1][list(self.ranges[n].outputs)] for n in group])
        y = x @ w.T
        v = self._gathered(x, lora) if self.shard.fully else self._shrunk(x, lora)
        expand(v, y, self.weights, self.segments, 0, lora)
        self.outputs |= dict(zip(group, y.split(widths, dim=1), strict=True))

    def _row_parallel(self, linear):
        cut = self.ranges[linear]
        lora = LoraGroup((linear,), len(cut.inputs), (len(cut.outputs),))
        x, w = base_layer(self.shape)[linear]
        x = x[:, list(cut.inputs)]
        y = x @ w[:, list(cut.inputs)].T
        v = self._shrunk(x, lora)
        if self.shard.fully:
            dist.all_reduce(v)
        expand(v, y[:, cut.outputs.start : cut.outputs.stop], self.weights, self.segments, 0, lora)
        dist.all_reduce(y)
        self.outputs[linear] = y

    def _shrunk(self, x, lora):
        return shrink(x, self.weights, self.segments, 0, lora)

    def _gathered(self, x, lora):
        """A's rows are dealt out in turn, so the parts of v are interleaved, whatever the ranks."""
        most = self.segments.max_rank
        table = self.weights.table.clone()
        for linear in lora.linears:
            for adapter in table[:, 0, linear]:
                adapter[2] = len(self.ranges[linear].a_rows(int(adapter[2])))
        mine = shrink(
            x, LoraWeights(self.weights.arena, table), self._segments(-(-most // WORLD)), 0, lora
        )
        parts = [torch.empty_like(mine) for _ in range(WORLD)]
        dist.all_gather(parts, mine)
        return torch.stack(parts, dim=-1).flatten(-2)[..., :most]

    def _segments(self, max_rank):
        starts, lengths = torch.tensor(list(SEGMENTS.values())).T
        return Segments(torch.arange(len(SEGMENTS)), starts, lengths, max_rank)


def share_the_layers(index, folder):
    """What each process runs: every shape under both schemes, the outputs to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=index,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    outputs = {
        (name, scheme): Process(shape, Shard(index, WORLD, fully), folder / name).run()
        for name, shape in SHAPES.items()
        for scheme, fully in SCHEMES.items()
    }
    torch.save(outputs, folder / f"outputs-{index}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Adapters' blobs and PEFT folders by shape, and what the processes made of them."""
    folder = tmp_path_factory.mktemp("shards")
    for name, shape in SHAPES.items():
        shelf = Shelf(folder / name)
        for adapter, ranks in ADAPTERS.items():
            shelf.make(adapter, ranks, alpha=ALPHA, shape=shape)
    torch.multiprocessing.spawn(share_the_layers, (folder,), nprocs=WORLD)
    return folder


@pytest.mark.parametrize("linear", range(len(LINEARS)), ids=LINEARS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_shards_together_equal_the_unsharded_layer(folder, name, scheme, linear):
    want = unsharded(SHAPES[name], folder / name)[linear]
    first, second = (torch.load(folder / f"outputs-{n}")[name, scheme][linear] for n in (0, 1))
    everyone_has_all = linear in (3, 6) or (linear in (1, 2) and SHAPES[name].kv_heads == 1)
    gots = (first, second) if everyone_has_all else (torch.cat([first, second], dim=1),)
    for got in gots:
        torch.testing.assert_close(got, want, rtol=0, atol=64 * 1.2e-7 * want.abs().max().item())
