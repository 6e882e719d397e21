"""When a sequence reached each of its phases."""

import time
from dataclasses import dataclass, field

from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import EngineTimings


@dataclass(slots=True)
class SequenceTimings:
    """When a sequence reached each of its phases, by the monotonic clock.

    residency: where its adapter was when the request came; None without an adapter. requested_s:
    when the adapter was requested that was not on the GPU; loaded_s: when it came there. begun_s:
    when its first step was planned; cached_tokens: tokens of its prompt that were in the KV cache
    then. first_token_s: when its first token was read; last_token_s: when its newest was, by
    perf_counter. preemptions: how often it had to begin anew. steps: how many it took part in.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    residency: Residency | None = None
    requested_s: float | None = None
    loaded_s: float | None = None
    begun_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def engine_timings(self) -> EngineTimings:
        """The time of each phase until now, when the sequence's newest token has been read."""
        now_s = time.monotonic()
        assert self.begun_s is not None, "a token of no step"
        if self.first_token_s is None:
            self.first_token_s = now_s
        load_s = 0.0
        if self.loaded_s is not None and self.requested_s is not None:
            load_s = self.loaded_s - self.requested_s
        queued_s = self.begun_s - self.arrived_s
        return EngineTimings(
            queued_s=queued_s,
            load_s=min(max(load_s, 0.0), queued_s),
            prefill_s=self.first_token_s - self.begun_s,
            decode_s=now_s - self.first_token_s,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
        )
