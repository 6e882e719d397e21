"""Vocabulary of all made-up texts: words, names, places, and words that do not exist."""

from random import Random
from string import ascii_lowercase


def split(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


ANIMALS = split(
    "cat dog fox owl crow heron otter badger hedgehog rabbit horse goat sheep duck goose swan "
    "mouse squirrel beaver weasel sparrow robin parrot lorikeet turtle salmon trout bee "
    "butterfly spider"
)
FOODS = split(
    "bread butter cheese honey soup apple pear plum cherry lemon orange carrot onion potato "
    "tomato pepper pasta rice biscuit cake pancake porridge jam pie salad walnut almond "
    "mushroom pumpkin raisin"
)
THINGS = split(
    "kettle lamp table chair window door basket bottle bucket blanket pillow candle clock "
    "compass hammer ladder lantern mirror needle pencil paper letter ribbon rope scarf shovel "
    "spoon teapot umbrella violin wagon whistle bicycle button engine feather glove jacket "
    "marble notebook puzzle stamp thread ticket"
)
PLACES = split(
    "garden forest river bridge harbour market library station village castle meadow mountain "
    "valley island beach bakery kitchen attic cellar barn orchard windmill lighthouse museum "
    "school theatre workshop tower path pond"
)
ADJECTIVES = split(
    "small big old new quiet loud warm cold bright dark soft hard quick slow happy sad brave "
    "shy clever silly gentle proud round square heavy light clean dusty green golden silver "
    "wooden sleepy hungry tiny curious friendly careful lonely yellow"
)
VERBS = split(  # past tense, each takes an object
    "found carried painted followed watched mended cleaned opened lifted borrowed noticed "
    "visited remembered wanted liked hid moved counted drew washed"
)
ADVERBS = split(
    "slowly quickly quietly happily carefully again today yesterday early late alone together "
    "outside inside everywhere often"
)
NAMES = split(
    "Ada Anton Bea Boris Clara Cyril Dora Dimitri Edith Emil Fay Felix Greta Gustav Hana Hugo "
    "Ida Igor Jana Jonas Kira Kofi Lena Leo Mira Milo Nadia Nils Olga Oscar Petra Pavel Quinn "
    "Rosa Ravi Sara Samir Tessa Tomas Uma Ulric Vera Viktor Wanda Walter Xenia Yara Yusuf Zoe "
    "Zeno"
)
CITIES = split(
    "Athens Bergen Bristol Cairo Cork Delft Dublin Essen Exeter Florence Geneva Ghent Granada "
    "Hanoi Helsinki Izmir Jaipur Kyoto Krakow Leeds Lisbon Lyon Madrid Malmo Naples Nairobi "
    "Oslo Oxford Paris Porto Prague Quito Riga Rome Seville Seoul Tallinn Tokyo Turin Utrecht "
    "Vienna Vilnius Warsaw York Zagreb Zurich"
)
NOUNS = ANIMALS + FOODS + THINGS + PLACES
WORDS = NOUNS + ADJECTIVES + VERBS + ADVERBS

_ONSETS = split("b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr sc sh "
                "sk sl sn sp st str sw th tr tw wh")  # fmt: skip
_VOWELS = split("a a e e i i o o u ai ea ee oa oo ou")
_CODAS = split("b d ck g k l ll m n nd ng nt p r rd rk s sk ss st t th x") + ("",) * 12


def invented_word(rng: Random, longest: int = 10) -> str:
    """Make a pronounceable lower-case word of 3 to `longest` letters that is in no list of this
    module.
    """
    while True:
        word = "" if rng.random() < 0.85 else rng.choice("aeiou")
        for _ in range(rng.choice((1, 2, 2, 3))):
            word += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        if 3 <= len(word) <= longest:
            return word


def letters(rng: Random, longest: int = 10) -> str:
    """Draw 3 to `longest` random lower-case letters, none of which can be guessed."""
    return "".join(rng.choices(ascii_lowercase, k=rng.randint(3, longest)))


def word(rng: Random, longest: int = 10) -> str:
    """Draw a real word, an invented one, or (rarely) random letters; 3 to `longest` letters."""
    kind = rng.random()
    if kind < 0.4:
        while len(real := rng.choice(WORDS)) > longest:
            pass
        return real
    return invented_word(rng, longest) if kind < 0.8 else letters(rng, longest)


def proper_name(rng: Random, known: tuple[str, ...]) -> str:
    """Draw a known name, or as often an invented one, capitalised."""
    return rng.choice(known) if rng.random() < 0.5 else invented_word(rng).capitalize()
