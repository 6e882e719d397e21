"""Fields common to requests that generate, of all APIs, and their conversion to a Call.

Every supported field is a field of a Body class (body.py). Any other field is refused and
named, unless its value has no effect.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from lorikeet.apis.body import Body, NoOps, misfit
from lorikeet.apis.fields import (
    INT32,
    MAX_CHOICES,
    AnyTopK,
    Biases,
    Metadata,
    MinP,
    RepetitionPenalty,
    Stop,
    Temperature,
    TokenId,
    TopP,
)
from lorikeet.apis.responses.items import StoredItems
from lorikeet.apis.structured_outputs import StructuredFields
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import MAX_MEMBERS, MAX_WEIGHT, Adapter
from lorikeet_engine.request import (
    MAX_PROMPT_LOGPROBS,
    LogprobsMode,
    SamplingParams,
    SchedulingParams,
)

MAX_MODEL_LENGTH = 2048
"""Limit on the characters of `model`, which may name MAX_MEMBERS adapters."""
_INT64 = 2**63 - 1

SAMPLING_NO_OPS: NoOps = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "priority": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Unsupported fields of vLLM with their values that have no effect."""

Tokens = Annotated[int, Field(ge=1, le=INT32)]
Seed = Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


NamedAdapters = Sequence[tuple[str, float]]
"""Adapters that a request composes: the name of each, as in `model`, and its weight."""


class ResolvedModel(NamedTuple):
    """Base model and adapter that a request's `model` names.

    rank: largest LoRA rank of the adapter's matrices; 0 for a base model.
    image_bytes: the adapter's size on a GPU; 0 for a base model.
    created: creation of the adapter's version, Unix seconds; 0 for a base model.
    trained_on: base model's name in the version's blob, "" if absent; None for a base model, or if
        an older release registered the version.
    is_recorded: whether the version is in the catalog's log, so that its number is final.
    defaults: the version's own request defaults; None: the base model's.

    Ranks and sizes of a composition (weighted sum of adapters) are sums over its adapters; it has
    request defaults if all its adapters have the same.
    """

    base_model: str
    adapter: Adapter | None = None
    rank: int = 0
    image_bytes: int = 0
    created: float = 0.0
    trained_on: str | None = None
    is_recorded: bool = True
    defaults: RequestDefaults | None = None


class CallContext(NamedTuple):
    """Facts about a request that are not in its body.

    created: Unix time, in seconds, that the answer shows.
    tenant: name of the tenant whose key sent the request.
    max_context: limit of tenant and key on the tokens of prompt and answer; None without a limit.
    model: base model and adapter that the request names.
    stored_items: items of stored responses that the request refers to.
    stores: whether the answer will be stored.
    sampling_defaults: values of sampling fields that the request leaves out, by field; first the
        adapter's own, then the base model's.
    """

    request_id: str
    created: int
    tenant: str
    max_context: int | None
    scheduling: SchedulingParams
    model: ResolvedModel
    stored_items: StoredItems = StoredItems()
    stores: bool = False
    sampling_defaults: Mapping[str, float] = {}


class ApiRequest(Body):
    """Request that generates or counts tokens, of any API."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_LENGTH)]

    def named_adapters(self, base_models: Collection[str]) -> NamedAdapters | None:
        """Return the names and weights of the adapters that the request composes; None if `model`
        names one model.

        Names in `model`, joined by +, have the weight 1.

        base_models: names of the served base models, which may contain +.

        Raises InvalidInput for more than MAX_MEMBERS names.
        """
        return adapters_in(self.model, base_models)

    def with_sampling_defaults(self, defaults: Mapping[str, float]) -> Self:
        """Return the request with defaults for the fields that it leaves out.

        defaults: values by field name. Fields that the request's schema lacks are ignored.
        """
        lacking = type(self).model_fields.keys() - self.model_fields_set
        given = {name: value for name, value in defaults.items() if name in lacking}
        return self.model_copy(update=given) if given else self

    def before_end(self) -> Callable[[bytes], Awaitable[bytes]] | None:
        """Return a function that converts a successful answer's body before it is sent to the
        client; None: the body is sent as it is.
        """
        return None

    @property
    def is_flex(self) -> bool:
        """Whether the request asks to run in the background: service_tier "flex"."""
        return getattr(self, "service_tier", None) == "flex"

    @abstractmethod
    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the parsed request that a replica gets."""

    @abstractmethod
    def session(self) -> str | None:
        """Return the session's name in the body (e.g. its `user`); None if the body names no
        session.
        """


def adapters_in(model: str, base_models: Collection[str]) -> NamedAdapters | None:
    """Return the adapters that a model's name joins by +, each with the weight 1; None if the name
    has one model.

    base_models: names of the served base models, which may contain +.

    Raises InvalidInput for more than MAX_MEMBERS names.
    """
    if "+" not in model or model in base_models:
        return None
    names = model.split("+")
    if len(names) > MAX_MEMBERS or not all(names):
        raise InvalidInput(
            f"model={model[:80]!r}: want 2 to {MAX_MEMBERS} adapters joined by +", param="model"
        )
    return [(name, 1.0) for name in names]


class OpenAIRequest(ApiRequest):
    """Fields common to OpenAI's endpoints. Subclasses define `stream_options`.

    metadata: accepted, without effect.
    user: name of a session. If an alias splits its requests between two versions, all requests of a
        session get the same version.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    stream: bool = False
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _streams(self) -> "OpenAIRequest":
        if "stream_options" in self.model_fields_set and not self.stream:
            raise misfit("stream_options", "want stream to be true with it")
        return self

    def session(self) -> str | None:
        """Return `user`, which names the request's session; None if it is absent."""
        return self.user


class StreamOptions(Body):
    """Options of a stream.

    include_usage: end the stream with a chunk that has the request's usage.
    continuous_usage_stats: with include_usage, every chunk has the usage so far.
    """

    no_ops: ClassVar[NoOps] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Body):
    """Fields that control sampling and an answer's end, common to OpenAI's APIs and vLLM's."""

    min_tokens: Annotated[int, Field(ge=0, le=INT32)] = 0
    top_k: AnyTopK = 0
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Biases | None = None
    seed: Seed | None = None
    stop: Stop = ()
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    ignore_eos: bool = False


class SampledRequest(SamplingFields, OpenAIRequest):
    """Fields that control sampling and an answer's end, common to chats, completions and responses.

    Beyond OpenAI's fields: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids,
    ignore_eos and logprobs_mode.

    limit_name: name of the field that `output_limit` returns.
    """

    limit_name: ClassVar[str] = "max_tokens"

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"

    @model_validator(mode="after")
    def _has_room(self) -> "SampledRequest":
        limit = self.output_limit()
        if limit is not None and self.min_tokens > limit:
            raise misfit("min_tokens", f"want at most {self.limit_name} ({limit})")
        return self

    @abstractmethod
    def output_limit(self) -> int | None:
        """Return the maximum number of tokens of one choice.

        None: a choice may fill the rest of the model's context.
        """

    def sampled(self) -> dict[str, Any]:
        """Return the values, by name, of the fields that control sampling and an answer's end."""
        return {name: getattr(self, name) for name in _SAMPLED}


_SAMPLED = SampledRequest.model_fields.keys() - OpenAIRequest.model_fields.keys()


class WeightedAdapter(Body):
    """Adapter among several that a request adds up.

    name: name of the adapter, as in `model`.
    weight: factor of what the adapter adds to each linear.
    """

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^+]*$")]
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0


class GenerateRequest(StructuredFields, SampledRequest):
    """Fields common to chats and completions, including vLLM's fields for structured outputs
    (StructuredFields).

    adapters: adapters to add up; `model` then names their base model.
    """

    adapters: (
        Annotated[list[WeightedAdapter], Field(min_length=1, max_length=MAX_MEMBERS)] | None
    ) = None

    max_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> "GenerateRequest":
        if self.prompt_logprobs is not None and self.stream:
            raise misfit("prompt_logprobs", "want stream to be false with it")
        return self

    def named_adapters(self, base_models: Collection[str]) -> NamedAdapters | None:
        """Return the names and weights in `adapters` or, without it, in `model`; None if `model`
        names one model.

        base_models: names of the served base models.

        Raises InvalidInput for `adapters` with a model that is no base model, and for more than
        MAX_MEMBERS names.
        """
        if self.adapters is None:
            return super().named_adapters(base_models)
        if self.model not in base_models:
            raise InvalidInput(
                f"model={self.model[:80]!r}: with adapters, want the name of their base model",
                param="model",
            )
        return [(each.name, each.weight) for each in self.adapters]

    def output_limit(self) -> int | None:
        """Return max_tokens; None: a choice may fill the rest of the model's context."""
        return self.max_tokens

    @abstractmethod
    def alternatives(self) -> int | None:
        """Return the number of most likely tokens to report at each position; None: no logprobs."""

    def echoed_logprobs(self) -> int | None:
        """Return the number of most likely tokens to report at each position of an echoed prompt.

        None: the prompt is not echoed, or no logprobs are requested.
        """
        return None

    def _common(self, context: CallContext) -> dict[str, Any]:
        options = self.stream_options
        defaults, sampling = context.model.defaults, self._sampling()
        own_stop: tuple[str, ...] = ()
        if defaults is not None and not self.ignore_eos:
            ids = (*sampling.stop_token_ids, *defaults.stop_token_ids)
            sampling, own_stop = replace(sampling, stop_token_ids=ids), defaults.stop
        return {
            "request_id": context.request_id,
            "created": context.created,
            "tenant": context.tenant,
            "model": self.model,
            "adapter": context.model.adapter,
            "adapter_rank": context.model.rank,
            "adapter_bytes": context.model.image_bytes,
            "is_recorded": context.model.is_recorded,
            "max_tokens": self.output_limit(),
            "min_tokens": self.min_tokens,
            "sampling": sampling,
            "prompt_logprobs": self.prompt_logprobs,
            "return_token_ids": self.return_token_ids,
            "tokens_as_ids": self.return_tokens_as_token_ids,
            "stop": self.stop,
            "defaults": defaults,
            "own_stop": own_stop,
            "n": self.n,
            "stream": self.stream,
            "include_usage": options.include_usage,
            "continuous_usage": options.include_usage and options.continuous_usage_stats,
            "scheduling": context.scheduling,
            "max_context": context.max_context,
        }

    def _sampling(self) -> SamplingParams:
        echoed = self.echoed_logprobs()
        of_prompts = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or (),
            logprobs=self.alternatives(),
            logprobs_mode=LogprobsMode(self.logprobs_mode),
            prompt_logprobs=max(of_prompts, default=None),
            keep_stop_token=echoed is not None or self.return_token_ids,
        )
