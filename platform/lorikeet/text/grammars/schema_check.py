"""Check of a finished answer against a JSON schema, for the sandbox's child process: patterns may
take for ever.
"""

import json
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY

from lorikeet.text.grammars.held_schema import json_path

NO_JSON = "it is no JSON"
_LONGEST_PATH = 200


def broken_keyword(schema: Any, text: str) -> str | None:
    """Check a text against a JSON schema; return the first violation in words, None if the text is
    JSON that matches.

    A violation is given as "at $…", with its place in the text and the broken keyword. If the text
    is no JSON, the result begins with NO_JSON; any other result says why the schema cannot be used.
    A `$ref` that leads out of the schema is not followed.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return f"{NO_JSON}: it may have been cut off"
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        error = next(validator(schema, registry=REGISTRY).iter_errors(value), None)
    except Exception as error:  # a malformed schema may raise any
        return f"the schema cannot be used: {type(error).__name__}"
    if error is None:
        return None
    place, keyword = (
        json_path(tuple(path))[:_LONGEST_PATH]
        for path in (error.absolute_path, error.absolute_schema_path)
    )
    return f"at {place}: the value breaks {keyword} of the schema"


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
