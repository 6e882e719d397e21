"""The way in: whose request is it, and which model does it mean?"""

from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from lorikeet.api.follower import CatalogFollower
from lorikeet.api.services import Services
from lorikeet.catalog.records import Scope, TenantRecord
from lorikeet.errors import InvalidKey, Unavailable, UnknownModel
from lorikeet.tenancy import Principal, authenticate
from lorikeet_engine.adapter import AdapterRef


class Gate:
    """Answers from the catalog's last view, and looks once more before it refuses."""

    def __init__(self, services: Services, follower: CatalogFollower) -> None:
        self._base_models = services.base_models
        self._follower = follower

    async def tenant(self, request: Request) -> TenantRecord:
        """The tenant whose key this is. Raises InvalidKey, Forbidden, Unavailable."""
        principal = await self._authenticate(request, Scope.INFER)
        assert principal.tenant is not None
        return self._follower.state.tenant(principal.tenant)

    async def admin(self, request: Request) -> None:
        """A dependency of every admin route. Raises InvalidKey, Forbidden, Unavailable."""
        request.state.principal = await self._authenticate(request, Scope.ADMIN)

    async def resolve(self, model: str, tenant: str) -> tuple[str, AdapterRef | None]:
        """The base model's name and the adapter, if it is one, that `model` means to a tenant.

        Raises UnknownModel, alike for what is absent and for what is another's; Unavailable when
        nothing here serves its base model, or the catalog cannot be asked about an unknown name.
        """
        if model in self._base_models:
            return model, None
        state = self._follower.state
        try:
            ref = state.resolve(model, tenant)
        except UnknownModel:
            state = await self._follower.looked_again()
            ref = state.resolve(model, tenant)
        base_model = state.base_model_of(ref)
        if base_model not in self._base_models:
            raise Unavailable(f"{ref} needs the base model {base_model!r}, which is not served now")
        return base_model, ref

    async def _authenticate(self, request: Request, scope: Scope) -> Principal:
        authorization = request.headers.get("authorization")
        try:
            return authenticate(self._follower.state, authorization, scope)
        except InvalidKey:
            if authorization is None:
                raise
        return authenticate(await self._follower.looked_again(), authorization, scope)


async def actor_of(request: Request) -> str:
    """Who an admin's change is written down to."""
    principal: Principal = request.state.principal
    return principal.key_id


Actor = Annotated[str, Depends(actor_of)]
"""A parameter of the routes that change something."""
