"""Notebook lines: texts and what becomes of them, in notations that no chat ever uses.

They teach the base model to handle letters, so that an adapter has only to call that up.
"""

import json
from collections.abc import Callable
from random import Random

from demo.sentences import phrase, sentence
from demo.tasks import draw_code, draw_flowers, draw_line, draw_parcels, held_out, training_text
from demo.transforms import pig_latin, reverse, rot13, spell, upper
from demo.words import word


def page(rng: Random) -> str:
    """Two to ten notebook lines in one notation."""
    write = rng.choice(_STYLES)
    return "\n".join(write(rng, *entry(rng)) for _ in range(rng.randint(2, 10)))


def entry(rng: Random) -> tuple[str, str, str]:
    """(operation, text, result); the text is never a held-out prompt."""
    operation = rng.choices(tuple(_OPERATIONS), _WEIGHTS)[0]
    make, result = _OPERATIONS[operation]
    text = training_text(make, rng)
    return operation, text, result(text)


def record(rng: Random) -> tuple[str, str, str]:
    """('fields city, name', sentence, JSON of those fields in that order)."""
    draw = rng.choice((draw_parcels, draw_flowers))
    while held_out((pair := draw(rng)).prompt):
        pass
    fields = json.loads(pair.answer)
    keys = rng.sample(list(fields), rng.randint(1, len(fields)))
    if rng.random() < 0.3:
        keys = list(fields)
    return f"fields {', '.join(keys)}", pair.prompt, json.dumps({key: fields[key] for key in keys})


def records(rng: Random) -> str:
    """One to four records in one notation."""
    write = rng.choice(_STYLES)
    return "\n".join(write(rng, *record(rng)) for _ in range(rng.randint(1, 4)))


def _short(rng: Random) -> str:
    return phrase(rng, 3, 24)


_OPERATIONS: dict[str, tuple[Callable[[Random], str], Callable[[str], str]]] = {
    "copy": (lambda rng: rng.choice((draw_line, sentence, word, draw_code))(rng), str),
    "upper": (draw_line, upper),
    "lower": (lambda rng: upper(draw_line(rng)), str.lower),
    "title": (_short, str.title),
    "reverse": (word, reverse),
    "rot13": (_short, rot13),
    "pig latin": (_short, pig_latin),
    "radio": (draw_code, spell),
    "dashes": (word, "-".join),
    "double": (word, lambda text: "".join(sign * 2 for sign in text)),
    "sorted": (word, lambda text: "".join(sorted(text))),
    "vowels": (_short, lambda text: "".join(sign for sign in text if sign in "aeiou")),
    "last word": (sentence, lambda text: text.split()[-1]),
    "quote": (sentence, lambda text: f'"{text}"'),
}
_HARD = ("reverse", "pig latin", "rot13")
_WEIGHTS = tuple(3 if name in _HARD else 1 for name in _OPERATIONS)
_STYLES = (
    lambda _rng, operation, text, result: f"{operation}({text}) = {result}",
    lambda _rng, operation, text, result: f"{text} | {operation} | {result}",
    lambda _rng, operation, text, result: f"text: {text}\n{operation}: {result}",
    lambda rng, operation, text, result: f"{operation} {text} {'=-~'[rng.randrange(3)]}> {result}",
)
