"""Classification and reward heads: the module `score`, which an adapter brings along, or a base
model.

PEFT saves it among modules_to_save, for AutoModelForSequenceClassification as for TRL's
RewardTrainer. A blob holds the head's weights [labels, hidden], perhaps its biases [labels], and
the names of its labels under a metadata key of its own.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter import MAX_LABELS, Head, Problem
from lorikeet_engine.adapter_format.expressions import bad_config
from lorikeet_engine.adapter_format.families import SCORE
from lorikeet_engine.adapter_format.header import TensorSpan, parse_json_object
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.errors import AdapterError, AdapterRejected, AdapterTooLarge, ModelError

HEAD_KEY = "lorikeet_head"
HEAD_MODULES = ("score", "classifier")
"""Names that PEFT gives the modules of heads; transformers' decoders have `score`."""
_SAVED = re.compile(
    r"(?:base_model\.model\.)?(?:score|classifier)(?:\.modules_to_save)?(?:\.default)?"
    r"\.(weight|bias)"
)
_MAX_LABEL_CHARACTERS = 256
_MAX_FILE_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Place of a classification or reward head in an adapter's file.

    head: the head.
    linear: index of the head, SCORE, in BaseShape.modules.
    weights: place of the weights [labels, hidden].
    biases: place of the biases [labels]; None: they are 0.
    """

    head: Head
    linear: int
    weights: TensorSpan
    biases: TensorSpan | None

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return sum(math.prod(span.shape) for span in (self.weights, self.biases) if span)


def head_part(name: str) -> str | None:
    """Return the part of a head that a tensor holds, "weight" or "bias"; None for other tensors.

    name: the tensor's name, in a trainer's file or in a blob (stored adapter).
    """
    match = _SAVED.fullmatch(name)
    return match[1] if match else None


def head_tensor_name(part: str) -> str:
    """Return the name that a part of a head, "weight" or "bias", has in blobs (stored adapters)."""
    return f"base_model.model.{SCORE.module}.{part}"


def trained_head(
    raw: Mapping[str, Any], saved: Mapping[str, TensorSpan], folder: Path
) -> Head | None:
    """Return the head that a trainer has saved; None without a head.

    Labels and problem come from config.json in the folder, if there is one. The padding token comes
    from config.json, or else from the tokenizer in the folder.

    raw: PEFT's config.
    saved: the head's tensors, by part.
    folder: the trainer's folder.

    Raises AdapterRejected if the config names a head that the file lacks, or the head cannot be
    served; AdapterTooLarge for more than MAX_LABELS labels.
    """
    named = raw.get("modules_to_save") or ()
    if "weight" not in saved:
        if saved or not {*HEAD_MODULES}.isdisjoint(named):
            raise bad_config(
                f"the weights of {SCORE.module} are not in the file: save the adapter again, or "
                "train without modules_to_save",
                "modules_to_save",
            )
        return None
    if raw.get("task_type") not in (None, "SEQ_CLS"):
        raise bad_config(
            f"{raw['task_type']}: heads are served for whole texts alone, of the task type SEQ_CLS",
            "task_type",
        )
    shape = saved["weight"].shape
    if len(shape) != 2:
        raise AdapterRejected(
            f"{SCORE.module}.weight is {list(shape)}, not [labels, hidden]: save the adapter again",
            field=SCORE.module,
        )
    config = _json_in(folder / "config.json")
    problem = config.get("problem_type")
    if problem not in (None, *Problem):
        raise bad_config(f"{problem!r}: want {', '.join(Problem)}", "problem_type")
    pad = config.get("pad_token_id")
    return _checked(
        {
            "labels": _labels(config.get("id2label"), shape[0]),
            "problem": problem,
            "pad_token": _pad_token(folder) if pad is None else pad,
        }
    )


def base_head(config: Mapping[str, Any]) -> Head | None:
    """Return the head of a base model for sequence classification; None for other models.

    config: the base model's config.json.

    Raises ModelError if the head cannot be served.
    """
    names = config.get("architectures")
    if not any(str(name).endswith("ForSequenceClassification") for name in names or ()):
        return None
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else 2  # transformers' default
    problem, pad = config.get("problem_type"), config.get("pad_token_id")
    try:
        return _checked({"labels": _labels(labels, count), "problem": problem, "pad_token": pad})
    except AdapterError as error:
        raise ModelError(f"config.json: {error.message}", field="id2label") from error


def head_metadata(head: Head | None) -> dict[str, str]:
    """Return the metadata entries of an adapter's file that describe the head; empty if None."""
    if head is None:
        return {}
    return {HEAD_KEY: json.dumps(asdict(head), sort_keys=True, separators=(",", ":"))}


def parse_head(metadata: Mapping[str, str]) -> Head | None:
    """Parse the head from the metadata of an adapter's file; None without a head.

    Raises AdapterRejected for a malformed head, and AdapterTooLarge for more than MAX_LABELS
    labels.
    """
    text = metadata.get(HEAD_KEY)
    return None if text is None else _checked(parse_json_object(text, f"__metadata__.{HEAD_KEY}"))


def read_head(
    head: Head | None, tensors: Mapping[str, TensorSpan], shape: BaseShape, vocabulary: int
) -> HeadRows | None:
    """Return the place of the head in an adapter's file; None without a head.

    head: the head, from the metadata.
    tensors: the head's tensors, by part.
    shape: sizes of the base model.
    vocabulary: number of tokens, with those that the adapter adds.

    Raises AdapterRejected for tensors that do not fit the head or the base model, and for a padding
    token that neither the base model nor the adapter has.
    """
    if head is None or "weight" not in tensors:
        if head is not None or tensors:
            raise AdapterRejected("a head needs weights, and names of its labels", field=HEAD_KEY)
        return None
    labels = len(head.labels)
    for part, want in (("weight", (labels, shape.hidden)), ("bias", (labels,))):
        span = tensors.get(part)
        if span is not None and span.shape != want:
            raise AdapterRejected(
                f"{SCORE.module}.{part} is {list(span.shape)}, not {list(want)}: the adapter was "
                "trained for another base model",
                field=SCORE.module,
            )
    if head.pad_token is not None and head.pad_token >= vocabulary:
        raise AdapterRejected(
            f"the padding token {head.pad_token} is not in the vocabulary of {vocabulary}; train "
            "with a token that it has",
            field=HEAD_KEY,
        )
    return HeadRows(head, shape.index(SCORE.name), tensors["weight"], tensors.get("bias"))


def _labels(id2label: Any, count: int) -> list[str]:
    """Return the labels' names in the order of the head's rows.

    id2label: names by index, from config.json; None: transformers' own names.
    """
    if id2label is None:
        return [f"LABEL_{index}" for index in range(count)]
    if not isinstance(id2label, Mapping) or {*id2label} != {str(n) for n in range(count)}:
        raise AdapterRejected(
            f"id2label in config.json does not name the {count} labels of the head: mend it, or "
            "remove the file",
            field="id2label",
        )
    return [id2label[str(index)] for index in range(count)]


def _pad_token(folder: Path) -> int | None:
    """Return the id of the padding token of the tokenizer in a folder; None if there is none."""
    config = _json_in(folder / "tokenizer_config.json")
    pad = config.get("pad_token")
    text = pad.get("content") if isinstance(pad, Mapping) else pad
    if text is None:
        return None
    added = _json_in(folder / "tokenizer.json").get("added_tokens")
    tokens = added if isinstance(added, list) else []
    known = (token for token in tokens if isinstance(token, Mapping))
    return next((token.get("id") for token in known if token.get("content") == text), None)


def _json_in(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise AdapterRejected(f"{path.name} is over {_MAX_FILE_BYTES} bytes", field=path.name)
    try:
        parsed = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterRejected(f"{path.name} is not JSON: {error}", field=path.name) from error
    return parsed if isinstance(parsed, dict) else {}


def _checked(raw: Mapping[str, Any]) -> Head:
    labels, problem, pad = (raw.get(key) for key in ("labels", "problem", "pad_token"))
    names = labels if isinstance(labels, list) else []
    are_texts = all(
        isinstance(name, str) and 0 < len(name) <= _MAX_LABEL_CHARACTERS for name in names
    )
    if raw.keys() != {"labels", "problem", "pad_token"} or not names or not are_texts:
        raise AdapterRejected(
            f"a head wants a list of labels, each a text of 1 to {_MAX_LABEL_CHARACTERS} "
            "characters",
            field=HEAD_KEY,
        )
    if len(names) > MAX_LABELS:
        raise AdapterTooLarge(
            f"a head of {len(names)} labels: the limit is {MAX_LABELS}",
            field=SCORE.module,
            labels=len(names),
            max_labels=MAX_LABELS,
        )
    if problem not in (None, *Problem) or not (pad is None or (type(pad) is int and pad >= 0)):
        raise AdapterRejected("a head's problem or pad_token is malformed", field=HEAD_KEY)
    return Head(tuple(names), None if problem is None else Problem(problem), pad)
