"""JSON schemas rewritten into the keywords that grammars can enforce ("hold").

A keyword that llguidance refuses is removed if it has no effect, or replaced by other keywords with
the same meaning. Formats that llguidance does not know are removed and reported: in JSON schema,
`format` only describes. On request, keywords that nothing can replace are "let go": removed, and
reported with the place of their schema.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

import regex

from lorikeet.text.grammars.patterns import implied_by_format, needs_context, without_lookaheads
from lorikeet.text.grammars.schema_logic import Inexpressible, SchemaLogic, listed_values

_SCHEMAS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
_REPLACED = frozenset(
    {"dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "propertyNames", "then"}
    | {"unevaluatedProperties"}
)
"""Keywords that may be replaced by others. Their subschemas may then move, so a `$ref` to one of
these subschemas needs a copy of it.
"""
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""Values of `format` that llguidance enforces."""
_SHOWN_FORMAT = regex.compile(r"[A-Za-z0-9._:/+-]{1,64}")
_MOST_IGNORED = 16
_TYPE_OF = {
    "contains": "array",
    "dependencies": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
    "format": "string",
    "pattern": "string",
    "propertyNames": "object",
    "unevaluatedItems": "array",
    "unevaluatedProperties": "object",
    "uniqueItems": "array",
}
"""Type of the values that a keyword constrains. The keyword has no effect on values of
other types.
"""
_MOST_STEPS = 20_000
"""Limit on the schemas that negation and proofs visit while one schema is translated: some 50 ms of
work.
"""
_MOST_REFERENCES = 8
_MOST_ORDERS = 120
"""Limit on the orders of distinct items that are listed to replace one array's uniqueItems."""
_MOST_ORDERED_ITEMS = 3000
"""Limit on the items in all orders listed for one schema: some 0.15 s of llguidance's time."""
_MOST_OPTIONAL = 16
"""Limit on the properties of an object whose minProperties of 1 is rewritten as alternatives."""
_PLAIN_NAME = regex.compile(r"[A-Za-z_$][A-Za-z0-9_-]*")
_LONGEST_STEP = 64
_OLDER_DRAFT = regex.compile(r"draft-0\d|2019-09")
"""Part of the `$schema` of older drafts, whose `items` may be an array and then means
`prefixItems`.
"""
_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
_MALFORMED = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""Errors that show, while a keyword is being replaced, that its value is malformed. The keyword
stays, so that llguidance refuses it.
"""


_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """Schema rewritten, as far as possible, into keywords that grammars enforce.

    ignored: the removed formats, as "format:NAME"; formats do not restrict values.
    let_go: for each keyword that was removed because nothing can replace it, the keyword and the
        JSON path of the schema that had it.
    """

    schema: dict[str, Any]
    ignored: tuple[str, ...] = ()
    let_go: tuple[tuple[str, str], ...] = ()


def held_schema(schema: Mapping[str, Any], *, lets_go: bool = False) -> HeldSchema:
    """Return an equivalent schema in keywords that grammars enforce.

    Raises RecursionError if the schema is nested too deeply or its references lead to too many
    schemas.

    lets_go: remove keywords that nothing can replace, instead of keeping them. The result then also
        matches values that only those keywords exclude.
    """
    held = _Translation(schema, lets_go)
    try:
        translated = held.translated()
    except Inexpressible as error:
        raise RecursionError("its references lead to too many schemas") from error
    return HeldSchema(translated, tuple(held.ignored)[:_MOST_IGNORED], tuple(held.let_go))


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """Yield (path in the schema, subschema) for each direct subschema of a schema."""
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            yield from (((key, name), part) for name, part in value.items())
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            yield from (((key, at), part) for at, part in enumerate(value))
        elif key in _SCHEMAS:
            yield (key,), value


@dataclass(frozen=True, slots=True)
class _Place:
    """Subschema to which a `$ref` refers.

    base: URI against which relative references within the subschema are resolved.
    stays: whether the subschema keeps its path when the whole schema is translated.
    """

    schema: Any
    base: str
    stays: bool


@dataclass(slots=True)
class _Translation:
    """Translation of one schema into keywords that grammars enforce.

    root: the schema to translate.
    lets_go: whether keywords that nothing can replace are removed. False within a negated schema,
        whose negation would otherwise match fewer values.
    let_go: removed keywords that nothing could replace, with the JSON path of their schema.
    ignored: the removed formats.
    hoisted: JSON pointer to a subschema that is copied into `$defs` → `$ref` of the copy.
    originals: the reverse of `hoisted`.
    targets: `$ref` → translation of its target; None while the target is being translated.
    repeats: number of schemas that may still be translated a second time, for copies and targets.
    orderable: number of items that further lists of an array's possible orders may have together;
        such a list replaces uniqueItems.
    """

    root: Mapping[str, Any]
    lets_go: bool = False
    let_go: dict[tuple[str, str], None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)
    hoisted: dict[str, str] = field(default_factory=dict)
    originals: dict[str, str] = field(default_factory=dict)
    targets: dict[str, Any] = field(default_factory=dict)
    repeats: int = _MOST_STEPS
    orderable: int = _MOST_ORDERED_ITEMS
    _repeating: bool = False
    _removals: int = 0
    _loosened: list[Any] = field(default_factory=list)  # oneOf with options that let go
    _uris: dict[str, str] | None = None
    _logic: SchemaLogic = field(init=False)

    def __post_init__(self) -> None:
        self._logic = SchemaLogic(self._target, _MOST_STEPS)

    def translated(self) -> dict[str, Any]:
        """Return the translated schema; `$defs` has the translated schemas that it refers to."""
        schema: dict[str, Any] = self._schema(self.root, "", ())
        copies = dict[str, Any]()
        while len(copies) < len(self.hoisted):  # a copy may need further ones
            for pointer, ref in list(self.hoisted.items())[len(copies) :]:
                copies[ref.rpartition("/")[2]] = self._translated_again(pointer, self.lets_go)
        if copies:
            schema["$defs"] = {**schema.get("$defs", {}), **copies}
        return schema

    def _schema(self, schema: Any, base: str, path: _Path) -> Any:
        """Translate a schema; return booleans and other values unchanged.

        base: URI against which relative references are resolved.
        path: place of the schema in the root.
        """
        if not isinstance(schema, Mapping):
            return schema
        if self._repeating:
            self.repeats -= 1
            if self.repeats < 0:
                raise Inexpressible
        base = _base_in(schema, base)
        parts = {
            key: self._part(key, value, base, path)
            for key, value in schema.items()
            if key not in _IDENTIFIERS or not isinstance(value, str)
        }
        types = _types(parts)
        parts = {
            key: value
            for key, value in parts.items()
            if not _is_noop(key, value, parts)
            and not (types and key in _TYPE_OF and _TYPE_OF[key] not in types)
        }
        held = list[Any]()  # schemas that replace keywords
        for keyword, replace in _REPLACEMENTS.items():
            if keyword not in parts:
                continue
            with suppress(*_MALFORMED):  # llguidance takes or refuses it
                try:
                    held += replace(self, parts)
                except Inexpressible:
                    if self.lets_go:
                        self._removals += 1
                        self.let_go[keyword, json_path(path)] = None
                        held += self._remove(keyword, parts)
        if held and isinstance(parts.setdefault("allOf", []), list):
            parts["allOf"] = [*parts["allOf"], *held]
        return parts

    def _part(self, key: str, value: Any, base: str, path: _Path) -> Any:
        if key == "$ref" and isinstance(value, str):
            return self._reference(value, base)
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            return {
                name: self._schema(part, base, (*path, key, name)) for name, part in value.items()
            }
        if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            before = self._removals
            held = [self._schema(part, base, (*path, key, at)) for at, part in enumerate(value)]
            if key == "oneOf" and self._removals > before:
                self._loosened.append(held)
            return held
        if key not in _SCHEMAS:
            return value
        before, self.lets_go = self.lets_go, self.lets_go and key not in ("if", "not")
        try:
            return self._schema(value, base, (*path, key))
        finally:
            self.lets_go = before

    def _remove(self, keyword: str, parts: dict[str, Any]) -> list[Any]:
        """Remove a keyword that nothing can replace; return schemas that enforce a part of its
        meaning.

        parts: the schema's keywords, changed in place.
        """
        if keyword == "oneOf":
            return self._any_of(parts, parts["oneOf"])
        for each in (keyword, *_REMOVED_WITH.get(keyword, ())):
            parts.pop(each, None)
        return []

    # References

    def _reference(self, ref: str, base: str) -> str:
        """Return a `$ref` rewritten for the translated schema, as a JSON pointer from its root.

        The pointer leads to a copy of the target if translation moves the target. A `$ref` that
        names no part of the schema is returned unchanged.

        base: URI against which a relative `ref` is resolved.
        """
        try:
            pointer = self._pointer(ref, base)
            stays = self._place(pointer).stays
        except _MALFORMED:
            return ref
        if stays:
            return pointer
        defs = self.root.get("$defs", {})
        if pointer not in self.hoisted and isinstance(defs, Mapping):
            name = f"copy-{len(self.hoisted)}"
            while name in defs:
                name += "-"
            self.hoisted[pointer] = f"#/$defs/{name}"
            self.originals[f"#/$defs/{name}"] = pointer
        return self.hoisted.get(pointer, ref)

    def _pointer(self, ref: str, base: str) -> str:
        """Return the JSON pointer, as a URI fragment, to the target of a `$ref`.

        base: URI against which a relative `ref` is resolved.

        Raises LookupError if no part of the schema has the resolved URI.
        """
        uri, fragment = urldefrag(urljoin(base, ref) if base else ref)
        start = self._known_uris()[uri] if uri else "#"
        if fragment and not fragment.startswith("/"):
            return self._known_uris()[f"{uri}#{fragment}"]
        return start + fragment

    def _known_uris(self) -> dict[str, str]:
        """Return the JSON pointers of all subschemas with an identifier or anchor, by their URI."""
        if self._uris is None:
            self._uris = {}
            unread: list[tuple[str, str, Any]] = [("#", "", self.root)]
            while unread:
                pointer, base, schema = unread.pop()
                if not isinstance(schema, Mapping):
                    continue
                base = _base_in(schema, base)
                for key in _IDENTIFIERS:
                    if isinstance(name := schema.get(key), str):
                        uri = f"{base}#{name}" if key in _ANCHORS else urljoin(base, name)
                        self._uris.setdefault(uri.removesuffix("#"), pointer)
                for path, part in subschemas(schema):
                    unread.append((pointer + pointer_of(path), base, part))
        return self._uris

    def _place(self, pointer: str) -> _Place:
        """Return the subschema at a JSON pointer.

        Raises LookupError, TypeError or ValueError if the pointer leads nowhere.
        """
        place, base, stays = self.root, "", True
        key = None  # keyword whose schemas the next step names
        for name in path_of(pointer):
            if key is None:
                base = _base_in(place, base)
                stays &= name not in _REPLACED and name in _SCHEMAS | _LISTS_OF_SCHEMAS | (
                    _NAMED_SCHEMAS
                )
            place = place[int(name) if isinstance(place, list) else name]
            is_list = name in _LISTS_OF_SCHEMAS and isinstance(place, list)
            key = name if key is None and (is_list or name in _NAMED_SCHEMAS) else None
        return _Place(place, base, stays and key is None)

    def _target(self, ref: str) -> Any:
        """Return the translation of the subschema to which a `$ref` refers.

        ref: `$ref` in the translated schema, as `_reference` returned it.

        Raises LookupError if the `$ref` leads out of the schema or its target is being translated.
        """
        if ref not in self.targets:
            if not ref.startswith("#"):
                raise LookupError("it leads out of the schema")
            self.targets[ref] = None
            self.targets[ref] = self._translated_again(self.originals.get(ref, ref), False)
        if self.targets[ref] is None:
            raise LookupError("it refers to itself")
        return self.targets[ref]

    def _translated_again(self, pointer: str, lets_go: bool) -> Any:
        """Translate once more the subschema at a JSON pointer.

        lets_go: whether keywords that nothing can replace are removed.

        Raises Inexpressible if too many schemas have been translated a second time.
        """
        place, before = self._place(pointer), (self._repeating, self.lets_go)
        self._repeating, self.lets_go = True, lets_go
        try:
            return self._schema(place.schema, place.base, path_of(pointer))
        finally:
            self._repeating, self.lets_go = before

    # Replacements: each takes a keyword out of `parts` and returns schemas that hold it.
    # It changes nothing if it raises an error.

    def _format(self, parts: dict[str, Any]) -> list[Any]:
        name = parts["format"]
        if isinstance(name, str) and name not in _FORMATS:
            self._ignore_format(parts.pop("format"))
        elif implied_by_format(name, parts.get("pattern")):
            del parts["pattern"]
        return []

    def _ignore_format(self, name: str) -> None:
        self.ignored[f"format:{name}" if _SHOWN_FORMAT.fullmatch(name) else "format"] = None

    def _pattern(self, parts: dict[str, Any]) -> list[Any]:
        first, *rest = without_lookaheads(parts["pattern"])
        if needs_context(first):
            raise Inexpressible
        parts["pattern"] = first
        return [{"pattern": pattern} for pattern in rest]

    def _unheld(self, _: dict[str, Any]) -> list[Any]:
        raise Inexpressible

    def _unique_items(self, parts: dict[str, Any]) -> list[Any]:
        if parts["uniqueItems"] is not True:
            raise ValueError("want a boolean")
        least, most = parts.get("minItems", 0), parts.get("maxItems", math.inf)
        if most <= 1:
            del parts["uniqueItems"]
            return []
        if "prefixItems" in parts or "additionalItems" in parts:
            raise Inexpressible
        values = self._listed(parts.get("items"))
        most = min(len(values), most)
        orders = math.perm(len(values), most)
        if least > most or orders > _MOST_ORDERS or orders * most > self.orderable:
            raise Inexpressible
        self.orderable -= orders * most
        older = _OLDER_DRAFT.search(str(self.root.get("$schema")))
        first, more = ("items", "additionalItems") if older else ("prefixItems", "items")
        for keyword in ("items", "maxItems", "uniqueItems"):
            parts.pop(keyword, None)
        ordered = permutations([{"enum": [value]} for value in values], most)
        return [{"anyOf": [{first: list(order), more: False} for order in ordered]}]

    def _listed(self, items: Any) -> list[Any]:
        """Return the distinct values that an array's items may have.

        Raises Inexpressible if that schema lists no values, or too many.
        """
        for _ in range(_MOST_REFERENCES):
            if isinstance(items, Mapping) and items.keys() - _ANNOTATIONS == {"$ref"}:
                items = self._target(items["$ref"])
        values = listed_values(items, _ANNOTATIONS)
        if not values or len(values) > _MOST_ORDERS:
            raise Inexpressible
        return values

    def _unevaluated_properties(self, parts: dict[str, Any]) -> list[Any]:
        closed = list[Any]()
        if "additionalProperties" not in parts:
            if parts["unevaluatedProperties"] is not False:
                raise Inexpressible
            names = self._evaluated_names(parts)
            known = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
            if patterns := _patterns(parts):
                known["patternProperties"] = dict.fromkeys(patterns, True)
            closed.append(known)
        del parts["unevaluatedProperties"]
        return closed

    def _evaluated_names(self, schema: Any) -> list[str]:
        """Return the names of all properties that a schema describes, directly or in its allOf and
        `$ref`.

        Raises Inexpressible if the names depend on the value, as with anyOf, or cannot be listed.
        """
        if isinstance(schema, bool):
            return []
        if schema.keys() & {"anyOf", "else", "if", "oneOf", "then", "dependentSchemas"}:
            raise Inexpressible
        names = list(schema.get("properties", ()))
        for part in schema.get("allOf", ()):
            if _patterns(part) or "additionalProperties" in part:
                raise Inexpressible
            names += self._evaluated_names(part)
        if "$ref" in schema:
            names += self._evaluated_names({"allOf": [self._target(schema["$ref"])]})
        return names

    def _property_names(self, parts: dict[str, Any]) -> list[Any]:
        names, held = parts["propertyNames"], list[Any]()
        for _ in range(_MOST_REFERENCES):
            if isinstance(names, Mapping) and names.keys() - _ANNOTATIONS == {"$ref"}:
                names = self._target(names["$ref"])
        if names is False:
            names = {"enum": []}
        if "type" in names and "string" not in _types(names):
            raise Inexpressible
        asked = {key: value for key, value in names.items() if key not in _ANNOTATIONS | {"type"}}
        format_of_names = asked.pop("format", None)
        if asked.keys() == {"const"}:
            asked = {"enum": [asked["const"]]}
        if asked.keys() == {"enum"}:
            known = [name for name in asked["enum"] if isinstance(name, str)]
            held.append({"properties": dict.fromkeys(known, True), "additionalProperties": False})
        elif asked:
            pattern = asked.pop("pattern", None) or _lengths(asked)
            if asked or _patterns(parts):
                raise Inexpressible
            held.append({"patternProperties": {pattern: True}, "additionalProperties": False})
        if isinstance(format_of_names, str):
            self._ignore_format(format_of_names)
        del parts["propertyNames"]
        return held

    def _dependencies(self, parts: dict[str, Any]) -> list[Any]:
        held = list[Any]()
        for keyword in _DEPENDENCIES:
            for name, needs in parts.get(keyword, {}).items():
                there: dict[str, Any] = {"required": [name]}
                if isinstance(needs, list):
                    there["required"] = list(dict.fromkeys([name, *needs]))
                else:
                    there["allOf"] = [needs]
                held.append({"anyOf": [{"properties": {name: False}}, there]})
        for keyword in _DEPENDENCIES:
            parts.pop(keyword, None)
        return held

    def _not(self, parts: dict[str, Any]) -> list[Any]:
        held = self._logic.negated(parts["not"])
        del parts["not"]
        return [held]

    def _if(self, parts: dict[str, Any]) -> list[Any]:
        condition, then, other = (parts.get(key, True) for key in ("if", "then", "else"))
        fails = self._logic.negated(condition)
        ways = [[condition, then], [fails, other]]
        for keyword in ("if", "then", "else"):
            parts.pop(keyword, None)
        return [{"anyOf": [_all_of([part for part in way if part is not True]) for way in ways]}]

    def _one_of(self, parts: dict[str, Any]) -> list[Any]:
        """Replace `oneOf` by an `anyOf` in which each option excludes the values that other options
        match.

        parts: the schema's keywords, changed in place.

        Returns schemas to add to the schema's `allOf`.
        """
        options, logic = parts["oneOf"], self._logic
        loosened = any(options is each for each in self._loosened)
        typed = {"type": parts["type"]} if "type" in parts else {}
        known = [{**typed, "allOf": [option]} for option in options]
        overlaps: list[list[Any]] = [[] for _ in options]
        for at, option in enumerate(options):
            for before in range(at):
                if not logic.are_disjoint(known[before], known[at]):
                    if loosened:
                        raise Inexpressible
                    overlaps[before].append(option)
                    overlaps[at].append(options[before])
        apart = [
            _all_of([option, *map(logic.negated, others)])
            for option, others in zip(options, overlaps, strict=True)
        ]
        return self._any_of(parts, apart)

    def _any_of(self, parts: dict[str, Any], options: list[Any]) -> list[Any]:
        """Replace `oneOf` by an `anyOf`.

        parts: the schema's keywords, changed in place.
        options: schemas of the `anyOf`.

        Returns schemas to add to the schema's `allOf`.
        """
        if "anyOf" in parts:
            del parts["oneOf"]
            return [{"anyOf": options}]
        kept = {("anyOf" if key == "oneOf" else key): value for key, value in parts.items()}
        parts.clear()  # in the same order, which is the order of properties in answers
        parts.update(kept, anyOf=options)
        return []

    def _max_properties(self, parts: dict[str, Any]) -> list[Any]:
        if not _can_be_counted(parts):
            raise Inexpressible
        return []

    def _min_properties(self, parts: dict[str, Any]) -> list[Any]:
        names, required = list(parts.get("properties", ())), parts.get("required", ())
        if parts["minProperties"] <= len(set(required)):
            del parts["minProperties"]
            return []
        if _can_be_counted(parts):
            return []
        if parts["minProperties"] != 1 or not 0 < len(names) <= _MOST_OPTIONAL:
            raise Inexpressible
        if "maxProperties" in parts:
            raise Inexpressible
        del parts["minProperties"]
        # the first of the named properties that is there, or none of them
        missing = [dict.fromkeys(names[:at], False) for at in range(len(names) + 1)]
        ways: list[dict[str, Any]] = [
            {"required": [name], "properties": before}
            for name, before in zip(names, missing, strict=False)
        ]
        return [{"anyOf": [*ways, {"properties": missing[-1], "minProperties": 1}]}]


_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_IDENTIFIERS = ("$id", "id", "$anchor", "$dynamicAnchor")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_SAFE = "~$!&'()*+,;=:@"
"""Characters that may stay unescaped in a step of a JSON pointer that is a URI fragment."""
_REPLACEMENTS: Mapping[str, Callable[[_Translation, dict[str, Any]], list[Any]]] = {
    "format": _Translation._format,
    "pattern": _Translation._pattern,
    "contains": _Translation._unheld,
    "$dynamicRef": _Translation._unheld,
    "$recursiveRef": _Translation._unheld,
    "unevaluatedItems": _Translation._unheld,
    "uniqueItems": _Translation._unique_items,
    "unevaluatedProperties": _Translation._unevaluated_properties,
    "propertyNames": _Translation._property_names,
    "dependencies": _Translation._dependencies,
    "dependentRequired": _Translation._dependencies,
    "dependentSchemas": _Translation._dependencies,
    "not": _Translation._not,
    "if": _Translation._if,
    "oneOf": _Translation._one_of,
    "maxProperties": _Translation._max_properties,
    "minProperties": _Translation._min_properties,
}
_REMOVED_WITH = {"contains": ("minContains", "maxContains"), "if": ("then", "else")}
"""Keywords that mean something only beside another keyword, by that other keyword."""


def pointer_of(path: _Path) -> str:
    """Return a path in a schema as a JSON pointer, written as a URI fragment."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return "".join(f"/{quote(step, safe=_SAFE)}" for step in escaped)


def path_of(pointer: str) -> tuple[str, ...]:
    """Return the path that a JSON pointer, written as a URI fragment, names."""
    steps = filter(None, pointer.removeprefix("#").split("/"))
    return tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in steps)


def json_path(path: _Path) -> str:
    """Return a path in a schema as a JSON path in ASCII, with long names cut off."""
    steps = ["$"]
    for step in path:
        if isinstance(step, int) or step.isdecimal():
            steps.append(f"[{step}]")
        elif _PLAIN_NAME.fullmatch(step) and len(step) <= _LONGEST_STEP:
            steps.append(f".{step}")
        else:
            steps.append(f"[{json.dumps(step[:_LONGEST_STEP])}]")
    return "".join(steps)


def _base_in(schema: Any, base: str) -> str:
    """Return the URI against which relative references within a schema are resolved.

    base: the same URI of the schema that contains this one.
    """
    own = schema.get("$id", schema.get("id")) if isinstance(schema, Mapping) else None
    return urldefrag(urljoin(base, own))[0] if isinstance(own, str) else base


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema's `type` lists; an empty set if it lists none."""
    types = schema.get("type", [])
    return {types} if isinstance(types, str) else {*filter(_is_text, _list(types))}


def _can_be_counted(parts: Mapping[str, Any]) -> bool:
    """Return True if llguidance can enforce a schema's minProperties and maxProperties."""
    required = set(parts.get("required", ()))
    if not parts.get("properties", {}).keys() - required:
        return True
    least = parts.get("minProperties", 0) - len(required)
    most = parts.get("maxProperties", len(required) + 1) - len(required)
    closed = parts.get("additionalProperties") is False and not _patterns(parts)
    return bool(closed and least <= 1 and most == 1)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _patterns(schema: Any) -> list[str]:
    return list(schema.get("patternProperties", ())) if isinstance(schema, Mapping) else []


def _lengths(asked: dict[str, Any]) -> str:
    """Return a pattern with the meaning of a schema's minLength and maxLength, and remove both
    keywords.

    asked: the schema's keywords.
    """
    least, most = asked.pop("minLength", 0), asked.pop("maxLength", "")
    return rf"^[\s\S]{{{least},{most}}}$"


def _all_of(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True


def _is_noop(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    is_noop = _NOOP_IF.get(key)
    return is_noop is not None and is_noop(value, schema)


def _allows_all(value: Any, _: Mapping[str, Any] | None = None) -> bool:
    return value is True or value == {}


def _allows_all_texts(value: Any, _: Mapping[str, Any]) -> bool:
    if not isinstance(value, Mapping):
        return value is True
    asked = value.keys() - _ANNOTATIONS - {"$schema"}
    return not asked or (asked == {"type"} and "string" in _types(value))


def _each_allows_all(value: Any, _: Mapping[str, Any]) -> bool:
    return isinstance(value, Mapping) and all(p == [] or _allows_all(p) for p in value.values())


def _contains_any(_: Any, schema: Mapping[str, Any]) -> bool:
    return schema.get("minContains") == 0 and "maxContains" not in schema


_NOOP_IF: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "contains": _contains_any,
    "dependencies": _each_allows_all,
    "dependentRequired": _each_allows_all,
    "dependentSchemas": _each_allows_all,
    "$recursiveAnchor": lambda value, _: isinstance(value, bool),
    "else": lambda value, schema: "if" not in schema or _allows_all(value),
    "if": lambda _, schema: all(_allows_all(schema.get(key, True)) for key in ("then", "else")),
    "maxContains": lambda _, schema: "contains" not in schema,
    "minContains": lambda _, schema: "contains" not in schema or _contains_any(_, schema),
    "minProperties": lambda value, _: value == 0,
    "not": lambda value, _: value is False,
    "patternProperties": lambda value, _: value == {},
    "propertyNames": _allows_all_texts,
    "then": lambda value, schema: "if" not in schema or _allows_all(value),
    "unevaluatedItems": _allows_all,
    "unevaluatedProperties": _allows_all,
    "uniqueItems": lambda value, _: value is False,
}
