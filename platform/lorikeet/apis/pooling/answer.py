"""JSON bodies of answers to requests that pool prompts, in the shapes of vLLM and, for embeddings,
of OpenAI.
"""

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic_core import to_json

from lorikeet.apis.chat.answer import adapter_member
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Ranking
from lorikeet.text.compact_json import dump
from lorikeet_engine.adapter import Embedder, Head, Problem

_IDS = {
    Endpoint.CLASSIFY: "classify",
    Endpoint.SCORE: "score",
    Endpoint.POOLING: "pool",
    Endpoint.RERANK: "rerank",
    Endpoint.EMBEDDINGS: "embd",
}

_LEAST_NORM = 1e-12  # of torch.nn.functional.normalize


def pooled_body(call: Call, pooled: Sequence["array[float]"], usage: FinalUsage) -> bytes:
    """Return the JSON body of the answer to a call that pools its prompts.

    pooled: values of each prompt: one for each label of the classification head, or pooled
        hidden states.
    """
    opening = {
        "id": f"{_IDS[call.endpoint]}-{call.request_id}",
        "object": "list",
        "created": call.created,
        "model": call.model,
    }
    used = {
        "prompt_tokens": usage.prompt_tokens,
        **({} if call.embedder else {"completion_tokens": 0}),
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if call.ranking is not None:
        ranked = {"results": _ranked(call, call.ranking, pooled), "usage": used}
        opening = {name: opening[name] for name in ("id", "model")} | ranked
        return dump(opening)[:-1] + adapter_member(call) + b"}"
    items = b",".join(_item(call, index, each) for index, each in enumerate(pooled))
    body = b'%s,"data":[%s],"usage":%s' % (dump(opening)[:-1], items, dump(used))
    return body + adapter_member(call) + b"}"


def probabilities(head: Head, scores: Sequence[float]) -> list[float]:
    """Return the probability of each label, as transformers' TextClassificationPipeline does: the
    value itself for a regression, its sigmoid for one label and for labels that do not exclude each
    other, else the softmax.

    scores: the classification head's values, one for each label.
    """
    if head.problem is Problem.REGRESSION:
        return list(scores)
    if head.problem is Problem.MULTI_LABEL or len(scores) == 1:
        return [_sigmoid(score) for score in scores]
    most = max(scores)
    powers = [math.exp(score - most) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]


def embedding(
    embedder: Embedder, values: "array[float]", dimensions: int | None, *, raw: bool
) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return the embedding of a prompt, in float32.

    values: the prompt's pooled hidden states.
    dimensions: number of first values to keep, before they are normalised; None: all.
    raw: do not normalise.
    """
    vector = np.frombuffer(values, np.float32)[:dimensions].astype(np.float64)
    if embedder.normalizes and not raw:
        vector /= max(float(np.linalg.norm(vector)), _LEAST_NORM)
    return vector.astype(np.float32)


def _item(call: Call, index: int, values: "array[float]") -> bytes:
    if call.embedder is None:
        return dump(_scored(call, index, values))
    vector = embedding(call.embedder, values, call.dimensions, raw=call.raw_scores)
    # to_json writes numbers five times as fast as `dump`: other answers wait meanwhile
    shown = to_json(_base64(vector) if call.base64 else vector.tolist())
    return b'{"object":"embedding","index":%d,"embedding":%s}' % (index, shown)


def _ranked(call: Call, ranking: Ranking, pooled: Sequence["array[float]"]) -> list[dict[str, Any]]:
    """Return the documents of a ranking, those of the highest scores first, as Cohere does."""
    assert call.head is not None, "a ranking without a head"
    scores = [each[0] if call.raw_scores else probabilities(call.head, each)[0] for each in pooled]
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    return [
        {
            "index": index,
            **({"document": {"text": ranking.documents[index]}} if ranking.documents else {}),
            "relevance_score": scores[index],
        }
        for index in order[: ranking.top_n]
    ]


def _scored(call: Call, index: int, scores: "array[float]") -> dict[str, Any]:
    head = call.head
    assert head is not None, "a pooled prompt without a head"
    values = list(scores) if call.raw_scores else probabilities(head, scores)
    if call.endpoint is Endpoint.SCORE:
        return {"index": index, "object": "score", "score": values[0]}
    if call.endpoint is Endpoint.POOLING:
        data = _base64(np.array(values, np.float32)) if call.base64 else values
        return {"index": index, "object": "pooling", "data": data}
    return {
        "index": index,
        "label": head.labels[values.index(max(values))],
        "probs": values,
        "num_classes": len(values),
    }


def _sigmoid(score: float) -> float:
    power = math.exp(-abs(score))
    return (1.0 if score >= 0 else power) / (1.0 + power)


def _base64(values: "np.ndarray[Any, np.dtype[np.float32]]") -> str:
    """Return little-endian float32 in base64."""
    return b64encode(values.astype("<f4").tobytes()).decode()
