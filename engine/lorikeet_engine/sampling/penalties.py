"""Logit biases and penalties, with each sequence's token counts on the device.

OpenAI's frequency and presence penalties cover a sequence's output; the repetition penalty covers
prompt and output, as in transformers and vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.penalties import (
    IN_OUTPUT,
    IN_PROMPT,
    PENALTIES,
    PenaltyState,
    penalise,
)
from lorikeet_engine.request import SamplingParams

V = TypeVar("V")


class PenaltySlot:
    """A sequence's slot in Penalties, held from its first sampled token until `release`."""

    def __init__(self, pool: "Penalties", index: int) -> None:
        self.index = index
        self._pool: Penalties | None = pool

    def release(self) -> None:
        """Return the slot to the pool of free slots. Safe to call twice."""
        if self._pool is not None:
            self._pool._take_back(self.index)
            self._pool = None


class Penalties:
    """Biases, penalties and token counts of sequences, with a slot for each sequence."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        """Allocate the slots, with 8 bytes a slot for each token of the vocabulary.

        slots: number of slots.
        vocab: number of tokens in the vocabulary.
        """
        self._state = PenaltyState(
            torch.zeros((slots, vocab), dtype=torch.int32, device=device),
            torch.zeros((slots, vocab), dtype=torch.float32, device=device),
            torch.zeros((slots, PENALTIES), dtype=torch.float32, device=device),
        )
        self._slots = slots
        self.release_all()

    @property
    def free(self) -> int:
        """Number of slots that no sequence holds."""
        return len(self._free)

    def begin(
        self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> PenaltySlot:
        """Reserve a slot for a sequence. The next `change` writes the sequence's state to it.

        The choices of a request should pass the identical params and prompt objects: these are
        uploaded once for all the choices.

        prompt, output: the sequence's token ids.
        """
        assert self._free, "more sequences are sampled at once than there are slots"
        index = self._free.pop()
        self._new[index] = params, prompt, output
        return PenaltySlot(self, index)

    def change(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Copy some rows of logits, and apply penalties and biases to the copies.

        Returns the copies, [n, vocab] float32.

        logits [all rows, vocab]: stay as they are.
        rows [n] int64: indices of the rows to copy.
        slots [n] int64: slot of each row's sequence.
        """
        if self._new:
            self._fill()
        return penalise(logits, rows, slots, self._state)

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count tokens that were just sampled, each in its sequence's slot.

        slots [n] int64: the sequences' slots.
        tokens [n] int64: token sampled for each sequence; below 0: none.
        """
        seen = self._state.seen
        places = slots * seen.shape[1] + tokens.clamp(min=0)
        seen.view(-1).scatter_add_(0, places, IN_OUTPUT * (tokens >= 0).to(seen.dtype))

    def release_all(self) -> None:
        """Free all slots. PenaltySlots created before must not be used any more."""
        self._free = list(reversed(range(self._slots)))
        self._new: dict[int, tuple[SamplingParams, Sequence[int], Sequence[int]]] = {}

    def _take_back(self, index: int) -> None:
        self._new.pop(index, None)
        self._free.append(index)

    def _fill(self) -> None:
        """Write the initial states of all slots that were reserved since the last call."""
        new, self._new = self._new, {}
        device, seen, biases = self._state.seen.device, self._state.seen, self._state.biases
        slots = upload(np.array(list(new), np.int64), device)
        penalties = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for p, _, _ in new.values()
        ]
        self._state.penalties[slots] = upload(np.array(penalties, np.float32), device)
        seen.index_fill_(0, slots, 0)
        biases.index_fill_(0, slots, 0.0)
        prompts = {slot: prompt for slot, (p, prompt, _) in new.items() if p.has_repetition_penalty}
        if prompts:
            own, others = _alike(prompts)
            # a tensor on the device: the host would wait for the copy of a number
            seen.index_put_(_places(own, device), seen.new_full((), IN_PROMPT))
            _copy_rows(seen, others)
        outputs = {slot: output for slot, (p, _, output) in new.items() if p.has_penalties}
        if any(outputs.values()):
            at, tokens = _places(outputs, device)
            self.count(at, tokens)
        biased = {slot: p.logit_bias for slot, (p, _, _) in new.items() if p.logit_bias}
        if biased:
            own_biases, others = _alike(biased)
            values = [bias for each in own_biases.values() for _, bias in each]
            ids = {slot: [t for t, _ in each] for slot, each in own_biases.items()}
            at, tokens = _places(ids, device)
            added = upload(np.array(values, np.float32), device)
            # index_put_ would sort the indices, and in some releases of torch block the host
            biases.view(-1).scatter_add_(0, at * biases.shape[1] + tokens, added)
            _copy_rows(biases, others)


def _alike(values: Mapping[int, V]) -> tuple[dict[int, V], dict[int, list[int]]]:
    """Group slots whose values are the identical object.

    Returns two mappings, both by the first slot of each group: the group's value, and the group's
    other slots.
    """
    first: dict[int, int] = {}
    own, others = dict[int, V](), dict[int, list[int]]()
    for slot, value in values.items():
        if (owner := first.setdefault(id(value), slot)) == slot:
            own[slot] = value
        else:
            others.setdefault(owner, []).append(slot)
    return own, others


def _copy_rows(state: torch.Tensor, others: Mapping[int, list[int]]) -> None:
    """Copy rows of a tensor to other slots.

    others: slots to copy to, by the slot to copy from.
    """
    for owner, slots in others.items():
        at = upload(np.array(slots, np.int64), state.device)
        state[at] = state[owner].clone()


def _places(
    tokens: Mapping[int, Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upload all pairs of a slot and one of its tokens: slots and tokens, both int64 [pairs]."""
    lengths = [len(some) for some in tokens.values()]
    slots = np.repeat(np.array(list(tokens), np.int64), lengths)
    ids = np.concatenate([np.array(some, np.int64) for some in tokens.values()])
    at, columns = upload(np.stack((slots, ids)), device)
    return at, columns
