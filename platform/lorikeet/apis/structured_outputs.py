"""vLLM's fields that constrain an answer to a JSON schema, a regular expression or given texts."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from lorikeet.apis.body import Body, NoOps, misfit
from lorikeet.apis.chat.messages import parse_object
from lorikeet.apis.tools import refuse_long_json
from lorikeet.protocol.messages import Format, FormatKind

MAX_CHOICE_TEXTS = 1024
MAX_REGEX_LENGTH = 4096


def _parse_schema(value: object, info: ValidationInfo) -> object:
    """Parse a JSON schema: an object, or the JSON text of one.

    info: its context is the body's ValueBudget, a limit on the number of JSON values.
    """
    if not isinstance(value, dict):
        value = parse_object(value, info)
    return refuse_long_json(value)


_Schema = Annotated[
    dict[str, Any], BeforeValidator(_parse_schema, json_schema_input_type=dict[str, Any] | str)
]
_Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_LENGTH)]
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True),
    BeforeValidator(refuse_long_json),
]


class StructuredOutputs(Body):
    """Format of an answer: exactly one of json, json_object, regex and choice."""

    no_ops: ClassVar[NoOps] = {
        "json_object": (False,),
        "disable_fallback": (False,),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    json_: _Schema | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: _Regex | None = None
    choice: _Choices | None = None


class StructuredFields(Body):
    """vLLM's fields that constrain an answer's format. A request may have at most one of these
    fields.
    """

    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Regex | None = None
    guided_choice: _Choices | None = None

    def check_one_format(self, *others: str) -> None:
        """Raise a validation error (body.misfit) if more than one format is requested.

        others: names of the request's other fields that request a format.
        """
        outputs = self.structured_outputs
        if outputs is not None and len(outputs.model_fields_set) != 1:
            raise misfit("structured_outputs", "want one of json, json_object, regex and choice")
        fields = [name for name in StructuredFields.model_fields if getattr(self, name) is not None]
        if len(asked := [*others, *fields]) > 1:
            raise misfit(asked[-1], f"want it without {asked[0]}: an answer has one format")

    def structured_format(self) -> Format | None:
        """Return the answer format that these fields request; None if they request none."""
        outputs = self.structured_outputs
        if outputs is None:
            return (
                _format("guided_json", FormatKind.JSON_SCHEMA, self.guided_json)
                or _format("guided_regex", FormatKind.REGEX, self.guided_regex)
                or _format("guided_choice", FormatKind.CHOICES, self.guided_choice)
            )
        schema = {"type": "object"} if outputs.json_object else outputs.json_
        return (
            _format("structured_outputs", FormatKind.JSON_SCHEMA, schema)
            or _format("structured_outputs", FormatKind.REGEX, outputs.regex)
            or _format("structured_outputs", FormatKind.CHOICES, outputs.choice)
        )


def _format(param: str, kind: FormatKind, value: Any) -> Format | None:
    if value is None:
        return None
    return Format(value if kind is FormatKind.REGEX else json.dumps(value), kind, param)
