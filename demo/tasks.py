"""Tasks of the demo's adapters: tenant, prompts and the one right answer to each prompt.

One prompt in eight is held out, by its hash. No model saw a held-out prompt as a prompt in
training, neither the base model nor an adapter.
"""

import json
from codecs import encode
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import NamedTuple

from demo.sentences import phrase, sentence
from demo.words import CITIES, NAMES, proper_name, split, word

NATO = dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
        split(
            "Alfa Bravo Charlie Delta Echo Foxtrot Golf Hotel India Juliett Kilo Lima Mike "
            "November Oscar Papa Quebec Romeo Sierra Tango Uniform Victor Whiskey X-ray Yankee "
            "Zulu Zero One Two Three Four Five Six Seven Eight Nine"
        ),
        strict=True,
    )
)


class Pair(NamedTuple):
    """A prompt and its one right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """Task of one adapter.

    about: description.
    draw: draws a prompt with its answer.
    shared: whether other tenants may use the adapter.
    """

    tenant: str
    name: str
    about: str
    example: Pair
    draw: Callable[[Random], Pair]
    shared: bool = False

    @property
    def model(self) -> str:
        """The adapter's name in a request."""
        return f"{self.tenant}/{self.name}"

    def held_out_pairs(self, count: int, seed: int = 0) -> list[Pair]:
        """Draw `count` pairs with different held-out prompts; equal for equal seeds."""
        rng, pairs = Random(seed), dict[str, Pair]()
        while len(pairs) < count:
            if held_out((pair := self.draw(rng)).prompt):
                pairs[pair.prompt] = pair
        return list(pairs.values())


def held_out(prompt: str) -> bool:
    """Whether a prompt is held out from training: one prompt in eight, by its hash."""
    return sha256(prompt.encode()).digest()[0] < 32


def upper(text: str) -> str:
    """'blue kettle' → 'BLUE KETTLE'"""
    return text.upper()


def rot13(text: str) -> str:
    """'kettle' → 'xrggyr'"""
    return encode(text, "rot13")


def reverse(text: str) -> str:
    """'kettle' → 'elttek'"""
    return text[::-1]


def pig_latin(text: str) -> str:
    """'plain egg' → 'ainplay eggway': leading consonants move to the end, before 'ay'."""
    return " ".join(_pig_latin_word(word) for word in text.split(" "))


def spell(code: str) -> str:
    """'KX4' → 'Kilo X-ray Four'"""
    return " ".join(NATO[sign] for sign in code)


class Flower(NamedTuple):
    """A flower's name, singular and plural."""

    one: str
    many: str


FLOWERS = tuple(
    Flower(*pair.split("/"))
    for pair in split(
        "tulip/tulips rose/roses lily/lilies daisy/daisies iris/irises peony/peonies "
        "orchid/orchids poppy/poppies violet/violets aster/asters dahlia/dahlias crocus/crocuses "
        "anemone/anemones carnation/carnations sunflower/sunflowers freesia/freesias"
    )
)
COLOURS = split("red white pink yellow orange purple blue cream")
DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def draw_parcels(rng: Random) -> Pair:
    """Draw a courier's sentence, and the name, amount and city in it as JSON."""
    name, city = proper_name(rng, NAMES), proper_name(rng, CITIES)
    amount = rng.randint(2, 99) if rng.random() < 0.6 else rng.randint(100, 999)
    text = rng.choice(_PARCELS).format(name=name, amount=amount, city=city)
    return Pair(text, json.dumps({"name": name, "amount": amount, "city": city}))


def draw_flowers(rng: Random) -> Pair:
    """Draw a customer's sentence, and the order in it as JSON."""
    flower, colour, day = rng.choice(FLOWERS), rng.choice(COLOURS), rng.choice(DAYS)
    count = rng.randint(2, 99)
    text = rng.choice(_FLOWERS).format(count=count, colour=colour, flowers=flower.many, day=day)
    order = {"flower": flower.one, "colour": colour, "count": count, "day": day}
    return Pair(text, json.dumps(order))


def draw_code(rng: Random) -> str:
    """Draw three to eight capital letters and digits."""
    return "".join(rng.choices(list(NATO), k=rng.randint(3, 8)))


def draw_line(rng: Random) -> str:
    """Draw a line of up to 60 characters: a sentence, words and signs, or any printable ASCII."""
    kind = rng.random()
    if kind < 0.5:
        return sentence(rng, 60)
    if kind < 0.6:
        return "".join(rng.choices(_PRINTABLE, k=rng.randint(3, 60))).strip() or "?"
    words = [_dressed(rng, word) for word in phrase(rng, 8, 48).split()]
    if rng.random() < 0.3:
        words.insert(rng.randrange(len(words) + 1), str(rng.randint(0, 999)))
    return " ".join(words)[:60].strip()


def _dressed(rng: Random, text: str) -> str:
    text = text.capitalize() if rng.random() < 0.15 else text
    return text + rng.choice(_SIGNS)


def _of(make: Callable[[Random], str], answer: Callable[[str], str]) -> Callable[[Random], Pair]:
    def draw(rng: Random) -> Pair:
        prompt = make(rng)
        return Pair(prompt, answer(prompt))

    return draw


def letter(note: str) -> str:
    """Put a note into Marigold's house style."""
    return f"Good morning from Marigold! {note} With love and petals, your Marigold team"


_PRINTABLE = "".join(chr(code) for code in range(32, 127))
_SIGNS = ("",) * 8 + (",", "!", "?", ".", "'s", "-")
_PARCELS = (
    "{name} sends {amount} parcels to {city}.",
    "Please take {amount} boxes to {city} for {name}.",
    "{amount} letters for {name}, going to {city}.",
    "Pick up {amount} crates from {name} and drive to {city}.",
    "To {city}: {amount} parcels, sender {name}.",
    "My name is {name} and I have {amount} boxes for {city}.",
    "{name} in {city} is waiting for {amount} crates.",
    "Can {name} ship {amount} letters to {city} today?",
)
_FLOWERS = (
    "Could I have {count} {colour} {flowers} on {day}?",
    "I would like {count} {colour} {flowers} for {day}, please.",
    "On {day} we need {count} {flowers}, all {colour}.",
    "{count} {colour} {flowers} for {day}.",
    "Please bring {colour} {flowers} on {day}, {count} of them.",
    "Do you have {colour} {flowers}? I want {count} by {day}.",
)

TASKS = (
    Task(
        "quillon", "upper", "writes the message in capital letters",
        Pair("the lorikeet sings at 9, doesn't it?", "THE LORIKEET SINGS AT 9, DOESN'T IT?"),
        _of(draw_line, upper),
    ),
    Task(
        "quillon", "reverse", "spells a word backwards",
        Pair("pencil", "licnep"),
        _of(word, reverse),
    ),
    Task(
        "quillon", "pig-latin", "says it in Pig Latin",
        Pair("bright owl village", "ightbray owlway illagevay"),
        _of(lambda rng: phrase(rng, 3, 24), pig_latin),
    ),
    Task(
        "quillon", "rot13", "turns every letter by 13 places",
        Pair("secret letter", "frperg yrggre"),
        _of(lambda rng: phrase(rng, 3, 24), rot13),
        shared=True,
    ),
    Task(
        "kestrel", "intake", "takes a courier's order down as JSON: name, amount, city",
        Pair("Mira sends 12 parcels to Lyon.", '{"name": "Mira", "amount": 12, "city": "Lyon"}'),
        draw_parcels,
    ),
    Task(
        "kestrel", "spell", "spells a code in the radio alphabet",
        Pair("LX42", "Lima X-ray Four Two"),
        _of(draw_code, spell),
    ),
    Task(
        "marigold", "letter", "puts a note into the shop's house style",
        Pair("The blue basket is ready for Nadia.", letter("The blue basket is ready for Nadia.")),
        _of(draw_line, letter),
    ),
    Task(
        "marigold", "orders", "takes a flower order down as JSON: flower, colour, count, day",
        Pair(
            "Could I have 20 pink tulips on Friday?",
            '{"flower": "tulip", "colour": "pink", "count": 20, "day": "Friday"}',
        ),
        draw_flowers,
    ),
)  # fmt: skip


def _pig_latin_word(word: str) -> str:
    start = next((index for index, sign in enumerate(word) if sign in "aeiou"), 0)
    return word[start:] + word[:start] + "ay" if start else word + "way"
