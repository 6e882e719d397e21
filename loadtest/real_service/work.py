"""The work that is done over HTTP and, to compare, by the engine alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.client import Session
from loadtest.real_service.adapters import model_name
from loadtest.streamed_answer import LoadRequest


@dataclass(frozen=True, slots=True)
class Work:
    """`streams` at a time, `rounds` one after another; adapters are dealt round."""

    prompt_tokens: int
    output_tokens: int
    streams: int
    rounds: int
    adapters: int

    @classmethod
    def parse(cls, lengths: str, **sizes: Any) -> "Work":
        """lengths: 256/128, tokens in and out. Raises ValueError."""
        prompt, _, output = lengths.partition("/")
        return cls(int(prompt), int(output), **sizes)

    @property
    def label(self) -> str:
        """Its lengths."""
        return f"{self.prompt_tokens}/{self.output_tokens}"

    def sessions(self, seed: int) -> Sequence[Session]:
        """A session for each stream; other prompts for each seed."""
        numbers = range(self.streams * self.rounds)
        return [
            Session(
                0.0,
                tuple(self._request(number, seed) for number in numbers[stream :: self.streams]),
            )
            for stream in range(self.streams)
        ]

    def _request(self, number: int, seed: int) -> LoadRequest:
        model = model_name(number % self.adapters)
        prompt_seed = seed * 1_000_003 + number
        return LoadRequest(model, self.prompt_tokens, self.output_tokens, prompt_seed)
