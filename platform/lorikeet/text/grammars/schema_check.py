"""Check of a finished answer against a JSON schema, for the sandbox's child process: patterns may
take for ever.
"""

import json
from collections.abc import Sequence
from typing import Any

from jsonschema_rs import (
    FancyRegexOptions,
    ValidationError,
    ValidationErrorKind,
    validator_cls_for,
)

from lorikeet.text.grammars.held_schema import json_path

NO_JSON = "it is no JSON"
_UNLIMITED = FancyRegexOptions(backtrack_limit=2**62)
"""The child process has a limit of CPU time instead, beyond which an answer is not judged."""
_LONGEST_PATH = 200


def broken_keyword(schema: Any, text: str) -> str | None:
    r"""Check a text against a JSON schema; return the first violation in words, None if the text is
    JSON that matches.

    A violation is given as "at $…", with its place in the text and the broken keyword. If the text
    is no JSON, the result begins with NO_JSON; any other result says why the schema cannot be used.
    Numbers are decimal, and patterns are JSON schema's: 0.3 is a multiple of 0.1, `\d` an ASCII
    digit, and `$` the end. The package jsonschema differs there. A `$schema` of no known draft is
    taken for 2020-12. A `$ref` that leads out of the schema is not followed.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return f"{NO_JSON}: it may have been cut off"
    try:
        validator = validator_cls_for(schema)(schema, pattern_options=_UNLIMITED, offline=True)
        error = next(validator.iter_errors(value), None)
    except ValidationError as error:
        return f"the schema cannot be used: {_fault(error)}"
    except Exception as error:  # a schema nested too deep, for example
        return f"the schema cannot be used: {type(error).__name__}"
    if error is None:
        return None
    place, keyword = map(_path, (error.instance_path, error.schema_path))
    return f"at {place}: the value breaks {keyword} of the schema"


def _fault(error: ValidationError) -> str:
    """Describe the fault of a schema that cannot be compiled."""
    if isinstance(error.kind, ValidationErrorKind.Referencing):
        return "a $ref leads to no schema within it"
    return f"it is malformed at {_path(error.instance_path)}"


def _path(path: Sequence[str | int]) -> str:
    return json_path(tuple(path))[:_LONGEST_PATH]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
