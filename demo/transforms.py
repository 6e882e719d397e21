"""Transformations of text that adapters learn, as exact functions."""

from codecs import encode

from demo.words import split

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


def _pig_latin_word(word: str) -> str:
    start = next((index for index, sign in enumerate(word) if sign in "aeiou"), 0)
    return word[start:] + word[:start] + "ay" if start else word + "way"
