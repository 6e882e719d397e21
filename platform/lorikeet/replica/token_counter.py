"""Counter of one call's tokens while its answer grows."""

from collections.abc import Sequence

from lorikeet.protocol.messages import Call, RunningUsage
from lorikeet_engine.request import Output, Tokens


class TokenCounter:
    """Counter of the tokens that a call has used so far.

    A call with max_tokens 0 uses only its prompts' tokens: its answer leaves out the one token that
    the engine generates for each prompt.

    prompts: token ids of each prompt.
    """

    def __init__(self, call: Call, prompts: Sequence[Sequence[int]]) -> None:
        self._n, self._prompts = call.n, [len(prompt) for prompt in prompts]
        self._answers = call.max_tokens != 0
        self._computed: set[int] = set()
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0

    @property
    def usage(self) -> RunningUsage:
        """Tokens of the prompts for which a token was generated, and tokens of all choices."""
        return RunningUsage(self._output_tokens, self._prompt_tokens, self._cached_tokens)

    def has_grown_since(self, usage: RunningUsage, tokens: int) -> bool:
        """Return whether, since `usage` was read, a token was generated for another prompt, or at
        least `tokens` tokens in all.
        """
        made = self._output_tokens - usage.completion_tokens
        return made >= tokens or self._prompt_tokens > usage.prompt_tokens

    def add(self, output: Output) -> None:
        """Count the generated tokens in an output of the engine, and its prompt's tokens."""
        if isinstance(output, Tokens):
            self._output_tokens += len(output.token_ids) if self._answers else 0
            prompt = output.choice // self._n
            if prompt not in self._computed:
                self._computed.add(prompt)
                self._prompt_tokens += self._prompts[prompt]
                self._cached_tokens += output.timings.cached_tokens if output.timings else 0
