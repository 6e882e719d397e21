"""Count of a call's tokens for its tenant's bill."""

from dataclasses import replace

from lorikeet.gateway.replica_response import Headers, RequestObserver
from lorikeet.prices import Price
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    Call,
    FinalUsage,
    Refusal,
    RunningUsage,
    StreamItem,
)
from lorikeet.usage.ledger import UsageAccount, UsageCounts, UsageLedger


class UsageObserver(RequestObserver):
    """Observer that adds a call's tokens to the ledger when the call ends.

    A complete answer counts its FinalUsage. An answer that the client or a failure cuts off counts
    its last RunningUsage. A call counts nothing if no replica took it, if it failed or its gateway
    ended before its first bytes, or if its replica was lost and no other went on with the answer.

    ledger: the gateway's usage that is not written to the store yet.
    price: price of the call's tokens.
    """

    def __init__(self, ledger: UsageLedger, call: Call, base_model: str, price: Price) -> None:
        self._ledger, self._price = ledger, price
        self._account = UsageAccount.of(call.tenant, base_model, call.adapter)
        self._flex = call.scheduling.background
        self._used: RunningUsage | FinalUsage = RunningUsage(0)
        self._is_taken = self._has_begun = self._has_failed = False

    @property
    def complete(self) -> FinalUsage | None:
        """Usage of the complete answer; None while there is none."""
        return self._used if isinstance(self._used, FinalUsage) else None

    def __enter__(self) -> None:
        """Do nothing: a call is counted at its end."""

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Add the call's tokens to the ledger."""
        is_complete = isinstance(self._used, FinalUsage)
        failed = self._has_failed or (error is not None and not self._has_begun)
        if is_complete or (self._is_taken and not failed):
            self._ledger.add(self._account, self._counts())

    def on_item(self, item: StreamItem) -> None:
        """Record the tokens used so far, and whether a replica has taken or failed the call."""
        match item:
            case RunningUsage() | FinalUsage():
                self._used = item
            case AnswerHeader():
                self._is_taken, self._has_failed = True, False
            case Attempt():
                self._has_failed = item.failure is not None
            case Refusal():
                self._has_failed = not self._has_begun

    def on_first_bytes(self) -> None:
        """Record that the answer has begun: from now on a failure of the request is counted."""
        self._has_begun = True

    def headers(self) -> Headers:
        """Return no headers."""
        return ()

    def _counts(self) -> UsageCounts:
        used = self._used
        prompt, cached, output = used.prompt_tokens, used.cached_tokens, used.completion_tokens
        cost = self._price.cost(prompt, cached, output)
        counts = UsageCounts(1, prompt, cached, output, cost=cost)
        if not self._flex:
            return counts
        return replace(
            counts,
            flex_prompt_tokens=prompt,
            flex_cached_tokens=cached,
            flex_output_tokens=output,
        )
