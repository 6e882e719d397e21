"""Paths and bodies of Tinker's endpoints."""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from lorikeet.apis.body import Body, NoOps, misfit
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.errors import TINKER
from lorikeet.apis.fields import INT32, MAX_CHOICES, AnyTopK, Stop, Temperature, TokenId, TopP
from lorikeet.apis.request import MAX_MODEL_LENGTH, ApiRequest, CallContext, Seed, Tokens
from lorikeet.gateway.tinker.sample_response import WantedLogprobs, sample_response
from lorikeet.protocol.messages import Call
from lorikeet_engine.request import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS

CONFIG, DYNAMIC_CONFIG = f"{TINKER}client/config", f"{TINKER}client/dynamic_config"
CREATE_SESSION, HEARTBEAT = f"{TINKER}create_session", f"{TINKER}session_heartbeat"
FINISH_SESSION, TELEMETRY = f"{TINKER}sessions/{{session_id}}/finish", f"{TINKER}telemetry"
CREATE_SAMPLING_SESSION = f"{TINKER}create_sampling_session"
SAMPLER, WEIGHTS_INFO = f"{TINKER}samplers/{{sampler_id}}", f"{TINKER}weights_info"
CAPABILITIES, HEALTH = f"{TINKER}get_server_capabilities", f"{TINKER}healthz"
SAMPLE = f"{TINKER}asample"
RETRIEVE, CANCEL = f"{TINKER}retrieve_future", f"{TINKER}cancel_future"
TRAINING = tuple(
    f"{TINKER}{name}"
    for name in (
        *("create_model", "unload_model", "get_info", "forward", "forward_backward", "optim_step"),
        *("create_custom_loss", "load_weights", "copy_weights"),
        *("save_weights", "save_weights_for_sampler", "save_weights_external"),
    )
)
"""Paths of training, which is refused."""

_SCHEME = "tinker://"
_Model = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_LENGTH)]


def sampling_session_id(model: str) -> str:
    """Return the id of a model's sampling sessions: its name, in characters that URLs may have.

    Gateways keep nothing else of a sampling session, so each can serve it.
    """
    return urlsafe_b64encode(model.encode()).decode().rstrip("=")


def model_of_session(session_id: object) -> str:
    """Return the name of a sampling session's model, from the session's id.

    Raises ValueError if `session_id` is not such an id.
    """
    try:
        coded = str(session_id).encode("ascii")
        return urlsafe_b64decode(coded + b"=" * (-len(coded) % 4)).decode()
    except ValueError:
        raise ValueError("want a sampling session's id, as create_sampling_session returns") from (
            None
        )


def _model_of_path(path: str) -> str:
    """Return the name of the model in a tinker:// path. Raises ValueError for another path."""
    model = path.removeprefix(_SCHEME)
    if model == path or not model:
        raise ValueError(f"want {_SCHEME}tenant/name, with @version, @alias or @digest or without")
    return model


_Path = Annotated[_Model, AfterValidator(_model_of_path)]


class SamplingSessionRequest(Body):
    """Body of a request to create a sampling session.

    base_model: name of a base model; without effect beside model_path.
    model_path: tinker:// path of an adapter, parsed to the adapter's name.
    """

    no_ops: ClassVar[NoOps] = {"type": ["create_sampling_session"]}
    dropped: ClassVar[frozenset[str]] = frozenset({"session_id", "sampling_session_seq_id"})

    base_model: _Model | None = None
    model_path: _Path | None = None

    @model_validator(mode="after")
    def _names_a_model(self) -> "SamplingSessionRequest":
        if self.base_model is None and self.model_path is None:
            raise misfit("base_model", "want either it or model_path")
        return self


class WeightsInfoRequest(Body):
    """Body of a request for an adapter's base model and rank.

    tinker_path: tinker:// path of the adapter, parsed to its name.
    """

    tinker_path: _Path


class FutureRequest(Body):
    """Body of a request to retrieve or to cancel samples.

    request_id: id that the request for the samples returned.
    """

    dropped: ClassVar[frozenset[str]] = frozenset({"allow_metadata_only"})  # answers are whole

    request_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class EncodedText(Body):
    """Part of a prompt: token ids."""

    hints: ClassVar[dict[str, str]] = dict.fromkeys(
        ("data", "location", "dmel"), ": prompts are token ids, in chunks of type encoded_text"
    )

    tokens: list[TokenId]
    type: Literal["encoded_text"] = "encoded_text"


class ModelInput(Body):
    """Prompt in parts, which are joined."""

    chunks: Annotated[list[EncodedText], Field(max_length=4096)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the whole prompt."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


def _kind_of_stop(value: object) -> str:
    are_ids = isinstance(value, list) and all(type(each) is int for each in value)
    return "token_ids" if are_ids else "texts"


_StopIds = Annotated[list[TokenId], Field(max_length=64)]


class TinkerSampling(Body):
    """Tinker's SamplingParams.

    stop: strings or token ids that end a sample, in addition to the model's end-of-sequence tokens;
        with an empty list only max_tokens ends it, not even these tokens.
    """

    max_tokens: Tokens | None = None
    seed: Seed | None = None
    stop: (
        Annotated[
            Annotated[_StopIds, Tag("token_ids")] | Annotated[Stop, Tag("texts")],
            Discriminator(_kind_of_stop),
        ]
        | None
    ) = None
    temperature: Temperature = 1.0
    top_k: AnyTopK = -1
    top_p: TopP = 1.0


class SampleRequest(ApiRequest):
    """Body of a request for samples.

    model: name of the model, parsed from the body's sampling_session_id.
    prompt_logprobs: return log probabilities of the prompt's tokens.
    prompt_logprobs_last_n: number of last tokens of the prompt that get log probabilities; null:
        all but the first.
    """

    no_ops: ClassVar[NoOps] = {
        "type": ["sample"],
        "prompt_alt_tokens_k": [0],
        "record_stability_info": [False],
    }
    dropped: ClassVar[frozenset[str]] = frozenset({"seq_id"})
    max_values: ClassVar[int] = 2**18

    model: Annotated[_Model, BeforeValidator(model_of_session, json_schema_input_type=str)] = Field(
        alias="sampling_session_id"
    )
    prompt: ModelInput
    sampling_params: TinkerSampling
    num_samples: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=INT32)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "SampleRequest":
        length, last = len(self.prompt.token_ids), self.prompt_logprobs_last_n
        if not length:
            raise misfit("prompt", "want at least one token")
        if last is not None and not self.prompt_logprobs:
            raise misfit("prompt_logprobs_last_n", "want prompt_logprobs with it")
        if last is not None and last >= length:
            raise misfit("prompt_logprobs_last_n", f"want at most {length - 1}")
        return self

    def session(self) -> None:
        """Return None: a sampling session names a version, so no alias has to choose one."""

    def before_end(self) -> Callable[[bytes], Awaitable[bytes]]:
        """Return a function that converts a completion's body to Tinker's SampleResponse."""
        wanted = WantedLogprobs(
            self.prompt_logprobs,
            self.prompt_logprobs_last_n,
            self.topk_prompt_logprobs,
            self.topk_sample_logprobs,
        )

        async def convert(body: bytes) -> bytes:
            return await asyncio.to_thread(sample_response, body, wanted)

        return convert

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call for a completion with token ids.

        context: facts that are not in the body, such as caller and model.
        """
        params, scored = self.sampling_params, self.prompt_logprobs or self.topk_prompt_logprobs
        stop = params.stop or ()
        texts = tuple(each for each in stop if isinstance(each, str))
        return CompletionRequest.unchecked(
            model=self.model,
            prompt=(self.prompt.token_ids,),
            max_tokens=params.max_tokens,
            n=self.num_samples,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            stop=texts,
            stop_token_ids=[each for each in stop if isinstance(each, int)],
            ignore_eos=params.stop is not None and not stop,
            logprobs=self.topk_sample_logprobs,
            prompt_logprobs=self.topk_prompt_logprobs if scored else None,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
        ).to_call(context)
