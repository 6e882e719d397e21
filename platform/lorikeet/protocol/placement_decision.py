"""Placement decision of the controller for a replica."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class PinnedPrompt:
    """System prompt whose KV pages a replica computes with an adapter, before users ask.

    ref: the adapter; chats of its tenant alone share the pages.
    defaults: the prompt, and the adapter's own chat template and tokenizer.
    """

    ref: AdapterRef
    defaults: RequestDefaults

    @property
    def name(self) -> str:
        """Name of the pages in the engine: different for all that changes them."""
        text = repr(self.defaults)  # in a tenth of JSON's time
        return f"{self.ref.tenant} {self.ref.digest} {hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class LearnedPrompt:
    """Beginning of an adapter's prompts, learned from traffic, whose KV pages a replica computes
    before users ask.

    tokens: token ids as int32.
    """

    ref: AdapterRef
    tokens: bytes

    @property
    def name(self) -> str:
        """Name of the prompt: different for all that changes its KV pages."""
        return f"{self.ref.tenant} {self.ref.digest} {hashlib.sha256(self.tokens).hexdigest()}"


@dataclass(frozen=True, slots=True)
class PinTarget:
    """Adapter that a replica must hold at the given memory tier or nearer to the GPU, and the
    system prompts whose KV pages it must compute.

    draft: whether the adapter drafts tokens of all answers.
    """

    ref: AdapterRef
    tier: Residency
    prompts: tuple[PinnedPrompt, ...] = ()
    draft: bool = False


@dataclass(frozen=True, slots=True)
class PrefetchTarget:
    """Adapter that a replica should load to a tier unless that delays requests.

    The replica does not report whether it loaded the adapter.

    uses: part of the adapter's recent requests that the copy is expected to serve; a count that
        halves every 45 s.
    """

    ref: AdapterRef
    tier: Residency
    uses: float


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Adapters that one replica should hold.

    pins: all adapters that pins keep on the replica, by digest; the replica ends its other pins.
    sole_copies: fraction of the adapters in use that only this replica has on GPU or host; None
        while unknown.
    prefetches: adapters to load at low priority, most wanted first.
    learned: beginnings of prompts of adapters on the replica's GPU, learned from traffic.
    """

    pins: Mapping[str, PinTarget] = field(default_factory=dict)
    sole_copies: float | None = None
    prefetches: tuple[PrefetchTarget, ...] = ()
    learned: tuple[LearnedPrompt, ...] = ()
