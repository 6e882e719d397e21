"""Requests that pool prompts instead of generating: POST /v1/classify, /v1/score, /v1/pooling and
/v1/rerank, in vLLM's shapes, and POST /v1/embeddings, in OpenAI's.

A model with a classification or reward head, its adapter's or its base model's, answers the first
four alone. Models without a head embed texts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lorikeet.apis.body import NoOps, misfit
from lorikeet.apis.chat.messages import MAX_MESSAGES, Message, check_answered
from lorikeet.apis.chat.request import ChatRequest, TemplateFields
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.fields import INT32, Documents, Prompt, Prompts, Texts
from lorikeet.apis.request import ApiRequest, CallContext
from lorikeet.errors import InvalidInput, RequestTooLarge
from lorikeet.protocol.messages import Call, Endpoint, Ranking
from lorikeet_engine.adapter import AdapterRef, Embedder, Head
from lorikeet_engine.request import SamplingParams

_MOST_VALUES = {False: 2**19, True: 2**22}
"""Limit on the values of all embeddings of one answer together, as numbers (False) and as base64
(True): writing 2**19 numbers takes about a tenth of a second, in which the replica sends nothing.
"""

_MOST_CHARACTERS = 2**23
"""Limit on the characters of a request's pairs together, as many as the largest body has. Without
this limit, a body of 4 MiB could join a long text to each of 2,048 short ones.
"""
_PAIRED = ("text_1", "text_2", "queries", "documents")
_NO_OPS: NoOps = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "task": ("classify",),
}


class PoolRequest(TemplateFields, ApiRequest):
    """Fields common to requests that pool prompts: the answer has the values of a head or a vector
    for each prompt, and no generated text.

    input: prompts, as texts or token ids. Each is pooled.
    messages: a chat to pool, as the chat template writes it. Unless add_generation_prompt is true,
        the prompt ends with the last message, without the beginning of an answer.
    user: name of the request's session; chooses between two versions that share an alias.
    """

    no_ops: ClassVar[NoOps] = _NO_OPS
    max_values: ClassVar[int] = 2**18  # prompts of token ids have many values
    endpoint: ClassVar[Endpoint]

    input: Prompts | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    def texts(self) -> Sequence[Prompt] | None:
        """Return the prompts that the request pools; None for a chat."""
        return self.input

    @model_validator(mode="after")
    def _agrees(self) -> "PoolRequest":
        if (self.texts() is None) == (self.messages is None):
            raise misfit("input", "want either it or messages")
        if self.messages is not None:
            check_answered(self.messages)
            self.check_continuation(self.messages[-1])
        return self

    def session(self) -> str | None:
        """Return the name of the request's session; None if it has none."""
        return self.user

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the common form of all APIs, with facts from `context`."""
        request: ChatRequest | CompletionRequest
        if self.messages is None:
            request = CompletionRequest.unchecked(model=self.model, prompt=self.texts())
        else:
            fields = {name: getattr(self, name) for name in TemplateFields.model_fields}
            fields["add_generation_prompt"] = self.add_generation_prompt is True
            request = ChatRequest.unchecked(model=self.model, messages=self.messages, **fields)
        call = _pooling(request.to_call(context), self.endpoint)
        return call if self.messages is None else replace(call, prompt_field="messages")


class ClassifyRequest(PoolRequest):
    """Request of POST /v1/classify.

    use_activation: None or True: return probabilities; False: return the head's logits.
    """

    endpoint = Endpoint.CLASSIFY

    use_activation: bool | None = None

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the common form of all APIs, with facts from `context`."""
        return replace(super().to_call(context), raw_scores=self.use_activation is False)


class PoolingRequest(ClassifyRequest):
    """Request of POST /v1/pooling.

    encoding_format: float: return numbers; base64: return base64 of little-endian float32.
    """

    endpoint = Endpoint.POOLING

    encoding_format: Literal["float", "base64"] = "float"

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the common form of all APIs, with facts from `context`."""
        return replace(super().to_call(context), base64=self.encoding_format == "base64")


class ScoreRequest(PoolRequest):
    """Request of POST /v1/score, for heads of one label: reward models and rerankers.

    text_1, text_2: texts of pairs, each joined to one prompt without a separator, as vLLM joins
        them for decoders. A single text is joined to each of the others. Instead of `input`.
    queries, documents: the same.
    use_activation: True: return probabilities; False: return the head's own values; None: return
        probabilities of pairs, and a reward model's own values of `input` and `messages`.
    """

    endpoint = Endpoint.SCORE

    text_1: Documents | None = None
    text_2: Documents | None = None
    queries: Documents | None = None
    documents: Documents | None = None
    use_activation: bool | None = None

    @property
    def is_of_pairs(self) -> bool:
        """Whether the request scores pairs of texts."""
        return any((self.text_1, self.text_2, self.queries, self.documents))

    def texts(self) -> Sequence[Prompt] | None:
        """Return the prompts that the request scores; None for a chat.

        Raises a validation error for texts that make no pairs, RequestTooLarge for long pairs.
        """
        if not self.is_of_pairs:
            return self.input
        ones, others = self.text_1 or self.queries, self.text_2 or self.documents
        names = [name for name in _PAIRED if getattr(self, name) is not None]
        if self.input is not None or names not in (["text_1", "text_2"], ["queries", "documents"]):
            raise misfit(names[0], "want text_1 and text_2, or queries and documents, and no input")
        assert ones is not None
        assert others is not None
        if len(ones) != len(others) and 1 not in (len(ones), len(others)):
            raise misfit(names[0], f"want as many as {names[1]}, or a single one")
        return _joined(ones, others)

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the common form of all APIs, with facts from `context`."""
        activates = self.is_of_pairs if self.use_activation is None else self.use_activation
        call = replace(super().to_call(context), raw_scores=not activates)
        second = "documents" if self.queries else "text_2"
        return replace(call, prompt_field=second) if self.is_of_pairs else call


class RerankRequest(ApiRequest):
    """Request of POST /v1/rerank, /v2/rerank and /rerank, in the shapes of Cohere and Jina, for
    heads of one label.

    query: text that each document is joined to, as in ScoreRequest.
    documents: texts to put in the order of their scores.
    top_n: number of documents in the answer; None and 0: all.
    return_documents: whether the answer has the documents' texts.
    use_activation: None or True: return probabilities; False: return the head's own values.
    user: name of the request's session; chooses between two versions that share an alias.
    """

    no_ops: ClassVar[NoOps] = _NO_OPS

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0, le=INT32)] | None = None
    return_documents: bool = True
    use_activation: bool | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    def session(self) -> str | None:
        """Return the name of the request's session; None if it has none."""
        return self.user

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the common form of all APIs, with facts from `context`."""
        prompts = _joined((self.query,), self.documents)
        request = CompletionRequest.unchecked(model=self.model, prompt=prompts)
        shown = self.documents if self.return_documents else ()
        return replace(
            _pooling(request.to_call(context), Endpoint.RERANK),
            raw_scores=self.use_activation is False,
            ranking=Ranking(shown, self.top_n or None),
        )


class EmbeddingsRequest(PoolRequest):
    """Request of POST /v1/embeddings.

    input: texts or token ids, each of which is embedded.
    dimensions: number of first values to which vectors are cut (Matryoshka), before they are
        normalised.
    encoding_format: base64 of little-endian float32, or numbers.
    use_activation: False: vectors are not normalised.
    """

    no_ops: ClassVar[NoOps] = {**_NO_OPS, "task": ("embed",)}
    endpoint = Endpoint.EMBEDDINGS

    input: Texts | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    use_activation: bool | None = None

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call, the common form of all APIs, with facts from `context`."""
        return replace(
            super().to_call(context),
            dimensions=self.dimensions,
            base64=self.encoding_format == "base64",
            raw_scores=self.use_activation is False,
        )


def _joined(ones: Sequence[str], others: Sequence[str]) -> Sequence[str]:
    """Return the prompts of pairs: the texts of both lists joined in order, or a single text of one
    list with each text of the other.

    Raises RequestTooLarge beyond _MOST_CHARACTERS.
    """
    count = max(len(ones), len(others))
    first, second = ([*texts] * (count // len(texts)) for texts in (ones, others))
    if (size := sum(map(len, first)) + sum(map(len, second))) > _MOST_CHARACTERS:
        raise RequestTooLarge(
            f"the pairs have {size} characters together, and the limit here is {_MOST_CHARACTERS}: "
            "send fewer in a request"
        )
    return tuple(map(str.__add__, first, second))


def _pooling(call: Call, endpoint: Endpoint) -> Call:
    """Return a call that pools its prompts instead of generating."""
    return replace(
        call,
        endpoint=endpoint,
        max_tokens=0,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        own_stop=(),
    )


def with_pooling(call: Call, head: Head | None, embedder: Embedder | None, hidden: int) -> Call:
    """Return a call with its classification or reward head or, for embeddings, with its embedder,
    the way in which texts are embedded.

    head, embedder: the base model's own, for adapters that have none; None: there is none.
    hidden: number of values of the base model's hidden states.

    Raises InvalidInput if the called endpoint does not suit the model: if it classifies and there
    is no head, generates or embeds and there is one, scores with several labels, or cuts embeddings
    as the model does not allow.
    """
    own = call.adapter.head if isinstance(call.adapter, AdapterRef) else None
    head = own or head
    if call.endpoint is Endpoint.EMBEDDINGS and head is None:
        return _with_embedder(call, _embedder(call, embedder), hidden)
    if call.endpoint.counts or (head is None and not call.endpoint.pools):
        return call
    if head is None:
        raise InvalidInput(
            f"model={call.model!r} has no classification head: name an adapter that was trained "
            "with one, of PEFT's task type SEQ_CLS; texts are embedded at /v1/embeddings",
            param="model",
        )
    if not call.endpoint.pools or call.endpoint is Endpoint.EMBEDDINGS:
        does = "embed" if call.endpoint.pools else "generate"
        raise InvalidInput(
            f"model={call.model!r} has a classification head and does not {does}: ask "
            "/v1/classify, /v1/score, /v1/pooling or /v1/rerank",
            param="model",
        )
    if call.endpoint in (Endpoint.SCORE, Endpoint.RERANK) and len(head.labels) > 1:
        raise InvalidInput(
            f"model={call.model!r} has {len(head.labels)} labels, and a score is of one: ask "
            "/v1/classify",
            param="model",
        )
    return replace(call, head=head)


def _embedder(call: Call, of_base: Embedder | None) -> Embedder:
    """Return the way in which an adapter, or several that are added up, embed texts.

    of_base: the base model's, for adapters without one of their own.

    Raises InvalidInput if adapters to add up differ in it, or if there is none.
    """
    members = () if call.adapter is None else call.adapter.members
    ways = {member.embedder or of_base for member in members} or {of_base}
    if len(ways) > 1:
        raise InvalidInput(
            "these adapters pool or normalise embeddings in different ways: name adapters that "
            "agree",
            param="model",
        )
    if (way := ways.pop()) is None:
        raise InvalidInput(
            f"model={call.model!r} embeds no texts: modules.json in its base model's folder "
            "describes a pipeline that is not served; name an adapter with one of its own",
            param="model",
        )
    return way


def _with_embedder(call: Call, embedder: Embedder, hidden: int) -> Call:
    cut, cuts = call.dimensions, embedder.dimensions
    allowed = cut in (None, hidden) or (cut < hidden if cuts is None else cut in cuts)
    if not allowed:
        most = f"1 to {hidden}" if cuts is None else ", ".join(map(str, sorted({*cuts, hidden})))
        raise InvalidInput(
            f"dimensions={cut}: the embeddings of model={call.model!r} have {hidden} values, want "
            f"{most}",
            param="dimensions",
        )
    texts, most_values = max(1, len(call.prompts)), _MOST_VALUES[call.base64]
    if texts * (cut or hidden) > most_values:
        remedy = "" if call.base64 else ', or encoding_format="base64"'
        raise InvalidInput(
            f"{texts} embeddings of {cut or hidden} values are more than {most_values} values: "
            f"want fewer texts{remedy}",
            param="input",
        )
    return replace(call, embedder=embedder)
