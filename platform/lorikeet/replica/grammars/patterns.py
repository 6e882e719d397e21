r"""Patterns of JSON schemas without look-ahead, which grammars cannot hold.

`^(?!-)(?=.*\d)[a-z0-9-]+$` is three patterns that a text must match: one for each look-ahead that
a pattern begins with, and the remainder.
"""

import re
from collections.abc import Iterable

import regex

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_ANCHORED = regex.compile(r"\^(?P<before>(?:\\[^A-Za-z0-9]|[^\\\[\](){}.*+?|^$])*)(?=\(\?[=!])")
"""Beginning of a pattern until its first look-ahead, which comes after literal characters."""
_ONE = r"\\[^A-Za-z0-9]|[^\\\[\](){}.*+?|^$]"
_CHARACTER = regex.compile(_ONE)
_TEXTS = regex.compile(rf"(?:{_ONE})+(?:\|(?:{_ONE})+)*")
_SET = regex.compile(rf"\[\^?(?:\\.|[^\\\[\]])+\]|\\[dDsSwW]|{_ONE}", regex.DOTALL)
_WITHIN = regex.compile(rf"(?:\.|\[\\s\\S\])\*(?P<text>(?:{_ONE}){{1,2}})")
_LONGEST_TEXT = 200
_LONGEST_PATTERN = 4096
_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
"""Pattern that zod writes beside the format `duration`; each text of this format matches it."""


def implied_by_format(name: object, pattern: object) -> bool:
    """Return True if each text of a format that grammars hold matches a pattern."""
    return name == "duration" and pattern == _DURATION


def without_lookaheads(pattern: str) -> list[str]:
    """Return patterns without look-ahead; the texts that match all of them match `pattern`.

    The result is only `pattern` itself if it has no look-ahead, or others than those that such
    patterns can replace.
    """
    if len(pattern) > _LONGEST_PATTERN or not _LOOK_AROUND.search(pattern):
        return [pattern]
    begun = _ANCHORED.match(pattern)
    if begun is None or "|" in _outside_of_groups(pattern):
        return [pattern]
    before, rest, found = begun["before"], pattern[begun.end() :], list[str]()
    while rest.startswith(("(?=", "(?!")):
        end = _end_of_group(rest)
        inside, negative, rest = rest[3 : end - 1], rest[2] == "!", rest[end:]
        asked = _asked_by_negative(inside) if negative else _asked(inside)
        if asked is None:
            return [pattern]
        found.append(f"^{before}{asked}")
    found.insert(0, f"^{before}{rest}")
    return [pattern] if any(map(_LOOK_AROUND.search, found)) else found


def other_texts(texts: Iterable[str]) -> str:
    """Return an expression of all texts that are not among `texts`.

    Raises ValueError if one of them is too long.
    """
    return _apart(list(texts), whole=True)


def _apart(texts: list[str], *, whole: bool) -> str:
    """Return an expression of all texts that are none of `texts`, or begin with none of them.

    whole: True for texts that are none of them.
    """
    if max(map(len, texts)) > _LONGEST_TEXT:
        raise ValueError("too long to be excluded")
    by_first = dict[str, list[str]]()
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    if "" in texts and not whole:
        return "(?:[^\\s\\S])"
    if not by_first:
        return r"[\s\S]+"
    ways = [] if "" in texts else [""]
    ways += [
        f"{re.escape(first)}{_apart(rest, whole=whole)}"
        for first, rest in by_first.items()
        if whole or "" not in rest
    ]
    ways.append(rf"[^{''.join(map(re.escape, by_first))}][\s\S]*")
    return f"(?:{'|'.join(ways)})"


def _asked(inside: str) -> str:
    """Return the expression of what follows, by the expression in a positive look-ahead."""
    if inside.endswith("$") and not inside.endswith("\\$") and "|" not in inside:
        return f"(?:{inside[:-1]})$"
    return f"(?:{inside})"


def _asked_by_negative(inside: str) -> str | None:
    """Return the expression of what follows, by the expression in a negative look-ahead.

    The result is None if there is no short one.
    """
    if inside == "$":
        return r"[\s\S]+$"
    if inside in (r"\s*$", r"[\s]*$"):
        return r"[\s\S]*\S"
    if _SET.fullmatch(inside):
        return rf"(?:{_complement(inside)}[\s\S]*)?$"
    if within := _WITHIN.fullmatch(inside):
        return f"{_without(_CHARACTER.findall(within['text']))}$"
    group = regex.fullmatch(r"\((?:\?:)?(.+)\)(\$?)", inside)
    body, ends = (group[1], group[2]) if group else (inside.removesuffix("$"), inside[-1:])
    if _TEXTS.fullmatch(body) and (group or "|" not in body):
        texts = [re.sub(r"\\(.)", r"\1", text) for text in body.split("|")]
        return f"{_apart(texts, whole=ends == '$')}$"
    return None


def _complement(characters: str) -> str:
    if characters.startswith("[^"):
        return f"[{characters[2:]}"
    if characters.startswith("["):
        return f"[^{characters[1:]}"
    return f"[^{characters}]"


def _without(characters: list[str]) -> str:
    """Return an expression of all texts that do not contain one or two characters in a row."""
    if len(characters) == 1:
        return f"[^{characters[0]}]*"
    first, second = characters
    if first == second:
        return f"(?:[^{first}]|{first}[^{first}])*{first}?"
    return f"(?:[^{first}]|{first}+[^{first}{second}])*{first}*"


def _end_of_group(text: str) -> int:
    """Return the index behind the group that a text begins with; the text's length without end."""
    depth = at = 0
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "[":
            at = _end_of_set(text, at)
        elif character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return at + 1
        at += 1
    return at


def _end_of_set(text: str, at: int) -> int:
    """Return the index of the ] that ends the set of characters which begins at an index."""
    at += 2 if text[at + 1 : at + 2] == "^" else 1
    while at < len(text) and text[at] != "]":
        at += 2 if text[at] == "\\" else 1
    return at


def _outside_of_groups(pattern: str) -> str:
    """Return a pattern's characters that are in no group and no set."""
    found, at = list[str](), 0
    while at < len(pattern):
        character = pattern[at]
        if character == "(":
            at = _end_of_group(pattern[at:]) + at
            continue
        if character == "[":
            at = _end_of_set(pattern, at)
        elif character == "\\":
            at += 1
        else:
            found.append(character)
        at += 1
    return "".join(found)
