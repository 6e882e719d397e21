"""Settings of the service. `Settings.from_env()` reads them from the environment."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from lorikeet.addresses import (
    Address,
    parse_address,
    parse_catalog,
    parse_collector,
    parse_folder,
    parse_prefixes,
)
from lorikeet.errors import InvalidSetting
from lorikeet.oidc_issuer import OidcIssuer, parse_oidc_issuer
from lorikeet.prices import FLEX, Price, parse_prices
from lorikeet.sizes import parse_size

PREFIX = "LORIKEET_"
_CLIENT_VARIABLES = frozenset({"LORIKEET_SERVER", "LORIKEET_ADMIN_KEY"})  # only the CLI's


def _parse_memory(value: object) -> object:
    text = str(value).strip()
    if text == "auto":
        return text
    if not text.endswith("%"):
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"{error}, or a share such as 20%") from error
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = 0
    if not 0 < share <= 1:
        raise ValueError("want a share above 0% and up to 100%")
    return share


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split `name=value,name=value` into pairs; a missing name or value becomes ""."""
    items = [item.partition("=") for item in text.split(",") if item.strip()]
    return [(name.strip(), value.strip()) for name, _, value in items]


def _parse_models(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs = _pairs(value)
    models = {name: Path(folder) for name, folder in pairs}
    if not pairs or not all(map(all, pairs)):
        raise ValueError("want name=folder, separated by commas")
    if len(models) < len(pairs):
        raise ValueError("a name is given twice")
    for name in models:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):  # names files, handles and labels
            raise ValueError(f"{name!r}: want a name of letters, digits, '.', '_' and '-'")
    return models


def _by_model(value: object, given: ValidationInfo) -> object:
    """Return a setting's values by base model, from one value for all base models or from
    `a=4,b=1`.

    Base models that `a=4,b=1` does not name get the field's default.

    Raises ValueError for an unknown base model, a name that comes twice, or a missing value.

    value: one value, a text such as `a=4,b=1`, or a mapping by base model.
    given: the field's name, and the fields validated before, among them the base models.
    """
    models = given.data.get("base_models", {})
    assert given.field_name is not None
    default = Settings.model_fields[given.field_name].default
    if value is None:
        return {}
    if isinstance(value, Mapping) or "=" not in str(value):
        numbers = value if isinstance(value, Mapping) else dict.fromkeys(models, value)
    else:
        pairs = _pairs(str(value))
        numbers = dict(pairs)
        if len(numbers) < len(pairs) or not all(numbers.values()):
            raise ValueError("want one value, or name=value of some base models, each once")
    unknown = sorted(numbers.keys() - models)
    if unknown:
        raise ValueError(f"{unknown[0]} is no base model: there are {', '.join(sorted(models))}")
    return numbers if default is None else {**dict.fromkeys(models, default), **numbers}


Bytes = Annotated[int, BeforeValidator(parse_size)]
Memory = Annotated[int | float | Literal["auto"], BeforeValidator(_parse_memory)]
"""Memory: bytes as an int, a fraction of the device's free memory as a float, or "auto".

A fraction is above 0 and at most 1.
"""
ByModel = Annotated[dict[str, Annotated[int, Field(ge=1)]], BeforeValidator(_by_model)]
"""Numbers of at least 1 by base model."""
WeightDtypes = Annotated[
    dict[str, Literal["auto", "packed", "nf4", "fp8"]], BeforeValidator(_by_model)
]
GenerationConfigs = Annotated[dict[str, Literal["auto", "none"]], BeforeValidator(_by_model)]
KvDtypes = Annotated[dict[str, Literal["auto", "fp8"]], BeforeValidator(_by_model)]
StateDtypes = Annotated[dict[str, Literal["float32", "bfloat16"]], BeforeValidator(_by_model)]


class Settings(BaseModel):
    """Settings of the service, one field per LORIKEET_ variable.

    Construct with `Settings.from_env()`, which reads the environment.

    The constructor itself ignores the environment: a bare `Settings()` means the demo's base model,
    with catalog and cache in `.lorikeet` of the current folder.

    A field's description is its documentation in docs/settings.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    catalog: Annotated[str, BeforeValidator(parse_catalog)] = Field(
        ".lorikeet/catalog",
        description="a folder, or s3://bucket/prefix; credentials and endpoint as boto3 reads "
        "them: AWS_…",
    )
    base_models: Annotated[dict[str, Path], BeforeValidator(_parse_models)] = Field(
        default={"lorikeet-demo": Path("demo/model")},
        description="name=folder of each base model, separated by commas: Hugging Face folders of "
        "the families in base-models.md",
    )
    replicas: ByModel = Field(
        2,
        validate_default=True,
        description="engine replicas of each base model, LORIKEET_TENSOR_PARALLEL GPUs each where "
        "there are GPUs; a=4,b=1 for some, the others have the default",
    )
    max_replicas: ByModel = Field(
        None,
        validate_default=True,
        description="most replicas of each base model: replicas are added when adapters in use "
        "outgrow the slot pools, requests wait, or LORIKEET_MAX_RUNNING or KV pages are used up, "
        "and removed minutes after; a=8 for some; not set: LORIKEET_REPLICAS",
    )
    tensor_parallel: ByModel = Field(
        1,
        validate_default=True,
        description="GPUs of each replica, all on one machine, over which the base model is "
        "sharded; a=2 for some base models; processes where there are no GPUs",
    )
    gateways: int = Field(1, ge=1, description="gateway replicas")
    admin_address: Annotated[Address, BeforeValidator(parse_address)] = Field(
        Address("127.0.0.1", 8001),
        description="host:port of the admin listener, where each gateway serves the admin API, "
        "metrics and the tenants' API; the gateways of one host share it",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where engines run, cpu or cuda; auto: cuda where there is a GPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="data type of the base model: float32, bfloat16 or float16; auto: bfloat16 on "
        "cuda, float32 on cpu",
    )
    weight_dtype: WeightDtypes = Field(
        "auto",
        validate_default=True,
        description="storage of the linears' weights: auto, as in the checkpoint, but 4 bits as "
        "floats, except MXFP4 on GPUs of Ampere or newer; packed, 4 bits as in an AWQ, GPTQ, "
        "W4A16, NF4 or MXFP4 checkpoint; fp8, rounded, half of bfloat16's memory; nf4, rounded to "
        "the format on which QLoRA trains adapters, in as much memory as floats; a=fp8 for some "
        "base models",
    )
    kv_dtype: KvDtypes = Field(
        "auto",
        validate_default=True,
        description="data type of the KV cache: auto, the base model's; or fp8 (E4M3), which holds "
        "twice as many tokens as 16 bits; a=fp8 for some base models",
    )
    state_dtype: StateDtypes = Field(
        "float32",
        validate_default=True,
        description="data type of the states of delta nets and Mamba 2: float32, as the "
        "checkpoints say; or bfloat16, half the memory and less exact (base-models.md); a=bfloat16 "
        "for some base models",
    )
    adapter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="data type of adapters on the device; auto: the base model's"
    )
    generation_config: GenerationConfigs = Field(
        "auto",
        validate_default=True,
        description="sampling of requests that leave fields out: auto, temperature, top_p, top_k, "
        "min_p and repetition_penalty of the base model's generation_config.json, if there; none: "
        "always the API's defaults; a=none for some base models",
    )
    max_context: ByModel = Field(
        None,
        validate_default=True,
        description="longest prompt plus output, tokens; a=8192 for some base models; not set: as "
        "long as the model and the KV cache allow",
    )
    kv_cache_memory: Memory = Field(
        "auto",
        description="KV cache on each device: bytes, or a share such as 80% of the memory that "
        "weights, slot pool, the largest step and CUDA graphs leave; auto: 90% on cuda, 256MiB on "
        "cpu",
    )
    kv_host_memory: Bytes | None = Field(
        None,
        description="host memory of each replica for KV pages that leave the prefix cache, which "
        "come back faster than they are computed (operations.md); not set: none",
    )
    kv_disk: Bytes | None = Field(
        None,
        description="local disk of each replica, in LORIKEET_CACHE_DIR, for KV pages that leave "
        "LORIKEET_KV_HOST_MEMORY; gone when the replica ends (operations.md); not set: none",
    )
    learned_prompts: int = Field(
        0,
        ge=0,
        description="most adapters of each base model for which replicas compute what the last "
        "day's prompts began with before users ask, after a start or a push (operations.md); 0: "
        "nothing is learned",
    )
    state_memory: Memory = Field(
        "auto",
        description="states of delta nets and Mamba 2 on each device, before the KV cache: bytes, "
        "or a share such as 40% of the memory that weights, slot pool, the largest step and CUDA "
        "graphs leave; auto: LORIKEET_MAX_RUNNING states and one more, and a cached one for each "
        "2,048 tokens of the KV cache (operations.md)",
    )
    adapter_gpu_memory: Memory = Field(
        "auto",
        description="slot pool, the adapters' memory on each device: bytes, or a share such as 20% "
        "of the memory that the weights leave; auto: 10% on cuda, 64MiB on cpu; with a moving "
        "border 2.5% and 16MiB",
    )
    moving_border: bool = Field(
        False,
        description="adapters borrow memory of the KV cache while they need it more, and give it "
        "back; LORIKEET_ADAPTER_GPU_MEMORY is then the least that they have (operations.md)",
    )
    adapter_host_memory: Bytes = Field(
        256 * 2**20,
        description="host arena of each replica, for adapters off the GPU; registration refuses "
        "larger adapters",
    )
    adapter_disk: Bytes = Field(
        4 * 2**30, description="disk cache, shared by the replicas of a machine"
    )
    cache_dir: Annotated[Path, BeforeValidator(parse_folder)] = Field(
        Path(".lorikeet/cache"),
        description="folder of the disk cache, and of pushed adapters until the store has them",
    )
    max_rank: int = Field(64, ge=1, description="largest LoRA rank accepted")
    max_adapter_bytes: Bytes = Field(2**30, description="largest adapter upload accepted")
    max_added_tokens: int = Field(
        0,
        ge=0,
        le=2**16,
        description="largest number of tokens behind a base model's vocabulary that adapters with "
        "a resized vocabulary may have; logits of all requests have as many columns more, so "
        "multiples of 64 are best",
    )
    import_from: Annotated[tuple[str, ...], BeforeValidator(parse_prefixes)] = Field(
        (),
        description="s3://bucket/prefix from which lorikeet register may read adapters, several "
        "separated by commas; not set: none",
    )
    load_from: Annotated[Path | None, BeforeValidator(parse_folder)] = Field(
        None,
        description="folder, on a file system that all gateways and trainers share, with a folder "
        "of each tenant's name, from which its publish keys may load adapters by vLLM's endpoints "
        "(training.md); not set: these endpoints do not exist",
    )
    tinker: bool = Field(
        False,
        description="serve the sampling side of Tinker's API below /api/v1 (training.md)",
    )
    max_batch_tokens: int = Field(2048, ge=1, description="most tokens of one step")
    max_running: int = Field(256, ge=1, description="most sequences of one step")
    max_batch_adapters: int = Field(128, ge=1, description="most distinct adapters of one step")
    inter_token_goal_ms: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="goal for the milliseconds between two tokens: bounds the ranks of a step's "
        "adapters, the prompt tokens beside decodes and the drafted tokens, but one adapter always "
        "runs; not set: no goal",
    )
    speculation: Literal["off", "lookup", "mtp", "draft"] = Field(
        "off",
        description="lookup: verify several tokens of an answer in one step, drafted from what "
        "followed the same tokens earlier in its prompt or output, or in the adapter's recent "
        "answers to its tenant; answers stay the same (operations.md). mtp: lookup, and drafts of "
        "the base model's own MTP head, which Qwen 3.5's checkpoints have. draft: lookup, and "
        "drafts of the adapter of `lorikeet pin --draft`",
    )
    usage_flush_s: float = Field(
        15.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds between two writes of tenants' usage; a killed process loses no more "
        "than that",
    )
    prices: Annotated[dict[str, Price], BeforeValidator(parse_prices)] = Field(
        default={},
        description="prices of a million tokens, as name=input/cached/output of base models and of "
        "adapters (acme/support=0.3/0.06/1.2), separated by commas, in any currency: computed and "
        "cached tokens of prompts, and tokens of answers (usage.md); an adapter without prices "
        "has its base model's; llama:flex=… and acme/support:flex=… are those of batches and of "
        "service tier flex; not set: nothing costs",
    )
    responses_lifetime_h: int | None = Field(
        None,
        ge=1,
        le=24 * 366,
        description="hours for which the catalog's store keeps responses, so that requests can "
        "name them as previous_response_id; not set: none is stored",
    )
    files_bytes: Bytes | None = Field(
        None,
        description="bytes of files that the catalog's store keeps for each tenant, input and "
        "output of batches; not set: there are no files and no batches",
    )
    open_batches: int = Field(
        20, ge=1, description="batches of each tenant that have not ended, with files_bytes"
    )
    max_queue_s: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="most seconds that a request waits in a replica's queue; a request that would "
        "wait longer is refused at once, with Retry-After",
    )
    max_ongoing_requests: int = Field(
        512, ge=1, description="requests that one replica takes at once"
    )
    max_connections: int = Field(
        16_384,
        ge=1,
        description="connections of clients that each HTTP listener of a process keeps open, fewer "
        "if its limit on open files (ulimit -n) leaves no more; beyond them the longest idle one "
        "is closed; more than the requests at once that you expect; read where Ray starts, too",
    )
    audit_log: str | None = Field(
        None,
        min_length=1,
        description="where each gateway writes one line of JSON for each change that an admin's "
        "key asks for: a file of its machine, to which lines are appended, or stdout; or the "
        "address of an OpenTelemetry collector, such as http://collector:4318, for OTLP logs "
        "(operations.md); not set: nowhere",
    )
    oidc: Annotated[OidcIssuer | None, BeforeValidator(parse_oidc_issuer)] = Field(
        None,
        description="issuer of OpenID Connect tokens that are accepted beside keys, as "
        "issuer=URL,audience=NAME,jwks=URL, and tenant=claim,roles=claim if these claims have "
        "other names (tenants.md); not set: keys alone",
    )
    otlp_traces_endpoint: Annotated[str | None, BeforeValidator(parse_collector)] = Field(
        None,
        description="address of an OpenTelemetry collector for traces by OTLP/HTTP, such as "
        "http://collector:4318; not set: no traces",
    )
    traces_sampling_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="share of the requests that are traced; a caller's traceparent overrides it",
    )

    def most_replicas(self, base_model: str) -> int:
        """Return the maximum number of replicas of one base model."""
        return self.max_replicas.get(base_model, self.replicas[base_model])

    @property
    def most_engines(self) -> int:
        """Maximum number of replicas of all base models together."""
        return sum(map(self.most_replicas, self.base_models))

    @field_validator("prices")
    @classmethod
    def _of_base_models(cls, value: dict[str, Price], given: ValidationInfo) -> dict[str, Price]:
        models = given.data.get("base_models", {})
        for name in (each.removesuffix(FLEX) for each in value):
            if "/" not in name and models and name not in models:
                raise ValueError(
                    f"{name} is no base model: there are {', '.join(sorted(models))}; adapters are "
                    "named tenant/name"
                )
        return value

    @field_validator("kv_disk")
    @classmethod
    def _behind_host_memory(cls, value: int | None, given: ValidationInfo) -> int | None:
        if value and not given.data.get("kv_host_memory"):
            raise ValueError(f"pages come from {PREFIX}KV_HOST_MEMORY: set that, too")
        return value

    @field_validator("max_replicas")
    @classmethod
    def _at_least_replicas(cls, value: dict[str, int], given: ValidationInfo) -> dict[str, int]:
        replicas = given.data.get("replicas", {})
        for name, most in value.items():
            if most < replicas.get(name, 1):
                raise ValueError(f"want at least {PREFIX}REPLICAS, which is {replicas[name]}")
        return value

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Return the settings of the LORIKEET_ variables in `environ`, or defaults.

        Raises InvalidSetting for an invalid or empty value, or an unknown name.
        """
        given = {
            name.removeprefix(PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(PREFIX) and name not in _CLIENT_VARIABLES
        }
        for name, value in given.items():
            if not value.strip():
                variable = PREFIX + name.upper()
                raise InvalidSetting(f"{variable} is set but empty: unset it or give a value")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problems = dict.fromkeys(map(_describe, error.errors()))  # once, not per base model
            raise InvalidSetting("; ".join(problems)) from error


def _describe(problem: Any) -> str:
    name = PREFIX + str(problem["loc"][0]).upper()
    if problem["type"] == "extra_forbidden":
        known = sorted(PREFIX + field.upper() for field in Settings.model_fields)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        meant = f": did you mean {close[0]}?" if close else "."
        return f"{name} is not a setting{meant} There are {', '.join(known)}"
    return f"{name}={problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"
