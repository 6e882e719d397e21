"""What an engine's work costs: coefficients by which routing, placement and simulation estimate.

The defaults are those of one NVIDIA H200 with Llama-3.1-8B's shapes; the tables they come from are
in docs/benchmarks.md. An engine measures its own when it starts.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet_engine.adapter import Residency

SEEN_IN_PIECES = 1 << 16
"""A step whose prompts see as many tokens or more is no single graph on CUDA."""
SEEN_TO_SPLIT = 1 << 19
"""Decodes beside prompts that see as many tokens or more are attended to apart on CUDA."""


class RowsTime(NamedTuple):
    """How long a step with N tokens takes without attention and adapters."""

    tokens: int
    seconds: float


def seen_tokens(tokens: int, depth: int = 0) -> int:
    """The tokens that those of a prompt see, added up, which begin at this depth in it.

    tokens · (depth + tokens / 2): a token sees about all before it.
    """
    return tokens * (2 * depth + tokens) // 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The seconds that a step takes, by what it holds: `step_s` is the formula.

    rows: what its tokens take without attention and adapters, ascending; between two points and
    beyond the last one goes along a line. seen_token_s: for each token that a decode sees in all
    layers; in this share of them, `windowed`, it sees `window` tokens at most, None: all.
    prompt_seen_s: for each token that a prompt's token sees. pieces_s: with prompts that see
    SEEN_IN_PIECES tokens or more, once, and with others by their share of as many, since a single
    graph reads keys anew for each token. split_s: with decodes beside prompts that see
    SEEN_TO_SPLIT tokens or more, once more. lora_s, rank_s: with adapters, once and for each rank
    of the distinct ones that decode. lora_token_s: for each prompt token with an adapter. A step
    has room for step_tokens tokens, and for max_running sequences.
    """

    # "Decode steps", without their attention: 4.25 ms with 1 sequence, 9.69 with 256; up to 128 a
    # step is bound by reading the weights. "Prefill": 44.4 ms for 2,048 tokens, pieces_s in it.
    rows: tuple[RowsTime, ...] = (
        RowsTime(1, 4.24e-3),
        RowsTime(32, 4.4e-3),
        RowsTime(128, 5.1e-3),
        RowsTime(256, 7.15e-3),
        RowsTime(512, 9.7e-3),
        RowsTime(2048, 42.9e-3),
    )
    # 2.74 ms for 256 sequences of 320 tokens, of which 0.21 are there with one of 16 as well.
    seen_token_s: float = 31e-9
    window: int | None = None
    windowed: float = 0.0
    # "Long contexts": chunks of 128 to 2,048 tokens deeper and deeper in a prompt.
    prompt_seen_s: float = 1.0e-9
    # "Long contexts": a chunk of 128 tokens takes 5.8 ms at depth 0 and 8.6 at 8,192, of which what
    # it sees there is 1.1; beside 64 decodes one of 192 takes 9.9 and 15.0 ms.
    pieces_s: float = 1.6e-3
    split_s: float = 1.9e-3
    # "LoRA kernels": least squares over the rows of 1 to 256 tokens, within 0.2 ms of each.
    lora_s: float = 0.27e-3
    rank_s: float = 1.29e-6
    # "LoRA kernels": 2.53 ms more for 2,048 prompt tokens, 9.09 for 8,192.
    lora_token_s: float = 1.2e-6
    # The engine's defaults.
    step_tokens: int = 2048
    max_running: int = 256

    def __post_init__(self) -> None:
        counts = [tokens for tokens, _ in self.rows]
        if not counts or counts != sorted(set(counts)):
            raise ValueError(f"rows={self.rows}: want points of ascending tokens, at least one")

    @property
    def prompt_token_s(self) -> float:
        """What a prompt's token takes in a step full of them, without what it sees."""
        return (self.rows_s(self.step_tokens) + self.pieces_s) / self.step_tokens

    def rows_s(self, tokens: int) -> float:
        """What a step of N tokens takes without attention and adapters."""
        at = min(bisect_left(self.rows, (tokens,)), len(self.rows) - 1)
        if at == 0:
            return self.rows[0].seconds
        (few, few_s), (many, many_s) = self.rows[at - 1 : at + 1]
        return few_s + (many_s - few_s) * (tokens - few) / (many - few)

    def decode_sees(self, length: float) -> float:
        """The tokens that a decode sees, the mean of all layers. length: of its sequence, with it.

        So layers with a window count by what they read.
        """
        if self.window is None or length <= self.window:
            return length
        return length - self.windowed * (length - self.window)

    def step_s(
        self, tokens: int, ranks: int, context: float = 0.0, *, adapted: int = 0, seen: int = 0
    ) -> float:
        """One step:

            rows_s(tokens) + (lora_s + rank_s · ranks, if any) + lora_token_s · adapted
            + seen_token_s · context + prompt_seen_s · seen
            + (pieces_s and split_s, by what prompts see)

        tokens: of decodes and prompts. ranks: Σ rank over the distinct adapters of its decodes.
        context: Σ of decode_sees over its decodes. adapted: its prompts' tokens with adapters.
        seen: Σ of seen_tokens over its prompts.
        """
        lora_s = self.lora_s + self.rank_s * ranks if ranks else 0.0
        lora_s += self.lora_token_s * adapted
        seen_s = self.seen_token_s * context + self.prompts_seen_s(seen, beside_decodes=context > 0)
        return self.rows_s(tokens) + lora_s + seen_s

    def prompts_seen_s(self, seen: int, *, beside_decodes: bool, steps: int = 1) -> float:
        """What N steps take more because their prompts see M tokens, as in step_s."""
        split_s = self.split_s if beside_decodes and seen >= SEEN_TO_SPLIT else 0.0
        pieces_s = self.pieces_s * min(steps, seen / SEEN_IN_PIECES)
        return self.prompt_seen_s * seen + pieces_s + split_s

    def prompts_s(self, tokens: float, seen: float) -> float:
        """What prompts take among others that fill steps; seen: Σ of their seen_tokens."""
        return self.prompt_token_s * tokens + self.prompt_seen_s * seen

    def prefill_s(
        self,
        tokens: int,
        rank: int,
        depth: int = 0,
        *,
        sequences: int = 0,
        ranks: int = 0,
        context: int = 0,
    ) -> float:
        """All steps of a prompt that has them to itself, but for the decodes beside it.

        tokens: those that are not cached; depth: how many come before them. sequences, ranks,
        context: of the decodes, as in step_s.
        """
        room = max(1, self.step_tokens - sequences)
        whole, rest = divmod(tokens, room)
        total_s = whole * self.step_s(sequences + room, ranks, context)
        if rest:
            total_s += self.step_s(sequences + rest, ranks, context)
        adapted_s = tokens * self.lora_token_s if rank else 0.0
        steps, seen = whole + (rest > 0), seen_tokens(tokens, depth)
        return total_s + adapted_s + self.prompts_seen_s(seen, beside_decodes=False, steps=steps)


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """How long it takes to load an adapter to the GPU, from each tier through all nearer ones.

    bytes_per_s: of each link. latency_s: what a load of no bytes would take.
    """

    # "Loading adapters": 84 MB from the host add 4.0 ms to a first token, from the disk 22 ms;
    # the copy alone runs at 55 GB/s, packing from the disk at 84 MB in 15 ms.
    host_latency_s: float = 2.5e-3
    host_bytes_per_s: float = 55e9
    disk_latency_s: float = 3.0e-3
    disk_bytes_per_s: float = 5.6e9
    # Not measured here: a first byte from S3 in 30 ms, then 8 Gb/s.
    remote_latency_s: float = 30e-3
    remote_bytes_per_s: float = 1e9

    def load_s(self, tier: Residency, size_bytes: int) -> float:
        """A load's time with nothing else on the links; 0 for an adapter that is on the GPU."""
        if tier is Residency.GPU:
            return 0.0
        seconds = self.host_latency_s + size_bytes / self.host_bytes_per_s
        if tier is Residency.HOST:
            return seconds
        seconds += self.disk_latency_s + size_bytes / self.disk_bytes_per_s
        if tier is Residency.DISK:
            return seconds
        return seconds + self.remote_latency_s + size_bytes / self.remote_bytes_per_s


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What steps and loads take on one engine, as far as it has measured them."""

    steps: StepCosts = field(default_factory=StepCosts)
    loads: LoadCosts = field(default_factory=LoadCosts)
