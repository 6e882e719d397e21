"""Rules of pins: their options and the operations that set and remove them."""

from dataclasses import replace
from typing import TypedDict, Unpack

from lorikeet.catalog.changes import Pinned, Unpinned
from lorikeet.catalog.names import DEFAULT_ALIAS, check_name, check_selector
from lorikeet.catalog.records import PinRecord
from lorikeet.catalog.rules.adapters import Changes, usable_versions
from lorikeet.catalog.rules.limits import check_expiry, check_options, check_text
from lorikeet.catalog.rules.pin_budget import check_budget, versions_kept
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict, InvalidInput, NotFound, UnknownModel
from lorikeet.request_defaults import MAX_SYSTEM_PROMPT_BYTES
from lorikeet_engine.adapter import Residency

LONGEST_REASON = 200  # characters


class PinOptions(TypedDict, total=False):
    """Options of a pin. Left out: alias prod, tier GPU, all replicas, priority 0, "", no expiry,
    prompt and draft of the earlier pin.

    selector: alias or version number to keep loaded.
    tier: lowest tier to keep it on: disk, host or GPU.
    replicas: number of replicas; None: all replicas of the base model.
    priority: if not all pins fit, higher priorities are kept first.
    reason: text that is shown with the pin.
    expires: Unix seconds; None: never.
    prompt: system prompt whose KV pages replicas compute before users ask; None: that of the
        earlier pin, if there is one. Only for pins of one adapter.
    draft: whether the adapter drafts tokens of all answers of its base model, on replicas whose
        speculation is `draft`; None: as the earlier pin says, if there is one. Only for one adapter
        on the GPUs of all replicas.
    """

    selector: str
    tier: Residency
    replicas: int | None
    priority: int
    reason: str
    expires: float | None
    prompt: str | None
    draft: bool | None


def pin_change(tenant: str, name: str | None, now: float, **options: Unpack[PinOptions]) -> Pinned:
    """Build the change that sets a pin. Raises InvalidInput if an option is not allowed.

    name: adapter; None pins all adapters of the tenant.
    now: Unix seconds.
    options: selector, tier, replicas and the others of PinOptions.
    """
    change = Pinned(tenant=tenant, name=name, **options)
    check_name(tenant, "tenant")
    if name is not None:
        check_name(name, "name")
    elif change.selector != DEFAULT_ALIAS:
        raise InvalidInput(
            f"selector={change.selector!r}: a tenant's pin keeps what {DEFAULT_ALIAS} points at",
            param="selector",
        )
    check_selector(change.selector)
    if change.tier is Residency.REMOTE:
        raise InvalidInput("tier=remote promises nothing: want disk, host or gpu", param="tier")
    if change.replicas is not None and change.replicas < 1:
        raise InvalidInput(
            f"replicas={change.replicas}: want an integer ≥ 1, or none", param="replicas"
        )
    check_options({"priority": change.priority})
    check_expiry(change.expires, now)
    check_text(change.reason, LONGEST_REASON, "reason")
    if change.prompt is not None:
        _check_prompt(change.prompt, name)
    return change


def pin(state: CatalogState, change: Pinned, now: float) -> Changes:
    """Return the changes that set the pin of an adapter or a tenant.

    change: the pin to set; it keeps the earlier pin's prompt and draft if its own are None.
    now: Unix seconds.

    Raises UnknownModel, UnknownTenant, InvalidInput if the adapter cannot draft, and Conflict
    beyond the tenant's pin budget (limit on the bytes of its pinned adapters), or if the base model
    has another draft.
    """
    if change.name is not None:
        record = state.adapter(change.tenant, change.name)
        if record.select(change.selector) is None:
            raise UnknownModel(
                f"{record.label}@{change.selector} cannot be pinned: {usable_versions(record)}",
                param="selector",
            )
    before = state.pin_of(change.tenant, change.name)
    if before is not None and not before.expired(now):
        prompt = before.prompt if change.prompt is None else change.prompt
        draft = before.draft if change.draft is None else change.draft
        change = replace(change, prompt=prompt, draft=draft)
    if change.draft:
        _check_draft(state, change, now)
    check_budget(state, change, now)
    return (change,)


def remove_prompt(state: CatalogState, tenant: str, name: str) -> Changes:
    """Return the changes that remove the system prompt of an adapter's pin, and keep the pin.

    Raises NotFound if there is no pin with a prompt.
    """
    pin = state.pin_of(tenant, name)
    if pin is None or pin.prompt is None:
        raise NotFound(f"{f'{tenant}/{name}'!r} has no pin with a prompt")
    return (replace(pinned_as(pin), prompt=None),)


def pinned_as(pin: PinRecord) -> Pinned:
    """Return the change that sets a pin with the options of a record."""
    return Pinned(
        tenant=pin.tenant,
        name=pin.name,
        selector=pin.selector,
        tier=pin.tier,
        replicas=pin.replicas,
        priority=pin.priority,
        reason=pin.reason,
        expires=pin.expires,
        prompt=pin.prompt,
        draft=pin.draft,
    )


def unpin(state: CatalogState, tenant: str, name: str | None) -> Changes:
    """Return the changes that remove the pin of an adapter, or of a tenant if `name` is None.

    Raises NotFound if there is no such pin.
    """
    if state.pin_of(tenant, name) is None:
        raise NotFound(f"{tenant if name is None else f'{tenant}/{name}'!r} is not pinned")
    return (Unpinned(tenant=tenant, name=name),)


def _check_draft(state: CatalogState, change: Pinned, now: float) -> None:
    """Raise InvalidInput if an adapter cannot draft, and Conflict if its base model has a draft."""
    if change.name is None or change.tier is not Residency.GPU or change.replicas is not None:
        raise InvalidInput(
            "a draft is one adapter on the GPUs of all replicas: pin an adapter, with tier gpu and "
            "without a number of replicas; if the adapter drafts now, with --no-draft (draft: "
            "false)",
            param="draft",
        )
    versions = versions_kept(state, change)
    for version in versions:
        kinds = {
            "has a classification head": version.ref.head,
            "is an activated LoRA": version.ref.invocation_tokens,
        }
        if found := [kind for kind, holds in kinds.items() if holds]:
            raise InvalidInput(
                f"{version.ref} {found[0]}: a draft is a LoRA that changes every token, trained to "
                "predict several tokens of its base model at once",
                param="draft",
            )
    base_models = {version.base_model for version in versions}
    for pin in state.pins(now):
        if not pin.draft or (pin.tenant, pin.name) == (change.tenant, change.name):
            continue
        if base_models & {version.base_model for version in versions_kept(state, pin)}:
            raise Conflict(
                f"{pin.label} drafts for this base model already: unpin it first", param="draft"
            )


def _check_prompt(prompt: str, name: str | None) -> None:
    if name is None:
        raise InvalidInput(
            "a prompt is computed with one adapter: pin each adapter with its prompt",
            param="prompt",
        )
    size = len(prompt.encode())
    if not prompt.strip() or size > MAX_SYSTEM_PROMPT_BYTES:
        raise InvalidInput(
            f"the prompt has {size} bytes: want a text of at most {MAX_SYSTEM_PROMPT_BYTES}",
            param="prompt",
        )
