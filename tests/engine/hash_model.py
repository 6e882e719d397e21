"""Model with predictable tokens: each is a hash of all that the model reads from its KV pages.

It takes the place of Model under the real engine. Any fault on the way, a page given to another
sequence, a token lost or taken twice, an adapter in the wrong slot, becomes a wrong token.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loadtest.engine.random_model import write_config
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.adapter_format.families import LayerKind
from lorikeet_engine.adapter_format.shape import RecurrentShape
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.execution import batch_builder
from lorikeet_engine.execution.memory_plan import least_states, state_bytes
from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models.batch import Batch, StateRows
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.kv_groups import KvGroups
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.request import FinishReason, SamplingParams
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.penalties import Penalties
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine.descending_grammar import DescendingGrammars
from tests.engine.given_costs import given_costs

PAGE = 4
VOCAB = 64
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
SHAPE = BaseShape.from_config(CONFIG)
WHOLE = (None,)
WINDOWED = (None, 6, 6)  # of three groups of layers, two keep only the pages of a window


class HashModel:
    """Keeps (token, position, mark) as a token's key; the mark is a number from the token's
    adapter.

    Groups of layers with a window keep the same keys, and must agree with the group without. With
    states, a sequence's state is a hash of its tokens, and must agree with its keys.
    before: called with every batch before it is computed; may raise.
    after: called after every batch; may raise.
    """

    def __init__(self, config: ModelConfig, *, states: bool = False) -> None:
        self.config, self.shape = config, config.shape
        if states:
            kinds, net = (LayerKind.DELTA_NET,), RecurrentShape(1, 1, 1, 1, 2)
            self.shape = replace(config.shape, kinds=kinds, recurrent=net)
        self.device, self.dtype, self.generates = torch.device("cpu"), torch.float32, True
        self.tokens = 0  # tokens computed so far
        self.started = False  # at an engine's start sequences share pages as they never do later
        self.before: Callable[[Batch], None] = lambda batch: None
        self.after: Callable[[], None] = lambda: None

    def forward(
        self,
        batch: Batch,
        kv: torch.Tensor,
        lora: LoraWeights,
        attention: object,
        states: RecurrentStates | None = None,
    ) -> torch.Tensor:
        self.before(batch)
        self.tokens += len(batch.token_ids)
        keys = kv[0, 0].flatten(0, 1).squeeze(1)  # [slots, head_dim]
        stored = batch.token_ids.float(), batch.positions.float(), _marks(batch, lora)
        for slots in batch.kv_slots:
            keys[slots, :3] = torch.stack(stored, 1)
        hidden = torch.full((len(batch.token_ids), 1), torch.nan)
        windows = self.config.kv_groups.windows
        for i, (start, end) in enumerate(pairwise(batch.query_starts.tolist())):
            whole, *others = (_read(keys, table, i) for table in batch.page_tables)
            before = len(whole) - (end - start)
            hidden[start:end, 0] = torch.tensor(_hashes(whole, before))
            if batch.states is not None and states is not None and self.started:
                _update(states.matrices[0].flatten(), batch.states, start, whole, before)
            for window, read in zip(windows[1:], others, strict=True):
                seen = min(len(whole), end - start - 1 + window)
                same = np.array_equal(read[-seen:], whole[-seen:])
                assert same or not self.started, "keys of a window are lost"
                assert len(read) < seen + PAGE, "it has pages that nobody sees"
        self.after()
        return hidden

    def logits(
        self, hidden: torch.Tensor, lora: LoraWeights, segments: Segments | None
    ) -> torch.Tensor:
        return _logits(hidden + _shifts(len(hidden), lora, segments))


def build(
    folder: Path,
    source: AdapterSource,
    *,
    kv_pages: int,
    windows: tuple[int | None, ...] = WHOLE,
    states: bool = False,
    cached_states: int = 5,
    **settings: Any,
) -> tuple[Engine, HashModel]:
    """Build an engine over a new HashModel.

    windows: windows of the model's groups of layers.
    states: whether sequences have states.
    cached_states: slots for cached states, beside those of running sequences.
    """
    if not (folder / "model").exists():
        write_config(folder / "model", CONFIG)
    config = ModelConfig.from_folder(folder / "model", settings.get("max_context"))
    config = replace(config, kv_groups=KvGroups(1, windows, ()))
    model = HashModel(config, states=states)
    sizes = {"adapter_gpu_bytes": 1 << 20, "adapter_host_bytes": 1 << 20, **settings}
    sizes |= {"page_size": PAGE, "kv_bytes": kv_pages * 2 * 4 * PAGE * config.shape.head_dim}
    settings = EngineSettings(model=folder / "model", cache_dir=folder / "cache", **sizes)
    if states:
        slots = least_states(settings) + cached_states
        settings = replace(settings, state_bytes=slots * state_bytes(model.shape, settings))
    with given_costs():
        engine = Engine(settings, source, lambda *_, **__: model, DescendingGrammars())
    model.tokens = 0
    model.started = True
    return engine, model


@cache
def predict(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    seed: int,
    context: int,
    mark: float = 0.0,
    shift: float = 0.0,
) -> tuple[list[int], FinishReason]:
    """Return the expected tokens of a choice and its finish reason.

    seed: the choice's seed.
    context: the engine's context length.
    mark, shift: mark and shift of the adapter; 0 without an adapter.
    """
    eos = () if sampling.ignore_eos else (CONFIG["eos_token_id"],)
    stops, said = (*sampling.stop_token_ids, *eos), list[int]()
    while len(said) < min(sampling.max_tokens, context - len(prompt)):
        tokens = np.array([*prompt, *said], np.float32)
        read = np.stack([tokens, np.arange(len(tokens)), np.full(len(tokens), mark)], 1)
        impossible = set(range(VOCAB)) - _possible(sampling, said, set(stops))
        penalties = Penalties(1, VOCAB, torch.device("cpu"))
        slot = penalties.begin(sampling, prompt, said) if sampling.changes_logits else None
        row = SamplingRow(sampling, seed, len(said), tuple(impossible), slot)
        logits = _logits(torch.tensor([[_hash(read) + shift]]))
        token = int(Sampler(penalties).sample(logits, [row])[0])
        if token in stops:
            return said, FinishReason.STOP
        said.append(token)
        if sampling.grammar is not None and token == 0:
            return said, FinishReason.STOP
    return said, FinishReason.LENGTH


def predict_scores(prompt: tuple[int, ...], mark: float = 0.0, shift: float = 0.0) -> list[float]:
    """Return log probabilities of a prompt's tokens but the first; mark, shift as in `predict`."""
    tokens = np.array(prompt, np.float32)
    read = np.stack([tokens, np.arange(len(tokens)), np.full(len(tokens), mark)], 1)
    hashes = torch.tensor(_hashes(read, 0)[:-1])
    logprobs = _logits(hashes.unsqueeze(-1) + shift).log_softmax(-1)
    return [float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=True)]


def _possible(sampling: SamplingParams, said: list[int], stops: set[int]) -> set[int]:
    """Return the tokens that may follow, under a Descending grammar or none.

    said: output tokens so far.
    stops: tokens that end the choice.
    """
    text, may_end = set(range(VOCAB)), True
    if sampling.grammar is not None:
        matcher = DescendingGrammars().compile(sampling.grammar)
        for token in said:
            matcher.accept(token)
        text, may_end = matcher.possible, matcher.may_end
    if len(said) < sampling.min_tokens and text - stops:
        return text - stops
    return text | stops if may_end else text


def _logits(hashes: torch.Tensor) -> torch.Tensor:
    """Return logits that fall from each row's hash upwards, modulo VOCAB. hashes: [rows, 1]."""
    return -0.5 * torch.remainder(torch.arange(VOCAB) - hashes, VOCAB)


def _read(keys: torch.Tensor, table: PageTable, sequence: int) -> npt.NDArray[np.generic]:
    """Read a sequence's entries from its pages. keys: [slots, head_dim]."""
    pages = torch.from_numpy(table.pages[table.starts[sequence] : table.starts[sequence + 1]])
    at = pages.long().repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(len(pages))
    return keys[at[: table.kv_lengths[sequence]], :3].numpy()


def _update(
    states: torch.Tensor,
    rows: StateRows,
    first: int,
    whole: npt.NDArray[np.generic],
    before: int,
) -> None:
    """Check a sequence's state before a step, and update and save it.

    states: [slots].
    first: index of the sequence's first token in the step.
    whole: the sequence's entries in its pages, of which the first `before` are of earlier steps.
    """

    def state(tokens: int) -> float:
        return float(zlib.crc32(np.ascontiguousarray(whole[:tokens], np.float32)) % 2**24)

    slot, saves = _places(rows, first)
    assert (slot in rows.fresh.tolist()) == (before == 0)
    assert before == 0 or states[slot] == state(before), "a state of other tokens"
    states[slot] = state(len(whole))
    for token, to in saves.items():
        states[to] = state(before + token - first + batch_builder.CHUNK)


def _places(rows: StateRows, first: int) -> tuple[int, dict[int, int]]:
    """Return the slot of the sequence whose first token in the step is `first`, and its saves.

    The saves are slots of states to save, by the first token of the chunk that they follow.
    """
    if (decodes := rows.decodes) is not None:
        tokens = range(len(decodes.slots)) if decodes.tokens is None else decodes.tokens.tolist()
        if (slot := dict(zip(tokens, decodes.slots.tolist(), strict=True)).get(first)) is not None:
            return slot, {}
    prefills = rows.prefills
    assert prefills is not None, "a token of no sequence"
    sequence = prefills.starts.tolist().index(first)
    chunks = zip(prefills.chunks.tolist(), prefills.saves.tolist(), strict=True)
    saves = {token: to for (owner, token), to in chunks if owner == sequence and to >= 0}
    return int(prefills.slots[sequence]), saves


def _hash(read: npt.NDArray[np.generic]) -> float:
    return float(zlib.crc32(np.ascontiguousarray(read, np.float32)) % VOCAB)


def _hashes(read: npt.NDArray[np.generic], first: int) -> list[float]:
    """Return _hash(read[: row + 1]) of each row from `first` on."""
    rows = np.ascontiguousarray(read, np.float32)
    whole, found = zlib.crc32(rows[:first]), list[float]()
    for row in rows[first:]:
        whole = zlib.crc32(row, whole)
        found.append(float(whole % VOCAB))
    return found


def shift_of(first: float) -> float:
    """Return an adapter's shift of the hash: a whole number made from the first number of its
    lm_head.
    """
    return float(int(100 * first))


def _shifts(rows: int, lora: LoraWeights, segments: Segments | None) -> torch.Tensor:
    """Return [rows, 1]: the shift of each row's adapter, read from its lm_head in the arena."""
    shifts = torch.zeros(rows, 1)
    if segments is not None:
        place = SHAPE.outer_layer, SHAPE.index("lm_head"), 0
        columns = segments.slots, segments.starts, segments.lengths
        for slot, start, length in zip(*columns, strict=True):
            first = lora.arena[lora.table[(slot, *place)]]
            shifts[start : start + length] = shift_of(first.item())
    return shifts


def _marks(batch: Batch, lora: LoraWeights) -> torch.Tensor:
    """Return for each token the first number of its adapter's first matrix, read from the arena."""
    marks = torch.zeros(len(batch.token_ids))
    if batch.segments is not None:
        s = batch.segments
        for slot, start, length in zip(s.slots, s.starts, s.lengths, strict=True):
            marks[start : start + length] = lora.arena[lora.table[slot, 0, 0, 0]]
    return marks
