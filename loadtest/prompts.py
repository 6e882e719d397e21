"""Prompts of a wanted length in tokens, for a tokenizer that only the server has."""

import random
from collections.abc import Callable
from dataclasses import dataclass

# Of one length, so that byte-level tokenizers too make every prompt as long as it should be.
WORDS = (
    *("that", "with", "have", "this", "will", "your", "from", "they", "know", "want", "been"),
    *("good", "much", "some", "time", "very", "when", "come", "here", "just", "like", "long"),
    *("make", "many", "more", "only", "over", "such", "take", "than", "them", "well"),
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random words, so that prompts share hardly a prefix and no cache answers for the engine.

    overhead: tokens of the chat template. tokens_per_word: a mean over the words.
    """

    overhead: float
    tokens_per_word: float

    @classmethod
    def measure(cls, prompt_tokens: Callable[[str], int]) -> "Prompts":
        """Learn both from the server's own counts for all words once, and all twice."""
        once, twice = (prompt_tokens(" ".join(WORDS * times)) for times in (1, 2))
        tokens_per_word = max(1, twice - once) / len(WORDS)
        return cls(max(0.0, once - len(WORDS) * tokens_per_word), tokens_per_word)

    def text(self, tokens: int, rng: random.Random) -> str:
        """Words that make about `tokens` tokens with the template, at least one word."""
        count = max(1, int((tokens - self.overhead) / self.tokens_per_word))
        return " ".join(rng.choices(WORDS, k=count))
