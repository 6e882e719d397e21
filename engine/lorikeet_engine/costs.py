"""What an engine's work costs: coefficients by which routing, placement and simulation estimate.

The defaults are those of one NVIDIA H200 with Llama-3.1-8B's shapes; the tables they come from are
in docs/benchmarks.md. An engine measures its own when it starts.
"""

from dataclasses import dataclass, field

from lorikeet_engine.adapter import Residency


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step of decodes takes base_s + sequence_s · sequences + LoRA's part.

    LoRA's part is lora_s + rank_s · Σ rank over the step's distinct adapters, nothing without any.
    A prompt's tokens take prompt_token_s each, and lora_token_s more with an adapter; a step has
    room for step_tokens of them beside the decodes, and for max_running sequences.
    """

    # "Decode steps": 4.25 ms with 1 sequence, 9.69 with 256.
    base_s: float = 4.23e-3
    sequence_s: float = 21.3e-6
    # "LoRA kernels": least squares over the rows of 1 to 256 tokens, within 0.2 ms of each.
    lora_s: float = 0.27e-3
    rank_s: float = 1.29e-6
    # "Prefill": 8,192 tokens in 185.8 ms; "LoRA kernels": 2.53 ms more for 2,048, 9.09 for 8,192.
    prompt_token_s: float = 22.7e-6
    lora_token_s: float = 1.2e-6
    # The engine's defaults.
    step_tokens: int = 2048
    max_running: int = 256

    def decode_s(self, sequences: int, ranks: int) -> float:
        """One step of decodes. ranks: Σ rank over its distinct adapters."""
        lora_s = self.lora_s + self.rank_s * ranks if ranks else 0.0
        return self.base_s + self.sequence_s * sequences + lora_s

    def prefill_steps(self, tokens: int) -> int:
        """The steps that a prompt takes part in."""
        return -(-tokens // self.step_tokens)

    def prefill_s(self, tokens: int, rank: int, sequences: int = 0, ranks: int = 0) -> float:
        """A prompt's steps, with this many sequences decoding beside it."""
        steps = self.prefill_steps(tokens)
        token_s = self.prompt_token_s + (self.lora_token_s if rank else 0.0)
        beside_s = self.decode_s(sequences, ranks) - self.base_s
        return max(tokens * token_s, steps * self.base_s) + steps * beside_s


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
