"""The engine that serves the cases of one base model, and its results."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import BaseShape, Linear, blob_digest, read_spec
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.corpus.bases import Base
from tests.corpus.register import LIMITS
from tests.engine.blob_shelf import invocation_tokens
from tests.engine.engine_driver import Answers, build, greedy
from tests.engine.float32_reference import RecordingSampler

PROMPT = (17, 201, 44, 9, 130, 77, 250, 31, 5, 98, 163)
_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens generated after PROMPT, and the log probabilities [tokens, vocab] at each position."""

    tokens: list[int]
    logprobs: torch.Tensor


class ServedBase:
    """CPU engine, and the source from which it fetches adapters."""

    def __init__(self, base: Base, folder: Path) -> None:
        self.base = base
        self._blobs: dict[str, Path] = {}
        self._engine = build(base.folder, self, folder / "cache")
        self._answers = Answers(self._engine)
        self._sampler = RecordingSampler(self._engine)

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        shutil.copyfile(self._blobs[ref.digest], path)

    def answers(self, blobs: Mapping[str, Path | None]) -> dict[str, Answer]:
        """Generate with all adapters in one batch; None is the base model."""
        for seed, (name, blob) in enumerate(blobs.items()):
            adapter = None if blob is None else self._ref(name, blob)
            request = greedy(name, list(PROMPT), adapter=adapter, max_tokens=_TOKENS, seed=seed)
            self._answers.submit(request)
        self._answers.all()
        return {name: self._answer(name, seed) for seed, name in enumerate(blobs)}

    def close(self) -> None:
        self._engine.close()

    def _ref(self, name: str, blob: Path) -> AdapterRef:
        digest = blob_digest(blob)
        self._blobs[digest] = blob
        return AdapterRef("acme", name, 1, digest, invocation_tokens(blob))

    def _answer(self, name: str, seed: int) -> Answer:
        assert name not in self._answers.errors, self._answers.errors[name]
        logits = [self._sampler.logits[seed, step] for step in range(_TOKENS)]
        return Answer(self._answers.of(name), torch.stack(logits))


def packed_deltas(blob: Path, shape: BaseShape) -> dict[str, torch.Tensor]:
    """Return the change of each module's weight in the engine's image of a blob, by module name."""
    spec = replace(read_spec(blob, shape, LIMITS), vectors=())  # which change no A and B
    layout = PackedLayout.of(spec, shape)
    image = torch.empty(layout.elements)
    pack(blob, spec, layout, image)
    deltas = {}
    for part in spec.linears:
        a_at, b_at, rank = layout.rows[part.layer, part.linear].tolist()
        (d_in, d_out), count = shape.dims(part.linear), shape.matrices(part.linear)
        a = _matrices(image, a_at, count, rank * d_in)
        b = _matrices(image, b_at, count, rank * d_out).view(count, rank, d_out)
        found = shape.modules[part.linear]
        name = found.module if part.layer == shape.outer_layer else found.path(part.layer)
        if found.gathers:
            deltas[name] = a[0].view(d_in, rank) @ b[0]
        else:
            delta = (b.mT @ a.reshape(count, rank, d_in))[:, _rows(shape, found)]
            deltas[name] = delta if found.of_experts else delta[0]
    return deltas


def _matrices(image: torch.Tensor, at: int, count: int, size: int) -> torch.Tensor:
    """Return one linear's A or B, [count, size].

    at: place of the matrix in PackedLayout.rows, odd if all experts share it.
    """
    stored, begin = 1 if at % 2 else count, at - at % 2
    return image[begin : begin + stored * size].view(stored, size).expand(count, size)


def _rows(shape: BaseShape, linear: Linear) -> torch.Tensor:
    """Return the position, among a linear's outputs in an image, of each row of a checkpoint.

    Images have the parts of heads in another order than checkpoints: see BaseShape.parts.
    """
    order: list[int] = []
    for width in linear.outputs:
        count, each = shape.pieces(width)
        parts, begin = shape.parts(width) or (range(each),), len(order)
        order += [
            begin + piece * each + i for part in parts for piece in range(count) for i in part
        ]
    return torch.tensor(order).argsort()
