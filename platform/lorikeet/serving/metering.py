"""What a replica counts for its tenants, and how it gets into the store."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from lorikeet.api.messages import Call, Closing, Refusal, StreamItem
from lorikeet.catalog.store import ObjectStore
from lorikeet.usage.counts import Account, Counts
from lorikeet.usage.ledger import Ledger
from lorikeet.usage.writer import UsageWriter
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import EngineError
from lorikeet_engine.host import EngineHost
from lorikeet_engine.request import Output, Tokens
from lorikeet_engine.status import SlotUse

_GATHER_S = 5.0
_LAST_FLUSH_S = 10.0


class Meter:
    """One call's tokens as they are made.

    An answer that was made to its end counts as it says itself. One that a client left, or that
    failed in its midst, counts the prompts that were computed to their first token and the tokens
    that came until then. A call that was refused, or failed before the client had anything, counts
    nothing: so what another replica makes anew is counted once.
    """

    def __init__(self, call: Call, prompts: Sequence[Sequence[int]]) -> None:
        self._n = call.n
        self._prompts = [len(prompt) for prompt in prompts]
        self._computed: set[int] = set()
        self._begun = self._refused = False
        self._output_tokens = self._cached_tokens = 0
        self._closing: Closing | None = None

    def made(self, outputs: Iterable[Output]) -> None:
        """What the engine made."""
        for output in outputs:
            if isinstance(output, Tokens):
                self._output_tokens += len(output.token_ids)
                prompt = output.choice // self._n
                if prompt not in self._computed:
                    self._computed.add(prompt)
                    self._cached_tokens += output.course.cached_tokens if output.course else 0

    def told(self, item: StreamItem) -> None:
        """What goes to the gateway."""
        if isinstance(item, bytes):
            self._begun = True
        elif isinstance(item, Closing):
            self._closing = item
        elif isinstance(item, Refusal):
            self.failed()

    def failed(self) -> None:
        """It ends now, and not because the client left."""
        self._refused = not self._begun

    def counts(self) -> Counts | None:
        """What it has used until now; None is nothing at all."""
        if self._refused:
            return None
        if (closing := self._closing) is not None:
            return Counts(
                1, closing.prompt_tokens, closing.cached_tokens, closing.completion_tokens
            )
        prompt_tokens = sum(self._prompts[prompt] for prompt in self._computed)
        return Counts(1, prompt_tokens, self._cached_tokens, self._output_tokens)


class Metering:
    """A replica's ledger, and the thread that writes it down."""

    def __init__(
        self, store: ObjectStore, engine: EngineHost, base_model: str, interval_s: float
    ) -> None:
        self._engine, self._base_model = engine, base_model
        self._ledger = Ledger()
        self._writer = UsageWriter(store, self._ledger, interval_s, self._gather)
        self._writer.start()

    @contextmanager
    def measured(self, call: Call, prompts: Sequence[Sequence[int]]) -> Iterator[Meter]:
        """Count a call, however it ends."""
        meter = Meter(call, prompts)
        try:
            yield meter
        except EngineError:
            meter.failed()
            raise
        finally:
            self._count(call, meter)

    def close(self) -> None:
        """Write what there is. The engine must still answer."""
        self._writer.close(_LAST_FLUSH_S)

    def _count(self, call: Call, meter: Meter) -> None:
        counts = meter.counts()
        if counts is not None:
            self._ledger.add(self._account(call.tenant, call.adapter), counts)

    def _gather(self) -> None:
        """Slots and loads, which the engine's process counts."""
        asked = self._engine.take_use()
        asked.add_done_callback(self._book)  # even if it comes late: it is told once
        with suppress(EngineError, TimeoutError):
            asked.result(_GATHER_S)

    def _book(self, answered: Future[list[SlotUse]]) -> None:
        if answered.exception() is None:
            for use in answered.result():
                if use.tenant:  # an admin's trial is nobody's
                    account = self._account(use.tenant, use.ref)
                    slots = Counts(slot_s=use.leased_s, loads=use.loads, load_bytes=use.load_bytes)
                    self._ledger.add(account, slots)

    def _account(self, tenant: str, adapter: AdapterRef | None) -> Account:
        label = f"{adapter.tenant}/{adapter.name}" if adapter else None
        return Account(tenant, self._base_model, label)
