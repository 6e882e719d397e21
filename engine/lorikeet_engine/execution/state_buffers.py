"""Static tensors from which captured passes read where the states of delta nets are."""

import torch

from lorikeet_engine.kernels.delta_net import CHUNK, Decodes, Prefills
from lorikeet_engine.models.batch import StateRows

_PADDING = -1  # slot of no sequence, and sequence of no chunk


class StateBuffers:
    """Tensors at fixed addresses that tell captured passes where sequences' delta net states are.

    Entries beyond those of a step are padding, which belongs to no sequence.

    prompts: maximum number of sequences of several tokens; launches have programs for each.
    """

    prompts = 64

    def __init__(self, tokens: int, sequences: int, device: torch.device) -> None:
        """Allocate the tensors, with nothing but padding.

        tokens: maximum number of tokens of a pass.
        sequences: maximum number of sequences of a pass.
        """

        def padding(*sizes: int) -> torch.Tensor:
            return torch.full(sizes, _PADDING, dtype=torch.int32, device=device)

        prompts, chunks = padding(self.prompts), _chunks(tokens)
        self._slots, self._tokens = padding(2, sequences)
        self._prefills = Prefills(
            starts=prompts,
            ends=prompts.clone(),
            slots=prompts.clone(),
            chunks=padding(chunks, 2),
            first_chunks=padding(self.prompts + 1),
            saves=padding(chunks),
        )
        self._none_fresh = torch.zeros(0, dtype=torch.int64, device=device)

    def of_decodes(self, sequences: int) -> StateRows:
        """Return the rows that a pass over one token of each of `sequences` sequences reads."""
        return StateRows(Decodes(self._slots[:sequences]), None, self._none_fresh, ())

    def of_any(self, tokens: int) -> StateRows:
        """Return the rows that a pass over `tokens` tokens of any sequences reads."""
        decodes = Decodes(self._slots[:tokens], self._tokens[:tokens])
        prompts, chunks, p = tokens // 2, _chunks(tokens), self._prefills
        prefills = Prefills(
            starts=p.starts[:prompts],
            ends=p.ends[:prompts],
            slots=p.slots[:prompts],
            chunks=p.chunks[:chunks],
            first_chunks=p.first_chunks[: prompts + 1],
            saves=p.saves[:chunks],
        )
        return StateRows(decodes, prefills, self._none_fresh, ())

    def pad(self) -> None:
        """Fill the tensors with padding."""
        for tensor in (self._slots, self._tokens, *self._prefills):
            tensor.fill_(_PADDING)

    @staticmethod
    def fit(rows: StateRows) -> bool:
        """Whether the static tensors have room for the step's sequences of several tokens."""
        return rows.prefills is None or len(rows.prefills.slots) <= StateBuffers.prompts

    def fill(self, rows: StateRows) -> None:
        """Copy the rows of a step that fits to the static tensors, and pad the rest."""
        decodes, prefills = rows.decodes, rows.prefills
        if prefills is None:
            assert decodes is not None, "a step without sequences"
            _fill(self._slots, decodes.slots)
            return
        if decodes is None:
            self._slots.fill_(_PADDING)
        else:
            assert decodes.tokens is not None, "decodes beside prompts without their tokens"
            _fill(self._slots, decodes.slots)
            _fill(self._tokens, decodes.tokens)
        for static, given in zip(self._prefills, prefills, strict=True):
            _fill(static, given)


def _fill(static: torch.Tensor, given: torch.Tensor) -> None:
    static[: len(given)].copy_(given)
    static[len(given) :].fill_(_PADDING)


def _chunks(tokens: int) -> int:
    """Return the maximum number of chunks (of up to CHUNK tokens) of a pass of `tokens` tokens."""
    return tokens // CHUNK + min(StateBuffers.prompts, tokens // 2)
