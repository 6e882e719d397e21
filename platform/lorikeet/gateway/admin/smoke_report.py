"""A first look at an adapter: what it makes of some prompts, beside the base model alone."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from lorikeet.errors import Unavailable
from lorikeet.gateway.error_responses import Refused
from lorikeet.gateway.services import Services
from lorikeet.protocol.messages import Continuation, Refusal, SmokeResult, SmokeTest
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


async def smoke(
    services: Services,
    base_model: str,
    adapter: AdapterRef,
    request_id: str,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = MAX_TOKENS,
) -> dict[str, Any]:
    """Generate on a replica of `base_model` and say how far the adapter's answers differ.

    The adapter's blob must be in the store; a version of it need not exist. Raises Unavailable
    when no replica answers, and LorikeetError for what the replica refuses: an adapter that
    cannot be loaded, or whose weights overflow.
    """
    if base_model not in services.base_models:
        raise Unavailable(
            f"no replica serves the base model {base_model!r} of {adapter}: "
            "add it to LORIKEET_BASE_MODELS"
        )
    trial = SmokeTest(request_id, adapter, tuple(prompts), max_tokens)
    try:
        async with asyncio.timeout(services.first_item_timeout_s):
            result = await services.engines.smoke(base_model, trial)
    except TimeoutError as error:
        raise Unavailable(
            f"no replica of {base_model} tried {adapter} within "
            f"{services.first_item_timeout_s:g} s: see `lorikeet status`, then try again"
        ) from error
    if isinstance(result, Refusal):
        raise Refused(result)
    return report(trial, result)


def report(trial: SmokeTest, result: SmokeResult) -> dict[str, Any]:
    """What was seen, as JSON.

    equal_share: of the tokens, position by position, counted to the longer of the two.
    first_difference: the first position, from 0, where any two differ; null if none do.
    """
    pairs = list(zip(result.base, result.adapted, strict=True))
    compared = [_compare(base.token_ids, adapted.token_ids) for base, adapted in pairs]
    tokens = sum(length for length, _, _ in compared)
    equal = sum(same for _, same, _ in compared)
    differences = [first for _, _, first in compared if first is not None]
    return {
        "replica": result.replica,
        "residency": None if result.residency is None else str(result.residency),
        "tokens": tokens,
        "equal_share": equal / tokens if tokens else 1.0,
        "first_difference": min(differences, default=None),
        "warnings": list(_warnings(pairs, tokens, differ=bool(differences))),
        "prompts": [
            {
                "prompt": prompt,
                "base": base.text,
                "adapter": adapted.text,
                "equal_share": same / length if length else 1.0,
                "first_difference": first,
            }
            for prompt, (base, adapted), (length, same, first) in zip(
                trial.prompts, pairs, compared, strict=True
            )
        ],
    }


def _compare(base: Sequence[int], adapted: Sequence[int]) -> tuple[int, int, int | None]:
    """Positions compared, how many hold the same token, and the first that does not."""
    length, shorter = max(len(base), len(adapted)), min(len(base), len(adapted))
    same = [a == b for a, b in zip(base, adapted, strict=False)]
    first = same.index(False) if False in same else (shorter if shorter < length else None)
    return length, sum(same), first


def _warnings(
    pairs: Sequence[tuple[Continuation, Continuation]], tokens: int, *, differ: bool
) -> Iterator[str]:
    if not differ:
        yield (
            f"the adapter changed none of {tokens} tokens: is it trained, and do these prompts "
            "ask for what it was trained on?"
        )
    mute = sum(bool(base.token_ids) and not adapted.token_ids for base, adapted in pairs)
    if mute:
        yield f"the adapter answered {mute} of {len(pairs)} prompts with nothing at all"
    loops = sum(_loops(adapted) and not _loops(base) for base, adapted in pairs)
    if loops:
        yield (
            f"the adapter repeats itself in {loops} of {len(pairs)} answers where the base model "
            "does not: its scaling may be too large"
        )


def _loops(said: Continuation) -> bool:
    """Whether the last tokens are one or two tokens over and over."""
    last = said.token_ids[-_LOOP_TOKENS:]
    return len(last) == _LOOP_TOKENS and len(set(last)) <= _LOOP_KINDS
