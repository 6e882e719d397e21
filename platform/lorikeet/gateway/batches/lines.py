"""Lines of a batch's input: JSON objects, each a request with an id of the client's own.

Inputs are read in threads. Parsing holds the interpreter's lock, so that it is bounded and pauses.
"""

import hashlib
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json, to_json

from lorikeet.apis.body import ValueBudget
from lorikeet.errors import RequestTooLarge
from lorikeet.gateway.body import MAX_JSON_BYTES, rest_s

MAX_LINES = 50_000
"""Limit on the requests of one batch, as OpenAI's."""
MAX_LINE_BYTES = MAX_JSON_BYTES
"""Limit on the bytes of one line, equal to that of a request's body."""
MAX_WITH_BLANK = 4 * MAX_LINES
"""Limit on the lines of one input, blank ones included."""
MAX_ERRORS = 100
"""Number of errors at which the check of an input stops."""
MAX_ID_LENGTH = 512
_MAX_VALUES = 2**18 + 10
"""Approximate limit on the JSON values of one line: the largest of a body, and its own members."""
_WORK_S = 1e-3
"""Processor time in seconds after which a thread that reads lines pauses."""

Json = dict[str, Any]


class Line(NamedTuple):
    """One request of a batch.

    number: place of the line among the requests, from 0.
    body: JSON body of the request.
    """

    number: int
    custom_id: str
    body: bytes


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the requests of a batch's input file that has passed `check_lines`."""
    pace = _Pace()
    with path.open("rb") as file:
        texts = (text for _, text in _texts(file, pace) if text.strip())
        for index, text in enumerate(texts):
            with pace.working():
                line = from_json(text)
                request = Line(index, line["custom_id"], to_json(line["body"]))
            yield request


def check_lines(
    path: Path, endpoint: str, models: set[str] | None = None
) -> tuple[int, list[Json]]:
    """Return the number of requests in a batch's input file, and its errors in OpenAI's shape.

    A batch with errors must not run. One line is in memory at a time.

    endpoint: path to which all requests must go.
    models: set to which the requests' models are added.
    """
    models = set() if models is None else models
    errors: list[Json] = []
    ids, count, pace = set[bytes](), 0, _Pace()
    with path.open("rb") as file:
        for number, text in _texts(file, pace):
            if number > MAX_WITH_BLANK:
                many = f"the file has more than {MAX_WITH_BLANK} lines: leave out blank ones"
                return count, [*errors, error_json("too_many_requests", many, None, number)]
            if not text.strip():
                continue
            count += 1
            if count > MAX_LINES:
                many = f"the file has more than {MAX_LINES} requests: make several batches of it"
                return count, [*errors, error_json("too_many_requests", many, None, number)]
            with pace.working():
                error = _check(text, endpoint, ids, models)
            if error is not None:
                errors.append(error_json(*error, number))
                if len(errors) == MAX_ERRORS:
                    return count, errors
    if not count:
        errors.append(error_json("empty_file", "the file has no requests", None, None))
    return count, errors


def _texts(file: BinaryIO, pace: "_Pace") -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the text of each line.

    Yields only the first MAX_LINE_BYTES + 1 bytes of a longer line.

    pace: counts the time that reading takes.
    """
    number = 0
    while True:
        with pace.working():
            rest = text = file.readline(MAX_LINE_BYTES + 1)
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
        if not text:
            return
        number += 1
        yield number, text.removeprefix(BOM_UTF8)


def _check(
    text: bytes, endpoint: str, ids: set[bytes], models: set[str]
) -> tuple[str, str, str | None] | None:
    """Return code, message and field of a line's first error; None for a line without errors.

    ids: digests of the earlier lines' custom_ids, which may be long; the line's own is added.
    models: models of the earlier lines; the line's own is added. At most two are kept.
    """
    if len(text) > MAX_LINE_BYTES:
        return "line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes", None
    try:
        # Parsing holds the interpreter's lock, so the number of values must be bounded.
        ValueBudget(_MAX_VALUES).spend(text)
        line = from_json(text, allow_inf_nan=False)
    except RequestTooLarge:
        return RequestTooLarge.code, f"the line has more than {_MAX_VALUES} JSON values", None
    except ValueError:
        return "invalid_json_line", "the line is not valid JSON in UTF-8", None
    if not isinstance(line, dict):
        return "invalid_json_line", "the line is not a JSON object", None
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_LENGTH:
        want = f"custom_id: want a text of 1 to {MAX_ID_LENGTH} characters"
        return "missing_required_parameter", want, "custom_id"
    digest = hashlib.sha256(custom_id.encode()).digest()[:16]
    if digest in ids:
        return "duplicate_custom_id", "custom_id: an earlier line has the same", "custom_id"
    ids.add(digest)
    if line.get("method") != "POST":
        return "invalid_method", "method: want POST", "method"
    if line.get("url") != endpoint:
        return "mismatched_url", f"url: want {endpoint}, the batch's endpoint", "url"
    body = line.get("body")
    if not isinstance(body, dict):
        return "missing_required_parameter", "body: want an object, the request's body", "body"
    if body.get("stream"):
        return "invalid_request", "body.stream: answers of a batch are not streamed", "body.stream"
    if isinstance(model := body.get("model"), str) and len(models) < 2:
        models.add(model)
    return None


class _Pace:
    """Pauses of a thread that reads lines, in which the event loop serves other requests."""

    def __init__(self) -> None:
        self._took_s = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Add up the processor time spent within the contexts; sleep at the end of one once more
        than _WORK_S seconds were spent since the last sleep.
        """
        began_s = time.thread_time()
        yield
        self._took_s += time.thread_time() - began_s
        if self._took_s > _WORK_S:
            time.sleep(rest_s(self._took_s))
            self._took_s = 0.0


def error_json(code: str, message: str, param: str | None, line: int | None) -> Json:
    """Return an error of a batch's input in OpenAI's shape.

    param: field at fault; None: no single field.
    line: number of the line in the file, from 1; None: no single line.
    """
    return {"code": code, "message": message, "param": param, "line": line}
