"""Steps an engine by hand, collects its outputs and records its batches."""

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from lorikeet_engine.adapter import Adapter, Residency
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.execution.kv_tensors import kv_shape
from lorikeet_engine.execution.prompt_scores import LogitsReader
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.request import (
    Failed,
    FinishReason,
    Pooled,
    PromptLogprobs,
    Request,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.sampling.grammar import Grammars
from tests.engine.given_costs import given_costs

PAGE = 16


def build(
    checkpoint: Path,
    source: AdapterSource,
    cache_dir: Path,
    *,
    kv_pages: int = 256,
    grammars: Grammars | None = None,
    measured: bool = False,
    **settings: Any,
) -> Engine:
    """Build an engine of tiny sizes.

    settings: fields of EngineSettings.
    kv_pages: pages of each group of layers.
    measured: whether the engine measures the costs of its steps.
    """
    config = ModelConfig.from_folder(checkpoint, settings.get("max_context"))
    itemsize = 1 if settings.get("kv_dtype") == "fp8" else 4
    shape = Shard(0, settings.get("tensor_parallel", 1)).part_of(config.shape)
    pages = len(config.kv_groups.windows)
    page_bytes = itemsize * math.prod(kv_shape(config, shape, pages, PAGE, "cpu"))
    sizes = {"adapter_gpu_bytes": 4 << 20, "adapter_host_bytes": 8 << 20, **settings}
    sizes |= {"page_size": PAGE, "kv_bytes": kv_pages * page_bytes}
    engine_settings = EngineSettings(model=checkpoint, cache_dir=cache_dir, **sizes)
    with nullcontext() if measured else given_costs():
        return Engine(engine_settings, source, grammars=grammars)


class RecordingRunner:
    """Runner that records every batch before it runs it, and raises `error` once if set."""

    def __init__(self, engine: Engine) -> None:
        self.batches: list[Batch] = []
        self.error: Exception | None = None
        self._runner = engine._runner
        self.kv_windows, self.state_slots = self._runner.kv_windows, self._runner.state_slots
        self.weights, self.model = self._runner.weights, self._runner.model
        engine._runner = self  # type: ignore[assignment]

    @property
    def tokens(self) -> int:
        """Number of tokens computed so far."""
        return sum(len(batch.token_ids) for batch in self.batches)

    def share(self, *arguments: Any) -> None:
        self._runner.share(*arguments)

    def forward(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        self.batches.append(batch)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self._runner.forward(batch, scores)


class Answers:
    """Outputs of an engine, collected by request and choice."""

    def __init__(self, engine: Engine, within_s: float = 60.0) -> None:
        """Start without outputs.

        within_s: longest time that `until` and `all` wait.
        """
        self.engine, self._within_s = engine, within_s
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.outputs: dict[tuple[str, int], list[Tokens]] = {}
        self.finish: dict[tuple[str, int], FinishReason] = {}
        self.scores: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.pooled: dict[tuple[str, int], list[float]] = {}
        self.errors: dict[str, Exception] = {}
        self.pending: dict[str, int] = {}

    def submit(self, request: Request) -> None:
        choices = len(request.prompts) * request.n
        self.pending[request.request_id] = choices - request.made.count(None)
        for choice in range(choices):
            self.tokens.pop((request.request_id, choice), None)
            self.outputs.pop((request.request_id, choice), None)
            self.finish.pop((request.request_id, choice), None)
        self.engine.submit(request)

    def step(self) -> None:
        for output in self.engine.step():
            if isinstance(output, Failed):
                self.errors[output.request_id] = output.error
                del self.pending[output.request_id]
                continue
            choice = (output.request_id, output.choice)
            assert choice not in self.finish, "output after the end"
            if isinstance(output, PromptLogprobs):
                assert choice not in self.tokens, "the prompt is scored after its answer began"
                self.scores.setdefault(choice, []).extend(output.logprobs)
                continue
            if isinstance(output, Pooled):
                assert choice not in self.pooled, "a prompt is pooled twice"
                self.pooled[choice] = output.values.tolist()
                continue
            self.tokens.setdefault(choice, []).extend(output.token_ids)
            self.outputs.setdefault(choice, []).append(output)
            if output.finish is not None:
                self.finish[choice] = output.finish
                self.pending[output.request_id] -= 1
                if not self.pending[output.request_id]:
                    del self.pending[output.request_id]

    def until(self, holds: Callable[[], Any], timeout_s: float | None = None) -> None:
        """Step until `holds` is true."""
        deadline = time.monotonic() + (timeout_s or self._within_s)
        while not holds():
            assert time.monotonic() < deadline, f"pending: {self.pending}"
            self.engine.wait(deadline - time.monotonic())
            self.step()

    def all(self) -> None:
        """Step until every request has ended."""
        self.until(lambda: not self.pending)

    def of(self, request_id: str, choice: int = 0) -> list[int]:
        return self.tokens[request_id, choice]


def load_adapters(answers: Answers, refs: Iterable[Adapter | None]) -> None:
    """Step the engine until every adapter is on the device, so that all can share one batch."""
    wanted = [member for ref in refs if ref is not None for member in ref.members]
    for ref in wanted:
        answers.engine.pin(ref)
    answers.until(lambda: all(answers.engine.residency(r) is Residency.GPU for r in wanted))


def compile_grammars(engine: Engine) -> None:
    """Wait until no request waits for its grammar, so that all are taken in the next step."""
    wait([choice.compiled for choice in engine._requests.submitted if choice.compiled])


def greedy(
    request_id: str,
    *prompts: list[int],
    adapter: Adapter | None = None,
    max_tokens: int = 12,
    n: int = 1,
    salt: str = "",
    **sampling: Any,
) -> Request:
    """Return a greedy request that generates max_tokens tokens."""
    params = SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}
    )
    return Request(request_id, tuple(map(tuple, prompts)), params, n, adapter, salt)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


def nothing_is_held(engine: Engine) -> bool:
    """Whether an engine runs nothing and holds neither pages nor states nor leases."""
    status = engine.status()
    live, states = status.live, status.states.running if status.states else 0
    leases = sum(adapter.leases for adapter in engine.adapters())
    return (live.running, live.waiting, live.kv_pages_used, states, leases) == (0, 0, 0, 0, 0)
