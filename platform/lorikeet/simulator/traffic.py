"""Setup of a simulated fleet, and its requests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.routing.ranking import H200_LLAMA_8B, CostCoefficients
from lorikeet.simulator.drafting import NO_DRAFTS, Drafting
from lorikeet.simulator.workload_models import Floats, Ints

BYTES_PER_RANK = 5_242_880  # Llama-3.1-8B, all 7 linears, bf16
KV_TOKEN_BYTES = 131_072  # Llama-3.1-8B, bf16
BASE_MODEL = -1  # in Requests.adapters: no adapter


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order of arrival; each field has one element for each request.

    times_s: arrival times.
    adapters: numbers of adapters, or BASE_MODEL.
    prompts, answers: lengths in tokens.
    """

    times_s: Floats
    adapters: Ints
    prompts: Ints
    answers: Ints

    def __len__(self) -> int:
        return len(self.times_s)


@dataclass(frozen=True, eq=False, kw_only=True)
class FleetSetup:
    """A fleet before its first request. Disks begin filled with adapters at random.

    replicas: number of replicas.
    ranks: LoRA rank of each adapter, [adapters].
    sizes: bytes of each adapter, [adapters].
    gpu_bytes, host_bytes, disk_bytes: memory of each replica for adapters.
    kv_tokens: tokens of prompts and answers that the KV cache of each replica holds at once.
    system_tokens: tokens of each adapter's system prompt, with which its prompts begin, [adapters];
        None: prompts share nothing.
    kv_host_tokens: tokens of system prompts that the host memory of each replica holds.
    kv_token_bytes: bytes of a token's keys and values on one GPU.
    pins: adapter → number of replicas that keep it on the GPU.
    gateways: number of routers, which take turns.
    status_age_s: largest age of a gateway's view of replicas.
    drafting: drafts of the replicas; by default none come true.
    warm_up_s: simulated time at the start that is not counted.
    """

    replicas: int
    ranks: Ints
    sizes: Ints
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    kv_tokens: float = math.inf
    system_tokens: Ints | None = None
    kv_host_tokens: int = 0
    kv_token_bytes: int = KV_TOKEN_BYTES
    pins: Mapping[int, int] = field(default_factory=dict)
    gateways: int = 4
    status_age_s: float = 0.15
    drafting: Drafting = NO_DRAFTS
    warm_up_s: float = 0.0
    seed: int = 1
    costs: CostCoefficients = H200_LLAMA_8B
