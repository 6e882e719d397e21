"""Sources of drafts that know a sequence's next tokens, and now and then say another."""

from collections.abc import Callable, Iterable
from random import Random

import pytest

from lorikeet_engine.request import DraftSource, FinishReason
from lorikeet_engine.scheduling import draft_budget
from lorikeet_engine.scheduling.prompt_lookup import PromptLookup
from lorikeet_engine.scheduling.recent_answers import AdapterAnswers
from lorikeet_engine.scheduling.sequence import Sequence


class HalfRight:
    """Predictor of one sequence's tokens, of which a fifth is wrong.

    expected: the sequence's whole output.
    """

    source = DraftSource.LOOKUP

    def __init__(self, sequence: Sequence, expected: list[int], chance: Random) -> None:
        self.sequence, self.expected, self.chance = sequence, expected, chance
        self.acceptance = self.first_acceptance = chance.choice((0.5, 0.9, 1.0))

    def extend(self, tokens: Iterable[int]) -> None:
        pass

    def end(self, answers: AdapterAnswers) -> None:
        pass

    def predict(self, most: int, _pause: int = 0) -> list[int]:
        made = len(self.sequence.tokens) - self.sequence.prompt_length
        right = self.expected[made : made + most]
        return [token if self.chance.random() < 0.8 else 9 for token in right]


def draft_half_right(
    patch: pytest.MonkeyPatch, expected: Callable[[str, int], list[int]], seed: int = 0
) -> None:
    """Let all sequences of new engines draft at any cost, from a HalfRight.

    expected: returns the output of a request's choice.
    """
    chance = Random(seed)

    def begin_lookup(sequence: Sequence, _answers: AdapterAnswers) -> HalfRight:
        tokens = expected(sequence.request.request_id, sequence.choice)
        sequence.lookup = HalfRight(sequence, tokens, chance)  # type: ignore[assignment]
        return sequence.lookup  # type: ignore[return-value]

    patch.setattr(draft_budget, "_LEAST_GAIN", 0.0)
    patch.setattr(Sequence, "begin_lookup", begin_lookup)


def predict_half_right(
    patch: pytest.MonkeyPatch, expected: Callable[[str, int], list[int]], seed: int = 0
) -> None:
    """Let a draft LoRA alone draft, at any cost. A fifth of its predictions is wrong.

    expected: returns the output of a request's choice.
    """
    accept, chance = Sequence.accept, Random(seed)

    def given(
        sequence: Sequence, token: int, predicted: tuple[int, ...] = ()
    ) -> FinishReason | None:
        begin = len(sequence.tokens) - sequence.prompt_length + 1
        output = expected(sequence.request.request_id, sequence.choice)
        right = output[begin : begin + len(predicted)]
        said = tuple(token if chance.random() < 0.8 else 9 for token in right)
        return accept(sequence, token, said)

    patch.setattr(draft_budget, "_LEAST_GAIN", 0.0)
    patch.setattr(draft_budget, "_LEAST_ACCEPTANCE", 0.0)
    patch.setattr(PromptLookup, "predict", lambda *_: [])
    patch.setattr(Sequence, "accept", given)
