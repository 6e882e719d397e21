"""A request that is over, as far as it is counted."""

from typing import NamedTuple

OUTCOMES = ("finished", "refused", "failed", "left")
TOKENS = ("prompt", "cached", "output")
NO_ADAPTER = "none"
"""The residency of a request to a base model."""


class Ended(NamedTuple):
    """A request that is over.

    tenant, base_model: "" where that was never known. adapter: tenant/name. residency: where its
    adapter was, NO_ADAPTER for a base model, None if no replica took it. code: of the error that
    ended it. first_token_s, queue_s, total_s: None where they say nothing. retries: replicas that
    lost it. tokens: as TOKENS says, of a finished one.
    """

    outcome: str
    tenant: str
    base_model: str
    adapter: str | None = None
    residency: str | None = None
    code: str | None = None
    first_token_s: float | None = None
    queue_s: float | None = None
    total_s: float | None = None
    retries: int = 0
    tokens: tuple[int, int, int] | None = None
