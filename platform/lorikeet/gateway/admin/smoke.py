"""Smoke tests: answers of an adapter to a few prompts, compared with the base model's."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Request
from pydantic import Field

from lorikeet.apis.body import Body
from lorikeet.catalog.names import DEFAULT_ALIAS, check_selector
from lorikeet.catalog.records import AdapterRecord
from lorikeet.errors import InvalidInput, Unavailable, UnknownModel
from lorikeet.gateway.body import json_body
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.replica_tests import result_of
from lorikeet.gateway.services import Services
from lorikeet.protocol.messages import Continuation, SmokeResult, SmokeTest
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import AdapterRef

PROMPTS = (
    "Hello! What can you do for me?",
    "Write one sentence about the sea.",
    "Explain in a few words what a catalog is.",
    "My order has not arrived yet. What now?",
)
MAX_TOKENS = 32
_LOOP_TOKENS = 16
_LOOP_KINDS = 2

Prompt = Annotated[str, Field(min_length=1, max_length=20_000)]


class SmokeBody(Body):
    """Request to compare answers of an adapter and its base model (smoke test).

    selector: alias or version number of the adapter.
    """

    selector: str = DEFAULT_ALIAS
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=16)] = Field(list(PROMPTS))
    max_tokens: Annotated[int, Field(ge=1, le=256)] = MAX_TOKENS


def smoke_routes(services: Services, catalog_view: GatewayCatalogView) -> APIRouter:
    """Return the route POST /adapters/{tenant}/{name}/smoke."""
    router = APIRouter(prefix="/adapters")

    @router.post("/{tenant}/{name}/smoke")
    async def try_out(
        request: Request, tenant: str, name: str, wanted: Annotated[SmokeBody, json_body(SmokeBody)]
    ) -> dict[str, Any]:
        selector = check_selector(wanted.selector)
        record: AdapterRecord = await catalog_view.ask_in_thread(
            lambda state: state.adapter(tenant, name)
        )
        version = record.select(selector)
        if version is None:
            raise UnknownModel(f"{record.label}@{selector} is no usable version")
        seen = await smoke_test(
            services,
            version.base_model,
            record.ref(version),
            request.state.request_id,
            wanted.prompts,
            wanted.max_tokens,
            version.defaults,
        )
        return {"adapter": record.label, "version": version.version, **seen}

    return router


async def smoke_test(
    services: Services,
    base_model: str,
    adapter: AdapterRef,
    request_id: str,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = MAX_TOKENS,
    defaults: RequestDefaults | None = None,
) -> dict[str, Any]:
    """Generate on a replica with and without an adapter; report how much the answers differ, as
    JSON.

    The adapter's blob must be in the store; the adapter need not have a version with this blob.
    Raises InvalidInput for an adapter with a head, Unavailable if no replica answers, and
    LorikeetError if the replica cannot load the adapter or its weights overflow.

    request_id: beginning of the ids of the test's requests on the replica.
    prompts: user messages.
    max_tokens: limit of each answer.
    defaults: the adapter's own request defaults, whose chat template and system prompt write the
        prompts of both.
    """
    if adapter.head is not None:
        raise InvalidInput(
            f"{adapter} has a classification head and does not generate: try it with /v1/classify",
            param="smoke",
        )
    if base_model not in services.base_models:
        raise Unavailable(
            f"no replica serves the base model {base_model!r} of {adapter}: "
            "add it to LORIKEET_BASE_MODELS"
        )
    context = services.engines.max_context(base_model)
    encoded = await services.encoders.encode_turns(base_model, prompts, context, defaults)
    tokenizer = None if defaults is None else defaults.tokenizer
    test = SmokeTest(request_id, adapter, encoded, max_tokens, tokenizer)
    answers = services.engines.smoke(base_model, test)
    return smoke_report(prompts, await result_of(services, base_model, f"tried {adapter}", answers))


def smoke_report(prompts: Sequence[str], result: SmokeResult) -> dict[str, Any]:
    """Return the result of a smoke test as JSON: the adapter's answers compared with the base
    model's.

    prompts: user messages of the test.

    equal_share: fraction of positions at which both answers have the same token; positions
        count up to the longer answer's length.
    first_difference: first position, from 0, at which the two answers to any prompt differ;
        null if all are equal.
    """
    pairs = list(zip(result.base, result.adapted, strict=True))
    compared = [_compare(base.token_ids, adapted.token_ids) for base, adapted in pairs]
    whole = _Comparison(sum(one.positions for one in compared), sum(one.same for one in compared))
    differences = [one.first_difference for one in compared if one.first_difference is not None]
    return {
        "replica": result.replica,
        "residency": None if result.residency is None else str(result.residency),
        "tokens": whole.positions,
        "equal_share": whole.equal_share,
        "first_difference": min(differences, default=None),
        "warnings": list(_warnings(pairs, whole.positions, differ=bool(differences))),
        "prompts": [
            {
                "prompt": prompt,
                "base": base.text,
                "adapter": adapted.text,
                "equal_share": one.equal_share,
                "first_difference": one.first_difference,
            }
            for prompt, (base, adapted), one in zip(prompts, pairs, compared, strict=True)
        ],
    }


class _Comparison(NamedTuple):
    """Comparison of two answers to one prompt, token by token.

    positions: length of the longer answer in tokens.
    same: number of positions with equal tokens.
    first_difference: first position with different tokens; None if there is none.
    """

    positions: int
    same: int
    first_difference: int | None = None

    @property
    def equal_share(self) -> float:
        return self.same / self.positions if self.positions else 1.0


def _compare(base: Sequence[int], adapted: Sequence[int]) -> _Comparison:
    length, shorter = max(len(base), len(adapted)), min(len(base), len(adapted))
    same = [a == b for a, b in zip(base, adapted, strict=False)]
    first = same.index(False) if False in same else (shorter if shorter < length else None)
    return _Comparison(length, sum(same), first)


def _warnings(
    pairs: Sequence[tuple[Continuation, Continuation]], tokens: int, *, differ: bool
) -> Iterator[str]:
    if not differ:
        yield (
            f"the adapter changed none of {tokens} tokens: is it trained, and do these prompts "
            "match its training data?"
        )
    mute = sum(bool(base.token_ids) and not adapted.token_ids for base, adapted in pairs)
    if mute:
        yield f"the adapter gave an empty answer to {mute} of {len(pairs)} prompts"
    loops = sum(_loops(adapted) and not _loops(base) for base, adapted in pairs)
    if loops:
        yield (
            f"the adapter repeats itself in {loops} of {len(pairs)} answers where the base model "
            "does not: its scaling may be too large"
        )


def _loops(answer: Continuation) -> bool:
    """Return whether an answer ends in a loop: its last 16 tokens have at most two different
    ids.
    """
    last = answer.token_ids[-_LOOP_TOKENS:]
    return len(last) == _LOOP_TOKENS and len(set(last)) <= _LOOP_KINDS
