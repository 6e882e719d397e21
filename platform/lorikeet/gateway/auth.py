"""Authentication: a request's tenant and key, and the base model and adapter that it names."""

import time
from typing import Annotated, NamedTuple

from fastapi import Depends
from starlette.requests import Request

from lorikeet.apis.request import NamedAdapters, ResolvedModel
from lorikeet.catalog.records import AdapterRecord, KeyRecord, Scope, TenantRecord, secret_sha256
from lorikeet.catalog.state import CatalogState, unknown_model
from lorikeet.errors import (
    EndedKey,
    Forbidden,
    InvalidInput,
    InvalidKey,
    Unavailable,
    UnknownTenant,
)
from lorikeet.gateway.basic_auth import as_bearer
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.pushing.pushed_versions import PushedVersions
from lorikeet.gateway.services import Services
from lorikeet.request_defaults import RequestDefaults
from lorikeet.retry_after import REPAIR_S
from lorikeet_engine.adapter import AdapterRef, Composition
from lorikeet_engine.errors import InvalidRequest

_UNKNOWN = "this API key is unknown or was revoked: ask your admin for another"
_TINKERS = "tml-"  # prefix without which Tinker's client takes no key
_SHOWN = 64  # characters of a name that may be any text
_READ_ONLY = "this key is read-only: use one that may change things"
_REFUSALS = {
    Scope.INFER: "this key may not infer: use a tenant's key with scope infer",
    Scope.PUBLISH: "this key may not push: use one that `lorikeet keys create --publish` made",
    Scope.ADMIN: "this key is not an admin's: use one that `lorikeet init` or another admin made",
}


class Caller(NamedTuple):
    """Tenant and key by which a request was authenticated."""

    tenant: TenantRecord
    key: KeyRecord

    @property
    def max_context(self) -> int | None:
        """Context limit of the request in tokens: the smaller of its tenant's and its key's.

        None: neither has a limit.
        """
        both = (self.tenant.limits.max_context, self.key.limits.max_context)
        return min((limit for limit in both if limit is not None), default=None)


class RequestAuthenticator:
    """Lookup of keys, tenants and models in the gateway's view of the catalog.

    Before a request is refused because of an unknown key, tenant or model, the view is refreshed
    once. The lookups themselves are methods of CatalogState (catalog/state.py).
    """

    def __init__(
        self, services: Services, catalog_view: GatewayCatalogView, pushed: PushedVersions
    ) -> None:
        """Set up lookups in the catalog's view and among pushed versions.

        pushed: versions that are not yet in the catalog's log, but that requests can name already.
        """
        self._base_models, self._oidc = services.base_models, services.oidc
        self._catalog_view, self._pushed = catalog_view, pushed

    async def caller(self, request: Request) -> Caller:
        """Return the tenant and key of a request that generates or reads.

        Raises InvalidKey for a missing, unknown, revoked or expired key, Forbidden if the key's
        scopes do not allow the request, Unavailable if the catalog cannot be read.
        """
        return await self._caller(request, Scope.INFER)

    async def caller_of_batch(self, key_id: str) -> Caller:
        """Return the tenant and key of a batch's line.

        key_id: id of the key that made the batch.

        Raises InvalidKey if the key is revoked or expired, UnknownKey if the catalog lacks the key,
        Unavailable if the catalog cannot be read.
        """

        def caller(state: CatalogState) -> Caller:
            key = state.key(key_id)
            assert key.tenant is not None
            if key.revoked or key.expired(time.time()):
                raise EndedKey("the key that made this batch has ended: make it with another")
            return Caller(state.tenant(key.tenant), key)

        return await self._catalog_view.ask(caller)

    async def publisher(self, request: Request) -> Caller:
        """Return the tenant and key of a request that pushes adapters or asks for a push's state.

        A read-only key may ask, but not push.

        Raises InvalidKey for a missing, unknown, revoked or expired key, Forbidden if the key's
        scopes do not allow the request, Unavailable if the catalog cannot be read.
        """
        return await self._caller(request, Scope.PUBLISH)

    async def admin(self, request: Request) -> None:
        """Authenticate a request as an admin's; request.state.key is its key from then on.

        All admin routes depend on this check.

        Raises InvalidKey for a missing, unknown, revoked or expired key, Forbidden if the key's
        scopes do not allow the request, Unavailable if the catalog cannot be read.
        """
        await self._authenticate(request, Scope.ADMIN)

    async def resolve_model(
        self, model: str, caller: Caller, session: str | None = None
    ) -> ResolvedModel:
        """Return the base model and adapter that `model` names for a caller's tenant.

        A name without a tenant means the base model of this name, else the tenant's own adapter.

        session: name of the session; chooses between two versions that share an alias. None chooses
            the first.

        Raises UnknownModel, without distinguishing missing models from other tenants' models and
        from those that the caller's key may not use; Unavailable if the base model is not served
        here, or if the name is unknown and the catalog unreachable.
        """
        if model in self._base_models and not caller.key.adapters:
            return ResolvedModel(model)
        _check_may_use(caller, model)
        tenant = caller.tenant.name
        found = await self._catalog_view.find(
            lambda state: self._adapter(state, model, tenant, session), (tenant, model)
        )
        self._check_served(found)
        return found

    async def resolve_composition(
        self, model: str, named: NamedAdapters, caller: Caller, session: str | None = None
    ) -> ResolvedModel:
        """Return the base model of several adapters, and their composition (weighted sum).

        A tenant may compose the adapters that it may name alone. All have one base model.

        model: `model` of the request, which names the adapters or their base model.
        named: names and weights of the adapters.
        session: name of the session; chooses between two versions that share an alias. None chooses
            the first.

        Raises UnknownModel for an adapter that does not exist or that the caller may not use;
        Unavailable if the base model is not served here, or if a name is unknown and the catalog
        unreachable; InvalidInput for a base model among the adapters, adapters of several base
        models, and for bad weights.
        """
        for name, _ in named:
            if name in self._base_models:
                raise InvalidInput(
                    f"{name!r} is a base model: name adapters alone, whose base model is known",
                    param="model",
                )
            _check_may_use(caller, name)
        tenant = caller.tenant.name
        found = await self._catalog_view.find(
            lambda state: [self._adapter(state, name, tenant, session) for name, _ in named],
            (tenant, model),
        )
        first = found[0]
        for each in found:
            self._check_served(each)
            if each.base_model != first.base_model:
                raise InvalidInput(
                    f"{each.adapter} needs the base model {each.base_model!r}, and {first.adapter} "
                    f"{first.base_model!r}: compose adapters of one base model",
                    param="model",
                )
        if model in self._base_models and model != first.base_model:
            raise InvalidInput(
                f"{first.adapter} needs the base model {first.base_model!r}: name it as model",
                param="model",
            )
        if len(found) == 1 and named[0][1] == 1:
            return first
        refs = [ref for each in found if isinstance(ref := each.adapter, AdapterRef)]
        try:
            composition = Composition(tuple(refs), tuple(weight for _, weight in named))
        except InvalidRequest as error:
            raise InvalidInput(error.message, param="model") from error
        trained_on = {each.trained_on for each in found}
        own = (each.defaults or RequestDefaults() for each in found)
        tokenizer, *others = {each.tokenizer for each in own}
        if others:
            raise InvalidInput(
                f"the adapters of {model!r} have different tokenizers: compose adapters that were "
                "registered with the same added tokens, or without --use-tokenizer",
                param="model",
            )
        shared = None if tokenizer is None else RequestDefaults(tokenizer=tokenizer)
        return ResolvedModel(
            first.base_model,
            composition,
            sum(each.rank for each in found),
            sum(each.image_bytes for each in found),
            max(each.created for each in found),
            first.trained_on if len(trained_on) == 1 else None,
            all(each.is_recorded for each in found),
            first.defaults if all(each.defaults == first.defaults for each in found) else shared,
        )

    async def visible_adapters(self, caller: Caller) -> tuple[AdapterRecord, ...]:
        """Return the adapters that a caller may use, including pushed versions not yet in the
        catalog's log.

        Raises Unavailable if the catalog cannot be read.
        """
        tenant, may_use = caller.tenant.name, caller.key.may_use
        found = await self._catalog_view.ask(
            lambda state: self._pushed.applied_to(state, tenant).visible_to(tenant)
        )
        return tuple(each for each in found if may_use(each.tenant, each.name))

    def _adapter(
        self, state: CatalogState, model: str, tenant: str, session: str | None
    ) -> ResolvedModel:
        """Return the adapter that `model` names for a tenant, and its base model.

        session: name of the session; chooses between two versions that share an alias. None chooses
            the first.

        Raises UnknownModel if `model` names no version that the tenant may use.
        """
        log = state
        if not model.partition("@")[2].isdecimal():  # only the log gives versions their numbers
            owner, named, _ = model.partition("/")
            state = self._pushed.applied_to(state, owner if named else tenant)
        ref = state.resolve(model, tenant, session)
        version = state.version_of(ref)
        return ResolvedModel(
            version.base_model,
            ref,
            version.max_rank,
            version.gpu_bytes,
            version.created,
            version.trained_on,
            state is log or _holds(log, ref, version.defaults),
            version.defaults,
        )

    def _check_served(self, found: ResolvedModel) -> None:
        """Raise Unavailable if an adapter's base model is not served here."""
        if found.base_model not in self._base_models:
            raise Unavailable(
                f"{found.adapter} needs the base model {found.base_model!r}, "
                "which is not served now: have your admin add it to LORIKEET_BASE_MODELS",
                retry_after_s=REPAIR_S,
            )

    async def _caller(self, request: Request, scope: Scope) -> Caller:
        key = await self._authenticate(request, scope)
        tenant = key.tenant
        assert tenant is not None
        try:
            return Caller(await self._catalog_view.find(lambda state: state.tenant(tenant)), key)
        except UnknownTenant as error:  # which only tokens name
            raise Forbidden(f"this token's tenant does not exist: {error.message}") from error

    async def _authenticate(self, request: Request, scope: Scope) -> KeyRecord:
        authorization = _authorization(request, scope)
        reading = request.method in ("GET", "HEAD")
        token = None if self._oidc is None else _token(authorization)
        if self._oidc is not None and token is not None:
            of_admin = scope is Scope.ADMIN
            of_token = await self._oidc.key_of(token, of_admin=of_admin)
            request.state.key = of_token  # also of a request that is refused
            self._oidc.check_role(of_token, of_admin=of_admin)
            return _scoped(of_token, scope, reading=reading)

        def check(state: CatalogState) -> KeyRecord:
            key: KeyRecord = _key(state, authorization, time.time())
            request.state.key = key  # also of a request that is refused
            return _scoped(key, scope, reading=reading)

        if authorization is None:
            return await self._catalog_view.ask(check)  # no refresh can find a missing key
        return await self._catalog_view.find(check)


def check_may_push(key: KeyRecord, name: str) -> None:
    """Raise Forbidden if a publish key may not push adapters of this name."""
    if Scope.PUBLISH in key.scopes and not key.may_push(name):
        allowed = ", ".join(key.adapters)
        raise Forbidden(f"this key may not push {name[:_SHOWN]!r}: it may push {allowed}")


def _check_may_use(caller: Caller, model: str) -> None:
    """Raise UnknownModel if the caller's key may not use the adapter that `model` names."""
    owner, named, name = model.partition("@")[0].rpartition("/")
    if not caller.key.may_use(owner if named else caller.tenant.name, name):
        raise unknown_model(model)


def _holds(log: CatalogState, ref: AdapterRef, defaults: RequestDefaults | None) -> bool:
    record = log.find(ref.tenant, ref.name)
    return record is not None and record.registered(ref.digest, defaults) is not None


def _authorization(request: Request, scope: Scope) -> str | None:
    """Return a request's Authorization header; None without one.

    On tenants' routes a Basic header is returned as the Bearer header of its key, and so is the key
    in x-api-key, without the prefix that Tinker's clients put before it. Raises InvalidKey if the
    two headers have different keys.
    """
    authorization = request.headers.get("authorization")
    if scope is Scope.ADMIN:
        return authorization
    if authorization is not None:
        authorization = as_bearer(authorization, publishing=scope is Scope.PUBLISH)
    api_key = request.headers.get("x-api-key", "").strip().removeprefix(_TINKERS)
    if not api_key:
        return authorization
    if authorization is None:
        return f"Bearer {api_key}"
    if authorization.partition(" ")[2].strip() != api_key:
        raise InvalidKey("`Authorization` and `x-api-key` name different keys: send one of the two")
    return authorization


def _token(authorization: str | None) -> str | None:
    """Return the JSON Web Token in an `Authorization: Bearer` header; None if there is none."""
    kind, _, secret = (authorization or "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" and secret.count(".") == 2 else None


def authenticate(
    state: CatalogState,
    authorization: str | None,
    scope: Scope,
    now: float,
    *,
    reading: bool = False,
) -> KeyRecord:
    """Return the key that an `Authorization: Bearer lk_…` header names, if it has the scope.

    state: catalog state in which the key is looked up.
    authorization: value of the header; None if it is missing.
    scope: INFER on tenants' routes, PUBLISH on routes of pushes, ADMIN on admin routes. Admins'
        keys never infer and tenants' keys never administer, whatever scopes they have.
    now: Unix seconds.
    reading: the request changes and computes nothing, so a read-only key suffices.

    Raises InvalidKey for a missing or unknown key, its subclass EndedKey for a revoked or expired
    one, Forbidden if the key lacks the scope.
    """
    return _scoped(_key(state, authorization, now), scope, reading=reading)


def _scoped(key: KeyRecord, scope: Scope, *, reading: bool) -> KeyRecord:
    """Return the key if it has the scope; else raise Forbidden.

    reading: the request changes and computes nothing, so a read-only key suffices.
    """
    of_this_plane = (key.tenant is not None) is (scope is not Scope.ADMIN)
    enough = {scope, Scope.READ_ONLY} if reading else {scope}
    if not of_this_plane or not enough & key.scopes:
        read_only = of_this_plane and Scope.READ_ONLY in key.scopes
        raise Forbidden(_READ_ONLY if read_only else _REFUSALS[scope])
    return key


def _key(state: CatalogState, authorization: str | None, now: float) -> KeyRecord:
    kind, _, secret = (authorization or "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise InvalidKey(
            "no API key: send it as `Authorization: Bearer lk_…`, a tenant's also as `x-api-key`"
        )
    key = state.key_by_sha256(secret_sha256(secret.strip()))
    if key is None:
        raise InvalidKey(_UNKNOWN)
    if key.revoked:
        raise EndedKey(_UNKNOWN)
    if key.expired(now):
        raise EndedKey("this API key has expired: ask your admin for another")
    return key


async def actor_of(request: Request) -> str:
    """Return the id of the admin's key by which a request was authenticated. The catalog's log
    records this id with each change.
    """
    key: KeyRecord = request.state.key
    return key.id


Actor = Annotated[str, Depends(actor_of)]
"""Parameter of admin routes that change something: id of the request's key."""
