"""Input file of `lorikeet capacity`, in TOML or JSON: docs/capacity.md describes its fields."""

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic.functional_validators import AfterValidator

from lorikeet.catalog.names import check_name
from lorikeet.errors import InvalidInput
from lorikeet.routing.ranking import CostCoefficients
from lorikeet.settings import Bytes
from lorikeet.simulator.demand import SimulatedDemand, SimulatedTenant
from lorikeet.simulator.drafting import Drafting, Source
from lorikeet.simulator.forecast import CapacityGoals, CapacityNeeds, ReplicaMemory
from lorikeet.simulator.traffic import BYTES_PER_RANK, KV_TOKEN_BYTES
from lorikeet.simulator.workload_models import LENGTH_MODELS, RANKS, LengthModel, parse_popularity
from lorikeet_engine.costs import LoadCosts, StepCosts

_P99 = 2.3263  # standard deviations above the mean


def _popularity(text: str) -> str:
    parse_popularity(text)
    return text


def _tenant_name(name: str) -> str:
    try:
        return check_name(name, "name")
    except InvalidInput as error:
        raise ValueError(error.message) from error


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] <= pair[1]:
        raise ValueError("want [p50, p99], the smaller first")
    return pair


_MOST_REQUESTS_PER_S = 10_000  # each is simulated
_Strict = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
_Tokens = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_rising)]


class _Lengths(BaseModel):
    """Lengths of prompts and answers: p50 and p99, in tokens."""

    model_config = _Strict
    prompt: _Tokens
    answer: _Tokens

    def model(self) -> LengthModel:
        prompt, answer = map(_lognormal, (self.prompt, self.answer))
        return LengthModel(*prompt, *answer)


_AnyLengths = Literal["conv", "code"] | _Lengths


class _Traffic(BaseModel):
    model_config = _Strict
    base_requests_per_s: float = Field(default=0.0, ge=0, le=_MOST_REQUESTS_PER_S)
    lengths: _AnyLengths = "conv"
    context: int = Field(default=8192, ge=2)
    cv: float = Field(default=1.0, gt=0, le=10)
    speculation: Source = "lookup"
    acceptance: float = Field(default=0.0, ge=0, lt=1)
    found: float = Field(default=0.7, gt=0, le=1)


class _Tenant(BaseModel):
    model_config = _Strict
    name: Annotated[str, AfterValidator(_tenant_name)]
    adapters: int = Field(ge=1, le=1_000_000)
    ranks: tuple[PositiveInt, ...] = Field(default=RANKS, min_length=1)
    bytes_per_rank: Bytes = BYTES_PER_RANK
    popularity: Annotated[str, AfterValidator(_popularity)] = "zipf:1.0"
    requests_per_s: float = Field(gt=0, le=_MOST_REQUESTS_PER_S)
    lengths: _AnyLengths | None = None
    ttft_p99_ms: PositiveFloat | None = None
    system_tokens: int = Field(default=0, ge=0)


class _Memory(BaseModel):
    model_config = _Strict
    gpu: Bytes
    host: Bytes = 64 * 2**30
    disk: Bytes = 500 * 2**30
    gpus: PositiveInt = 1
    kv_tokens: PositiveInt | None = None
    kv_host: Bytes = 0
    kv_token: Bytes = Field(default=KV_TOKEN_BYTES, gt=0)


class _Goals(BaseModel):
    model_config = _Strict
    ttft_p99_ms: PositiveFloat | None = None
    inter_token_p50_ms: PositiveFloat | None = None
    inter_token_p99_ms: PositiveFloat | None = None
    hit_rate: float | None = Field(default=None, gt=0, le=1)


class _Costs(BaseModel):
    model_config = _Strict
    steps: StepCosts = StepCosts()
    loads: LoadCosts = LoadCosts()


_MEASURED = {
    "steps": "when it starts (step_costs_measured in its log)",
    "loads": "as it loads adapters (lorikeet_adapter_load_seconds at /metrics)",
}


class _CapacityFile(BaseModel):
    model_config = _Strict
    traffic: _Traffic = Field(default_factory=_Traffic)
    tenants: tuple[_Tenant, ...] = Field(min_length=1)
    memory: _Memory
    goals: _Goals = Field(default_factory=_Goals)
    costs: _Costs = Field(default_factory=_Costs)


def read_needs(path: Path) -> CapacityNeeds:
    """Read an input file of `lorikeet capacity`: traffic, memory, costs and goals.

    Raises InvalidInput if the file cannot be read or its content is not allowed.
    """
    try:
        text = path.read_text()
        given = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    return parse_needs(given, str(path))


def parse_needs(given: Mapping[str, Any], where: str) -> CapacityNeeds:
    """Convert the parsed content of an input file of `lorikeet capacity`.

    Raises InvalidInput if the content is not allowed.

    given: parsed TOML or JSON.
    where: name of the file in errors.
    """
    try:
        asked = _CapacityFile.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(filter(None, map(_describe, error.errors())))
        raise InvalidInput(f"{where}: {problems}") from error
    names = [tenant.name for tenant in asked.tenants]
    if len(set(names)) < len(names):
        raise InvalidInput(f"{where}: tenants: want each name once")
    if not any(asked.goals.model_dump().values()) and not any(t.ttft_p99_ms for t in asked.tenants):
        raise InvalidInput(f"{where}: want a goal, such as goals.ttft_p99_ms = 500")
    gpus, kv_tokens, context = asked.memory.gpus, asked.memory.kv_tokens, asked.traffic.context
    if kv_tokens is not None and kv_tokens < context:
        raise InvalidInput(
            f"{where}: memory.kv_tokens={kv_tokens}: want traffic.context={context} or more, as a "
            "replica refuses requests that its KV cache cannot hold"
        )
    for tenant in asked.tenants:
        if tenant.system_tokens >= context // 2:
            raise InvalidInput(
                f"{where}: system_tokens={tenant.system_tokens} of {tenant.name}: want less than "
                f"half of traffic.context={context}"
            )
    if asked.memory.kv_host and kv_tokens is None:
        raise InvalidInput(
            f"{where}: memory.kv_host: want memory.kv_tokens, too: no page leaves a KV cache "
            "without a limit"
        )
    for costs, source in _MEASURED.items():
        if gpus > 1 and costs not in asked.costs.model_fields_set:
            raise InvalidInput(
                f"{where}: memory.gpus={gpus}: want costs.{costs}, too, which an engine on {gpus} "
                f"GPUs measures {source}: the defaults are for one GPU"
            )
    return _needs(asked)


def _needs(asked: _CapacityFile) -> CapacityNeeds:
    traffic, memory, goals = asked.traffic, asked.memory, asked.goals
    usual = _model(traffic.lengths)
    demand = SimulatedDemand(
        tuple(
            SimulatedTenant(
                each.name,
                each.adapters,
                each.ranks,
                each.bytes_per_rank,
                each.popularity,
                each.requests_per_s,
                usual if each.lengths is None else _model(each.lengths),
                _seconds(each.ttft_p99_ms),
                each.system_tokens,
            )
            for each in asked.tenants
        ),
        usual,
        traffic.base_requests_per_s,
        traffic.cv,
        traffic.context,
        Drafting(traffic.speculation, traffic.acceptance, traffic.found),
    )
    return CapacityNeeds(
        demand,
        ReplicaMemory(
            memory.gpu,
            memory.host // memory.gpus,
            memory.disk // memory.gpus,
            memory.gpus,
            memory.kv_tokens or math.inf,
            memory.kv_host // memory.gpus,
            memory.kv_token,
        ),
        CapacityGoals(
            _seconds(goals.ttft_p99_ms),
            _seconds(goals.inter_token_p50_ms),
            _seconds(goals.inter_token_p99_ms),
            goals.hit_rate,
        ),
        CostCoefficients(asked.costs.steps, asked.costs.loads),
    )


def _model(lengths: str | _Lengths) -> LengthModel:
    return LENGTH_MODELS[lengths] if isinstance(lengths, str) else lengths.model()


def _lognormal(tokens: tuple[float, float]) -> tuple[float, float]:
    """Return μ and σ of the normal distribution of ln(length).

    tokens: p50 and p99 of the length.
    """
    return math.log(tokens[0]), math.log(tokens[1] / tokens[0]) / _P99


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _describe(problem: Any) -> str | None:
    if problem["type"] == "too_short" and problem["input"]:
        return None  # its items have errors, which are described themselves
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{name} is not a known field: docs/capacity.md lists them"
    if problem["type"] == "missing":
        return f"{name} is missing"
    return f"{name}={problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"
