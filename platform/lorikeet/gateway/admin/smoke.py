"""Admin route: try a registered adapter on a replica."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from lorikeet.catalog.names import DEFAULT_ALIAS, check_selector
from lorikeet.catalog.records import AdapterRecord
from lorikeet.errors import UnknownModel
from lorikeet.gateway.admin.smoke_report import MAX_TOKENS, PROMPTS, smoke
from lorikeet.gateway.body import Body, json_body
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.middleware import request_id_of
from lorikeet.gateway.services import Services

Prompt = Annotated[str, Field(min_length=1, max_length=20_000)]


class Smoke(Body):
    """selector: an alias or a version's number."""

    selector: str = DEFAULT_ALIAS
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=16)] = Field(list(PROMPTS))
    max_tokens: Annotated[int, Field(ge=1, le=256)] = MAX_TOKENS


def smoke_routes(services: Services, catalog_view: GatewayCatalogView) -> APIRouter:
    """POST …/smoke."""
    router = APIRouter(prefix="/adapters")

    @router.post("/{tenant}/{name}/smoke")
    async def try_out(
        request: Request, tenant: str, name: str, wanted: Annotated[Smoke, json_body(Smoke)]
    ) -> dict[str, Any]:
        selector = check_selector(wanted.selector)
        record: AdapterRecord = await catalog_view.ask_in_thread(
            lambda state: state.adapter(tenant, name)
        )
        version = record.select(selector)
        if version is None:
            raise UnknownModel(f"{record.label}@{selector} is no usable version")
        seen = await smoke(
            services,
            version.base_model,
            record.ref(version),
            request_id_of(request),
            wanted.prompts,
            wanted.max_tokens,
        )
        return {"adapter": record.label, "version": version.version, **seen}

    return router
