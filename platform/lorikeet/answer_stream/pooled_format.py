"""JSON bodies of answers to requests that pool prompts, in vLLM's shapes."""

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from lorikeet.answer_stream.compact_json import dump
from lorikeet.answer_stream.openai_format import adapter_member
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet_engine.adapter import AdapterRef, Head, Problem

_IDS = {Endpoint.CLASSIFY: "classify", Endpoint.SCORE: "score", Endpoint.POOLING: "pool"}


def pooled_body(call: Call, pooled: Sequence["array[float]"], usage: FinalUsage) -> bytes:
    """Return the JSON body of the answer to a call that pools its prompts.

    pooled: the head's values for each prompt, one for each label.
    """
    assert isinstance(call.adapter, AdapterRef), "a head without an adapter"
    head = call.adapter.head
    assert head is not None, "an adapter without a head"
    opening = {
        "id": f"{_IDS[call.endpoint]}-{call.request_id}",
        "object": "list",
        "created": call.created,
        "model": call.model,
        "data": [_item(call, head, index, each) for index, each in enumerate(pooled)],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }
    return dump(opening)[:-1] + adapter_member(call) + b"}"


def probabilities(head: Head, scores: Sequence[float]) -> list[float]:
    """Return the probability of each label, as transformers' TextClassificationPipeline does: the
    value itself for a regression, its sigmoid for one label and for labels that do not exclude each
    other, else the softmax.

    scores: the head's values, one for each label.
    """
    if head.problem is Problem.REGRESSION:
        return list(scores)
    if head.problem is Problem.MULTI_LABEL or len(scores) == 1:
        return [_sigmoid(score) for score in scores]
    most = max(scores)
    powers = [math.exp(score - most) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]


def _item(call: Call, head: Head, index: int, scores: "array[float]") -> dict[str, Any]:
    values = list(scores) if call.raw_scores else probabilities(head, scores)
    if call.endpoint is Endpoint.SCORE:
        return {"index": index, "object": "score", "score": values[0]}
    if call.endpoint is Endpoint.POOLING:
        data = _base64(values) if call.base64 else values
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


def _base64(values: Sequence[float]) -> str:
    """Return values as little-endian float32 in base64."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()
