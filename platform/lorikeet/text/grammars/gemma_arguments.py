"""Grammar rules for the arguments of Gemma's tool calls: {key:value,…}."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import regex

from lorikeet.text.grammars.argument_rules import (
    MOST_SCHEMAS_LENGTH,
    ArgumentRules,
    alternatives_of_type,
    both_of,
    check_length,
    invalid,
    placed,
    self_contained,
    unheld,
)
from lorikeet.text.grammars.bare_texts import BareTexts
from lorikeet.text.grammars.format_grammar import in_lark
from lorikeet.text.grammars.held_schema import json_path
from lorikeet.text.tools.argument_values import STRING_ALONE, schema_types

_WORD = regex.compile(r"[^][\s{},:<\"]+(?: +[^][\s{},:<\"]+)*")
"""Keys that are written bare before the colon, as chat templates write all; other keys are quoted
like strings.
"""
_ANY_WORD = "/[a-zA-Z_][a-zA-Z0-9_.-]*( [a-zA-Z0-9_.-]+)*/"
_SCALARS = frozenset({"null", "boolean", "number"})
_UNHELD_OF_ARRAYS = frozenset(
    {"const", "contains", "else", "enum", "if", "maxContains", "minContains", "not", "oneOf"}
    | {"then", "unevaluatedItems", "uniqueItems"}
)
_MOST_RULES = 2**14


def gemma_arguments(
    rule: str, schema: Mapping[str, Any], quote: str, literal: Callable[[str], str]
) -> list[str]:
    """Return the grammar rules for the arguments of a call of Gemma's, with their brackets.

    Keys come in alphabetical order, as in Gemma's chat templates. Nested objects and
    arrays must meet the keywords that `ArgumentRules` and `_Items` name; strings, numbers and
    constants the same keywords as in JSON.

    rule: name of the first rule, and prefix of the names of the other rules.
    schema: schema of the arguments object.
    quote: mark on both sides of each string.
    literal: function that turns a text into a literal of a Lark rule.

    Raises InvalidInput, with the JSON path of the schema, for a schema that cannot be enforced.
    """
    values = _Values(rule, schema, quote, literal)
    try:
        ways = values.objects(schema, ())
    except RecursionError as error:
        raise invalid("nested too deeply") from error
    if not ways:
        raise invalid("no object meets their schema")
    return [f"{rule}: {' | '.join(ways)}", *values.rules]


@dataclass(frozen=True, slots=True)
class _Items:
    """Constraints of a JSON schema on an array.

    first: schemas of the first items.
    others: schema of the items after them.
    least, most: bounds of the number of items.
    """

    first: tuple[Any, ...] = ()
    others: Any = True
    least: int = 0
    most: int | None = None

    def merged(self, part: Mapping[str, Any]) -> "_Items | None":
        """Return these constraints combined with another schema's; None if they contradict.

        Raises InvalidInput if the other schema is malformed or has unsupported keywords.
        """
        if "array" not in schema_types(part, {}):
            return None
        if unsupported := part.keys() & _UNHELD_OF_ARRAYS:
            raise unheld(unsupported, "an array")
        first, others = part.get("prefixItems", []), part.get("items", True)
        least, most = part.get("minItems", 0), part.get("maxItems")
        if not isinstance(first, list) or not _is_count(least) or not _is_count(most or 0):
            raise invalid("want a list of schemas as prefixItems, and integers as bounds")
        mine, theirs = (
            [*known, *[rest] * (max(len(first), len(self.first)) - len(known))]
            for known, rest in ((self.first, self.others), (first, others))
        )
        return _Items(
            tuple(map(both_of, mine, theirs)),
            both_of(self.others, others),
            max(self.least, least),
            min((each for each in (self.most, most) if each is not None), default=None),
        )

    def satisfiable(self) -> "_Items | None":
        """Return constraints that allow the same arrays, with `most` lowered so that no item has
        the schema False; None if they allow no array.
        """
        most = self.most
        if False in self.first:
            most = min(self.first.index(False), len(self.first) if most is None else most)
        elif self.others is False:
            most = min(len(self.first), len(self.first) if most is None else most)
        if most is not None and most < self.least:
            return None
        return replace(self, first=self.first[:most], most=most)


class _Values:
    """Grammar rules of values; each schema has one rule, which other rules share.

    rules: the rules so far.

    Constructor arguments:
    prefix: of the names of the rules.
    root: schema of the arguments object, for `$ref`.
    quote: mark on both sides of each string.
    literal: function that turns a text into a literal of a Lark rule.
    """

    def __init__(
        self, prefix: str, root: Mapping[str, Any], quote: str, literal: Callable[[str], str]
    ) -> None:
        self.rules: list[str] = []
        self._prefix, self._root, self._literal = prefix, root, literal
        self._guidance = {"x-guidance": root["x-guidance"]}
        self._quote = literal(quote)
        self._is_token = self._quote.startswith("<[")
        self._unquoted = f"~/(?s:.*){in_lark(regex.escape(quote))}(?s:.*)/"
        self._forbidden = quote
        self._known: dict[str, str] = {}
        self._names = self._length = 0

    def objects(self, schema: Any, path: tuple[str | int, ...]) -> list[str]:
        """Add the rules of the objects that fit a schema; return the names of the first rules.

        path: place of the schema in the root.
        """
        with placed(json_path(path)):
            ways = alternatives_of_type(ArgumentRules(maps=True), schema, self._root)
        return [self._object(each, path) for each in ways]

    def _value(self, schema: Any, path: tuple[str | int, ...]) -> str:
        """Add the rules of the values that fit a schema, unless there are such rules; return the
        name of the first rule.

        path: place of the schema in the root.
        """
        schema = {} if schema is True else schema
        text = json.dumps(schema)
        if text in self._known:
            return self._known[text]
        name = self._known[text] = self._name()
        check_length(length := self._length + len(text), MOST_SCHEMAS_LENGTH)
        self._length = length
        types = frozenset() if schema is False else schema_types(schema, self._root)
        ways = self._strings(name, schema, path) if "string" in types else []
        if scalars := types & _SCALARS:
            ways.append(f"{name}_scalar")
            self.rules.append(f"{name}_scalar: %json {self._scalars(schema, scalars, path)}")
        if "array" in types:
            with placed(json_path(path)):
                arrays = alternatives_of_type(_Items(), schema, self._root)
            ways += [self._array(each, path) for each in arrays]
        if "object" in types:
            ways += self.objects(schema, path)
        if not ways:
            with placed(json_path(path)):
                raise invalid("no value fits its schema")
        self.rules.append(f"{name}: {' | '.join(ways)}")
        return name

    def _strings(self, name: str, schema: Any, path: tuple[str | int, ...]) -> list[str]:
        """Add the rules of the strings that fit a schema; return the name of the first, if any."""
        with placed(json_path(path)):
            text = BareTexts(self._root, STRING_ALONE).of(schema)
        if text is None:
            return []
        terminal = f"{name}_text".upper()
        self.rules.append(f"{terminal}: ({text}) & {self._unquoted}")
        if self._is_token:
            self.rules.append(f"{name}_text: {self._quote} {terminal} {self._quote}")
        else:
            self.rules += [
                f"{name}_text: {self._quote} {name}_rest",
                f"{name}_rest[lazy]: {terminal} {self._quote}",
            ]
        return [f"{name}_text"]

    def _scalars(self, schema: Any, types: frozenset[str], path: tuple[str | int, ...]) -> str:
        """Return the JSON schema, as text, of the values of given types that fit a schema.

        types: names of JSON types.
        path: place of the schema in the root.
        """
        with placed(json_path(path)):
            whole = self_contained(schema, self._root)
        own = {key: part for key, part in whole.items() if key != "$defs"}
        shared = {"$defs": whole["$defs"]} if "$defs" in whole else {}
        held = {"allOf": [own, {"type": sorted(types)}], **shared, **self._guidance}
        check_length(length := self._length + len(json.dumps(held)), MOST_SCHEMAS_LENGTH)
        self._length = length
        return json.dumps(held)

    def _array(self, asked: _Items, path: tuple[str | int, ...]) -> str:
        """Add the rules of arrays that meet the constraints `asked`; return the name of the first
        rule.

        path: place of the schema in the root.
        """
        name = self._name()
        rest, count = '""', len(asked.first)
        if asked.most is None or asked.most > count:
            each = self._value(asked.others, (*path, "items"))
            least = max(asked.least - count, 0)
            most = None if asked.most is None else asked.most - count
            if count:
                rest = _repeated(f'"," {each}', least, most)
            else:
                more = None if most is None else most - 1
                items = f"{each} " + _repeated(f'"," {each}', max(least - 1, 0), more)
                rest = items if least else f"({items})?"
        for at, schema in reversed(list(enumerate(asked.first))):
            item = self._value(schema, (*path, "prefixItems", at))
            self.rules.append(f"{name}_behind_{at}: {rest}")
            rest = f'"," {item} {name}_behind_{at}' if at else f"{item} {name}_behind_{at}"
            rest = rest if at < asked.least else f"({rest})?"
        self.rules.append(f'{name}: "[" {rest} "]"')
        return name

    def _object(self, asked: ArgumentRules, path: tuple[str | int, ...]) -> str:
        """Add the rules of objects that meet the constraints `asked`; return the name of the first
        rule.

        path: place of the schema in the root.
        """
        name = self._name()
        if not asked.properties:
            pairs = ""
            if not asked.closed:
                value = self._value(asked.others, (*path, "additionalProperties"))
                key = self._value({"type": "string"}, ())
                self.rules.append(f'{name}_pair: ({_ANY_WORD} | {key}) ":" {value}')
                pairs = f'({name}_pair ("," {name}_pair)*)?'
            self.rules.append(f'{name}: "{{" {pairs} "}}"')
            return name
        self.rules.append(f'{name}: "{{" {name}_first_0 "}}"')
        last = len(asked.properties)
        # rules of the pairs from this key on: as the first ones, and after others
        for at, key in enumerate(sorted(asked.properties, key=lambda key: (key.lower(), key))):
            value = self._value(asked.properties[key], (*path, "properties", key))
            pair = f'{self._key(key, path)} ":" {value} {name}_more_{at + 1}'
            first, more = f"{name}_first_{at}: {pair}", f'{name}_more_{at}: "," {pair}'
            if key not in asked.required:
                first, more = f"{first} | {name}_first_{at + 1}", f"{more} | {name}_more_{at + 1}"
            self.rules += [first, more]
        self.rules += [f'{name}_first_{last}: ""', f'{name}_more_{last}: ""']
        return name

    def _key(self, key: str, path: tuple[str | int, ...]) -> str:
        """Return the Lark literals of an argument's or member's name.

        Raises InvalidInput for a name with the mark of strings in it.
        """
        if _WORD.fullmatch(key):
            return json.dumps(key)
        if self._forbidden in key:
            with placed(json_path(path)):
                raise invalid(f"want a name without {self._forbidden} instead of {key}")
        return f"{self._quote} {json.dumps(key)} {self._quote}"

    def _name(self) -> str:
        """Return a new name of a rule. Raises InvalidInput if there are too many."""
        self._names += 1
        if self._names > _MOST_RULES:
            raise invalid("too many different schemas in it: make it smaller or less nested")
        return f"{self._prefix}_{self._names}"


def _repeated(rule: str, least: int, most: int | None) -> str:
    """Return the Lark expression of a rule repeated from `least` to `most` times; `most` None: any
    number of times.
    """
    return "" if most == 0 else f"({rule}){{{least},{'' if most is None else most}}}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0
