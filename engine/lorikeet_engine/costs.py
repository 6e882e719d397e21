"""Costs of an engine's work: coefficients for estimates in routing, placement and simulation.

The defaults were measured on one NVIDIA H200 with Llama-3.1-8B's shapes; the comments name their
tables in docs/benchmarks.md. An engine measures its own when it starts.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet_engine.adapter import Residency

SEEN_IN_PIECES = 1 << 16
"""Lower limit on the tokens that a step's prompts attend to (Σ seen_tokens) for the step to run as
several CUDA graphs.
"""
SEEN_TO_SPLIT = 1 << 19
"""Number of tokens that a step's prompts attend to (Σ seen_tokens) from which the step's decodes
cost more on CUDA.

The decodes of such a step have attention kernels of their own.
"""


MOST_DRAFTED = 23
"""Maximum number of drafted tokens of a sequence in a step (scheduling/draft_budget.py).

With the sequence's last token, they fill a step of 24 tokens, one of the CUDA graphs' sizes.
"""
MOST_NOISE = 8
"""Maximum number of noise tokens of a draft LoRA behind a sequence in a step."""
LEAST_DRAFT_GAIN = 1.1
"""Multiple of tokens per second that drafts must gain; less might be an error of the estimate."""
DRAFT_GAP_S = 1e-3
"""Assumed time for which the device waits, if no step can be launched before drafts are read."""


class RowsTime(NamedTuple):
    """Seconds of a step with this number of tokens, without attention and adapters."""

    tokens: int
    seconds: float


def seen_tokens(tokens: int, depth: int = 0) -> int:
    """Return the number of pairs of a prompt token and a token that it attends to.

    Each token attends to about all tokens before it, so the number is taken as tokens · (depth +
    tokens / 2).

    tokens: number of attending tokens, which are consecutive in a prompt.
    depth: number of prompt tokens before the attending tokens.
    """
    return tokens * (2 * depth + tokens) // 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Coefficients of a step's time; `step_s` is the formula that uses them.

    rows: measured times of steps without attention and adapters, in ascending order of their
        tokens. Times between two of them are interpolated, times beyond the last extrapolated, both
        linearly.
    seen_token_s: seconds for each token that a decode attends to, in all layers together.
    window: maximum number of tokens that a decode attends to in a layer with a sliding window;
        None: no layer has a sliding window.
    windowed: fraction of the layers that have a sliding window, from 0 to 1.
    prompt_seen_s: seconds for each token that a prompt token attends to, in all layers together.
    pieces_s: additional seconds of a step whose prompt tokens together attend to SEEN_IN_PIECES
        tokens or more: it runs as several CUDA graphs. Of a step whose prompt tokens attend to n
        tokens, fewer than that, n / SEEN_IN_PIECES of pieces_s: it runs as a single graph, which
        reads keys again for each token.
    split_s: additional seconds of a step that has decodes and whose prompt tokens together attend
        to SEEN_TO_SPLIT tokens or more.
    lora_s: additional seconds of a step with adapters.
    rank_s: seconds for each LoRA rank of the distinct adapters that decodes use.
    lora_token_s: seconds for each prompt token with an adapter.
    head_s: additional seconds of a step of decodes in which the head for multi-token prediction
        predicts; 0 without such a head.
    step_tokens: maximum number of tokens in a step.
    max_running: maximum number of sequences in a step.
    """

    # "Decode steps", without their attention: 4.25 ms with 1 sequence, 9.69 ms with 256. Up to 128
    # sequences a step is bound by reading the weights. "Prefill": 44.4 ms for 2,048 tokens,
    # pieces_s included.
    rows: tuple[RowsTime, ...] = (
        RowsTime(1, 4.24e-3),
        RowsTime(32, 4.4e-3),
        RowsTime(128, 5.1e-3),
        RowsTime(256, 7.15e-3),
        RowsTime(512, 9.7e-3),
        RowsTime(2048, 42.9e-3),
    )
    # Attention of a step of 256 decodes: 2.74 ms at 320 tokens each, 0.21 ms at 16.
    seen_token_s: float = 31e-9
    window: int | None = None
    windowed: float = 0.0
    # "Long contexts": chunks of 128 to 2,048 tokens at growing depths of a prompt.
    prompt_seen_s: float = 1.0e-9
    # "Long contexts": a step with a chunk of 128 tokens takes 5.8 ms at depth 0 and 8.6 ms at depth
    # 8,192, where attention takes 1.1 ms. Beside 64 decodes a chunk of 192 takes 9.9 and 15.0 ms.
    pieces_s: float = 1.6e-3
    split_s: float = 1.9e-3
    # "LoRA kernels": least squares over the rows of 1 to 256 tokens; off by 0.2 ms at most.
    lora_s: float = 0.27e-3
    rank_s: float = 1.29e-6
    # "LoRA kernels": adapters add 2.53 ms to 2,048 prompt tokens, 9.09 ms to 8,192.
    lora_token_s: float = 1.2e-6
    head_s: float = 0.0
    # The engine's defaults.
    step_tokens: int = 2048
    max_running: int = 256

    def __post_init__(self) -> None:
        counts = [tokens for tokens, _ in self.rows]
        if not counts or counts != sorted(set(counts)):
            raise ValueError(f"rows={self.rows}: want points of ascending tokens, at least one")

    @property
    def prompt_token_s(self) -> float:
        """Seconds for each prompt token in a step full of prompt tokens, without attention."""
        return (self.rows_s(self.step_tokens) + self.pieces_s) / self.step_tokens

    def rows_s(self, tokens: int) -> float:
        """Return the seconds of a step with this many tokens, without attention and adapters."""
        at = min(bisect_left(self.rows, (tokens,)), len(self.rows) - 1)
        if at == 0:
            return self.rows[0].seconds
        (few, few_s), (many, many_s) = self.rows[at - 1 : at + 1]
        return few_s + (many_s - few_s) * (tokens - few) / (many - few)

    def decode_sees(self, length: float) -> float:
        """Return how many tokens one decode attends to, averaged over all layers.

        A layer with a sliding window counts at most its window.

        length: number of tokens in the sequence, including the one being decoded.
        """
        if self.window is None or length <= self.window:
            return length
        return length - self.windowed * (length - self.window)

    def step_s(
        self, tokens: int, ranks: int, context: float = 0.0, *, adapted: int = 0, seen: int = 0
    ) -> float:
        """Return the seconds of one step:

            rows_s(tokens) + (lora_s + rank_s · ranks, if any) + lora_token_s · adapted
            + seen_token_s · context + prompt_seen_s · seen
            + (pieces_s and split_s, by the tokens that prompts attend to)

        tokens: number of tokens of decodes and prompts.
        ranks: sum of the LoRA ranks of the distinct adapters of the decodes.
        context: number of tokens that each decode attends to in the average layer, summed over the
            decodes.
        adapted: number of prompt tokens with adapters.
        seen: number of tokens that a prompt token attends to, summed over the prompt tokens.
        """
        lora_s = self.lora_s + self.rank_s * ranks if ranks else 0.0
        lora_s += self.lora_token_s * adapted
        seen_s = self.seen_token_s * context + self.prompts_seen_s(seen, beside_decodes=context > 0)
        return self.rows_s(tokens) + lora_s + seen_s

    def prompts_seen_s(self, seen: int, *, beside_decodes: bool, steps: int = 1) -> float:
        """Return the seconds that the attention of prompts adds to steps.

        seen: number of tokens that a prompt token attends to, summed over the prompt tokens of all
            steps.
        beside_decodes: whether the steps compute decodes in addition.
        steps: number of steps that the prompts are computed in.
        """
        split_s = self.split_s if beside_decodes and seen >= SEEN_TO_SPLIT else 0.0
        pieces_s = self.pieces_s * min(steps, seen / SEEN_IN_PIECES)
        return self.prompt_seen_s * seen + pieces_s + split_s

    def prompts_s(self, tokens: float, seen: float) -> float:
        """Return the seconds that prompts add to steps that are otherwise full of other prompts.

        tokens: number of prompt tokens.
        seen: number of tokens that a prompt token attends to, summed over the prompt tokens.
        """
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
        """Return the seconds of the steps that compute one prompt, beside decodes but no other
        prompt.

        tokens: number of prompt tokens that are not cached.
        rank: LoRA rank of the prompt's adapter; 0 without an adapter.
        depth: number of prompt tokens that are cached.
        sequences: number of decodes in each step.
        ranks: sum of the LoRA ranks of the distinct adapters of the decodes.
        context: number of tokens that each decode attends to in the average layer, summed over the
            decodes.
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
    """Latency and bandwidth of loading adapters, from each tier to the next tier nearer to the GPU.

    A load to the GPU passes all tiers between: remote store, disk, host memory, GPU.

    host_latency_s, disk_latency_s, remote_latency_s: seconds that a load from this tier to the next
        nearer one takes, whatever its size.
    host_bytes_per_s, disk_bytes_per_s, remote_bytes_per_s: bandwidth from this tier to the next
        nearer one.
    """

    # "Loading adapters": loading 84 MB delays a first token by 4.0 ms from the host and by 22 ms
    # from the disk. The copy alone runs at 55 GB/s; packing 84 MB from the disk takes 15 ms.
    host_latency_s: float = 2.5e-3
    host_bytes_per_s: float = 55e9
    disk_latency_s: float = 3.0e-3
    disk_bytes_per_s: float = 5.6e9
    # Assumed, not measured: a first byte from S3 after 30 ms, then 8 Gb/s.
    remote_latency_s: float = 30e-3
    remote_bytes_per_s: float = 1e9

    def load_s(self, tier: Residency, size_bytes: int) -> float:
        """Return the seconds of loading an adapter to the GPU if nothing else is loaded meanwhile.

        tier: nearest tier that holds the adapter; 0 s are returned for the GPU.
        """
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
    """Costs of one engine's steps and adapter loads; defaults where nothing was measured."""

    steps: StepCosts = field(default_factory=StepCosts)
    loads: LoadCosts = field(default_factory=LoadCosts)
