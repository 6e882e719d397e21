"""Meter of one call's tokens for the tenant's bill."""

from collections.abc import Sequence
from dataclasses import replace

from lorikeet.errors import Unavailable
from lorikeet.protocol.messages import Call, FinalUsage, Refusal, StreamItem
from lorikeet.usage.ledger import UsageCounts
from lorikeet_engine.request import Output, Tokens


class BilledTokens:
    """Counter of the tokens of one call for which its tenant is billed.

    A finished answer is billed by its FinalUsage. If the client disconnects, or the answer fails
    halfway, the bill has the prompts that reached their first token and the tokens generated until
    then. A call that was refused, or failed before its first byte, is billed nothing, nor is a call
    that the replica gave up: another replica repeats it or goes on with its answer and bills the
    whole, so tokens are billed once.
    """

    def __init__(self, call: Call, prompts: Sequence[Sequence[int]]) -> None:
        self._n, self._flex = call.n, call.scheduling.background
        self._prompts = [len(prompt) for prompt in prompts]
        self._computed: set[int] = set()
        self._begun = self._refused = False
        self._output_tokens = self._cached_tokens = 0
        self._usage: FinalUsage | None = None

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self._output_tokens

    def on_output(self, output: Output) -> None:
        """Count the generated tokens in an output of the engine, and its prompt's cached tokens."""
        if isinstance(output, Tokens):
            self._output_tokens += len(output.token_ids)
            prompt = output.choice // self._n
            if prompt not in self._computed:
                self._computed.add(prompt)
                self._cached_tokens += output.timings.cached_tokens if output.timings else 0

    def on_item(self, item: StreamItem) -> None:
        """Record that an item was sent to the gateway.

        The item's type decides whether to bill its FinalUsage, the tokens so far, or nothing.
        """
        if isinstance(item, bytes):
            self._begun = True
        elif isinstance(item, FinalUsage):
            self._usage = item
        elif isinstance(item, Refusal):
            self.failed(is_given_up=item.code == Unavailable.code)

    def failed(self, *, is_given_up: bool = False) -> None:
        """Record that the call failed on its own, and not because its client disconnected.

        is_given_up: whether another replica may go on with the answer.
        """
        self._refused = is_given_up or not self._begun

    def counts(self) -> UsageCounts | None:
        """Return the tokens to bill so far; None if the call is not billed."""
        if self._refused:
            return None
        if (usage := self._usage) is not None:
            used = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        else:
            prompt_tokens = sum(self._prompts[prompt] for prompt in self._computed)
            used = prompt_tokens, self._cached_tokens, self._output_tokens
        counts = UsageCounts(1, *used)
        if not self._flex:
            return counts
        prompt, cached, output = used
        return replace(
            counts,
            flex_prompt_tokens=prompt,
            flex_cached_tokens=cached,
            flex_output_tokens=output,
        )
