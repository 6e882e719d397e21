"""Admin routes of pins (orders to keep an adapter on disk, in host memory or on the GPU): list,
set, dry-run, remove.
"""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from lorikeet.apis.body import Body
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import PinKey
from lorikeet.catalog.rules.limits import HIGHEST_PRIORITY, LONGEST_LIFE_S
from lorikeet.catalog.rules.pin_budget import PinnedVersion, versions_kept
from lorikeet.catalog.rules.pins import LONGEST_REASON, PinOptions
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import InvalidInput, NotFound
from lorikeet.gateway.admin.pin_report import PinReporter
from lorikeet.gateway.admin.serializers import dry_run_json, pin_json, pin_status_json
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import json_body
from lorikeet.gateway.services import Services
from lorikeet.request_defaults import MAX_SYSTEM_PROMPT_BYTES
from lorikeet_engine.adapter import Residency

_CHAT = ({"role": "user", "content": "Hello"},)


class PinBody(Body):
    """Request to pin an adapter, or all adapters of a tenant.

    replicas: number of replicas that have to hold the adapter; null: all.
    expires_s: seconds from now until the pin ends; null: never.
    prompt: system prompt of the adapter's chats, whose KV pages replicas compute before users ask;
        null: that of the earlier pin, if there is one.
    draft: whether the adapter drafts tokens of all answers of its base model; null: as the earlier
        pin says, if there is one.
    dry_run: do not set the pin, only show the loads and releases that it would cause.
    """

    selector: str = DEFAULT_ALIAS
    replicas: Annotated[int, Field(ge=1)] | None = None
    tier: Literal["gpu", "host", "disk"] = "gpu"
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    expires_s: Annotated[float, Field(gt=0, le=LONGEST_LIFE_S)] | None = None
    prompt: Annotated[str, Field(max_length=MAX_SYSTEM_PROMPT_BYTES)] | None = None
    draft: bool | None = None
    dry_run: bool = False


WantedPin = Annotated[PinBody, json_body(PinBody)]


def pin_routes(services: Services, pin_reporter: PinReporter) -> APIRouter:
    """Return the routes under /pins, for pins of adapters and of whole tenants."""
    router, catalog = APIRouter(prefix="/pins"), services.catalog

    @router.get("")
    async def list_pins() -> dict[str, Any]:
        return {"data": list(map(pin_status_json, await pin_reporter.pin_statuses()))}

    @router.get("/{tenant}/{name}/prompt")
    async def show_prompt(tenant: str, name: str) -> dict[str, Any]:
        for found in await pin_reporter.pin_statuses():
            if found.pin.key == PinKey(tenant, name) and found.pin.prompt is not None:
                return {**pin_status_json(found), "text": found.pin.prompt}
        raise NotFound(f"{f'{tenant}/{name}'!r} has no pin with a prompt")

    @router.put("/{tenant}")
    async def pin_tenant(tenant: str, wanted: WantedPin, actor: Actor) -> dict[str, Any]:
        return await pin(tenant, None, wanted, actor)

    @router.put("/{tenant}/{name}")
    async def pin_adapter(
        tenant: str, name: str, wanted: WantedPin, actor: Actor
    ) -> dict[str, Any]:
        return await pin(tenant, name, wanted, actor)

    @router.delete("/{tenant}")
    def unpin_tenant(tenant: str, actor: Actor) -> dict[str, Any]:
        catalog.unpin(tenant, None, actor=actor)
        return {"tenant": tenant, "adapter": None, "pinned": False}

    @router.delete("/{tenant}/{name}")
    def unpin_adapter(tenant: str, name: str, actor: Actor) -> dict[str, Any]:
        catalog.unpin(tenant, name, actor=actor)
        return {"tenant": tenant, "adapter": f"{tenant}/{name}", "pinned": False}

    @router.delete("/{tenant}/{name}/prompt")
    def remove_prompt(tenant: str, name: str, actor: Actor) -> dict[str, Any]:
        catalog.remove_prompt(tenant, name, actor=actor)
        return {"tenant": tenant, "adapter": f"{tenant}/{name}", "prompt": None}

    async def pin(tenant: str, name: str | None, wanted: PinBody, actor: str) -> dict[str, Any]:
        terms = _terms(wanted)
        if wanted.dry_run:
            return dry_run_json(await pin_reporter.dry_run(tenant, name, **terms))
        if wanted.prompt is not None:
            await _check_prompt(services, tenant, name, terms)
        made = await asyncio.to_thread(lambda: catalog.pin(tenant, name, actor=actor, **terms))
        return pin_json(made)

    return router


def _terms(wanted: PinBody) -> PinOptions:
    return PinOptions(
        selector=wanted.selector,
        tier=Residency[wanted.tier.upper()],
        replicas=wanted.replicas,
        priority=wanted.priority,
        reason=wanted.reason,
        expires=None if wanted.expires_s is None else time.time() + wanted.expires_s,
        prompt=wanted.prompt,
        draft=wanted.draft,
    )


async def _check_prompt(
    services: Services, tenant: str, name: str | None, terms: PinOptions
) -> None:
    """Raise InvalidInput if chats of an adapter cannot have the system prompt of a new pin."""

    def versions(_: CatalogState, after: CatalogState) -> tuple[PinnedVersion, ...]:
        pin = after.pin_of(tenant, name)
        return () if pin is None else versions_kept(after, pin)

    for version in await asyncio.to_thread(
        lambda: services.catalog.if_pinned(tenant, name, versions, **terms)
    ):
        base_model = version.base_model
        if version.ref.head is not None:
            raise InvalidInput(f"{version.ref} has a head and answers no chats", param="prompt")
        if version.prompt is None or base_model not in services.base_models:
            continue
        try:
            await services.encoders.check(tenant, base_model, version.prompt)
            context = services.engines.max_context(base_model)
            about = base_model, tenant, [_CHAT], context, version.prompt
            (tokens,) = await services.encoders.encode_chats(*about)
        except InvalidInput as error:
            raise InvalidInput(f"{version.ref}: {error.message}", param="prompt") from None
        if context is not None and len(tokens) >= context:
            raise InvalidInput(
                f"{version.ref}: a chat with this prompt has {len(tokens)} tokens, and "
                f"{base_model} takes {context}: shorten the prompt",
                param="prompt",
            )
