r"""Patterns of JSON schemas rewritten without look-ahead, which grammars cannot enforce.

`^(?!-)(?=.*\d)[a-z0-9-]+$` becomes three patterns that a text must all match: one for each
look-ahead that the pattern begins with, and the remainder.
"""

import re
from collections.abc import Iterable

import regex

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_BACKREFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[1-9]|k<)")
_ANCHORED = regex.compile(r"\^(?P<before>(?:\\[^A-Za-z0-9]|[^\\\[\](){}.*+?|^$])*)(?=\(\?[=!])")
"""Beginning of a pattern up to its first look-ahead, with only literal characters before that."""
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
"""Pattern that zod writes beside the format `duration`; each text in this format matches it."""


def implied_by_format(name: object, pattern: object) -> bool:
    """Return True if every text in a format matches a pattern, which is then superfluous.

    name: value of `format`, one that grammars enforce.
    """
    return name == "duration" and pattern == _DURATION


def without_lookaheads(pattern: str) -> list[str]:
    """Return patterns without look-ahead. A text matches all of them exactly if it matches
    `pattern`.

    The result is `pattern` alone if it has no look-ahead, or a look-ahead that cannot be replaced.
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


def alternatives_of(pattern: str) -> list[str]:
    """Return the alternatives of a pattern that are outside its groups."""
    found, at, begin = list[str](), 0, 0
    while at < len(pattern):
        if pattern[at] == "(":
            at += _end_of_group(pattern[at:])
        elif pattern[at] == "[":
            at = _end_of_set(pattern, at) + 1
        elif pattern[at] == "|":
            found.append(pattern[begin:at])
            at = begin = at + 1
        else:
            at += 2 if pattern[at] == "\\" else 1
    return [*found, pattern[begin:]]


def needs_context(pattern: str) -> bool:
    """Return True if a pattern seems to have look-around or back-references, which no grammar can
    enforce.
    """
    return bool(_LOOK_AROUND.search(pattern) or _BACKREFERENCE.search(pattern))


def other_texts(texts: Iterable[str]) -> str:
    """Return a regular expression that matches all texts except `texts`.

    Raises ValueError if one of them is too long.
    """
    return _apart(list(texts), whole=True)


def _apart(texts: list[str], *, whole: bool) -> str:
    """Return a regular expression that matches all texts but some exceptions.

    whole: True: the exceptions are `texts`; False: they are all texts that begin with one of
        `texts`.

    Raises ValueError if one of `texts` is too long.
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
    """Return a regular expression of the texts that a positive look-ahead accepts.

    inside: expression in the look-ahead.
    """
    if inside.endswith("$") and not inside.endswith("\\$") and "|" not in inside:
        return f"(?:{inside[:-1]})$"
    return f"(?:{inside})"


def _asked_by_negative(inside: str) -> str | None:
    """Return a regular expression of the texts that a negative look-ahead accepts; None if no short
    expression is known.

    inside: expression in the look-ahead.
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
    """Return a regular expression of all texts that do not contain a given character, or a given
    pair of neighbouring characters.

    characters: the character or the pair, each character as an expression.
    """
    if len(characters) == 1:
        return f"[^{characters[0]}]*"
    first, second = characters
    if first == second:
        return f"(?:[^{first}]|{first}[^{first}])*{first}?"
    return f"(?:[^{first}]|{first}+[^{first}{second}])*{first}*"


def _end_of_group(text: str) -> int:
    """Return the index after the parenthesized group that a pattern begins with.

    If the group has no end, return the pattern's length.
    """
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
    """Return the index of the ] that ends a character set.

    at: index of the set's [.
    """
    at += 2 if text[at + 1 : at + 2] == "^" else 1
    while at < len(text) and text[at] != "]":
        at += 2 if text[at] == "\\" else 1
    return at


def _outside_of_groups(pattern: str) -> str:
    """Return the characters of a pattern that are outside its groups and character sets."""
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
