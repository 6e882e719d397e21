"""Versions that pins select, and their bytes, which count against the tenant's pin budget."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lorikeet.catalog.changes import Pinned
from lorikeet.catalog.records import PinRecord
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A version of an adapter that a pin keeps loaded.

    image_bytes: bytes of the adapter on each GPU of a replica; the host holds as much for each GPU.
    prompt: the pin's system prompt, with the version's own chat template; None without a prompt.
    """

    ref: AdapterRef
    base_model: str
    image_bytes: int
    prompt: RequestDefaults | None = None


def versions_kept(state: CatalogState, pin: PinRecord | Pinned) -> tuple[PinnedVersion, ...]:
    """Return the usable versions that a pin selects now.

    An alias that splits its requests selects both versions. A tenant's adapters come in order
    of age, oldest first.
    """
    if pin.name is not None:
        record = state.find(pin.tenant, pin.name)
        records = [] if record is None else [record]
    else:
        records = sorted(state.adapters(pin.tenant), key=lambda each: each.versions[0].created)
    return tuple(
        PinnedVersion(
            record.ref(version),
            version.base_model,
            version.gpu_bytes,
            None if pin.prompt is None else _with_template(pin.prompt, version.defaults),
        )
        for record in records
        for version in record.selected(pin.selector)
    )


def charged_bytes(kept: Iterable[PinnedVersion]) -> int:
    """Return the bytes that count against a pin budget: the versions' bytes on one GPU.

    Versions with the same blob (adapter's file) count once, however many pins and replicas keep
    them.
    """
    return sum({version.ref.digest: version.image_bytes for version in kept}.values())


def check_budget(state: CatalogState, change: Pinned, now: float) -> None:
    """Raise Conflict if a pin takes its tenant's pinned bytes beyond the tenant's pin budget.

    A change that does not add pinned bytes is always allowed. Raises UnknownTenant if there is no
    such tenant.

    change: the pin to set.
    now: Unix seconds.
    """
    budget = state.tenant(change.tenant).pin_budget_bytes
    if budget is None:
        return
    pins = [pin for pin in state.pins(now) if pin.tenant == change.tenant]
    replaced = state.pin_of(change.tenant, change.name)
    before = _charge(state, pins)
    after = _charge(state, [*(pin for pin in pins if pin != replaced), change])
    if after > max(budget, before):
        raise Conflict(
            f"the pins of {change.tenant} would take {after} bytes on each GPU, {before} "
            f"without this one, and its budget is {budget}: unpin something, or raise it with "
            f"`lorikeet tenants limit {change.tenant} --pinned-bytes BYTES`",
            param="tenant",
        )


def _with_template(prompt: str, defaults: RequestDefaults | None) -> RequestDefaults:
    own = defaults or RequestDefaults()
    return RequestDefaults(own.chat_template, prompt, tokenizer=own.tokenizer)


def _charge(state: CatalogState, pins: Sequence[PinRecord | Pinned]) -> int:
    return charged_bytes(version for pin in pins for version in versions_kept(state, pin))
