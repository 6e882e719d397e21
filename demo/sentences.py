"""Made-up sentences and stories from a small grammar."""

from random import Random

from demo.words import ADJECTIVES, ADVERBS, ANIMALS, NAMES, NOUNS, PLACES, THINGS, VERBS, word


def noun_phrase(rng: Random) -> str:
    """Draw a noun phrase such as 'the kettle' or 'the old kettle', sometimes with an invented
    noun.
    """
    noun = rng.choice(NOUNS) if rng.random() < 0.85 else word(rng)
    if rng.random() < 0.5:
        noun = f"{rng.choice(ADJECTIVES)} {noun}"
    return f"{rng.choice(('the', 'the', 'my', 'our', 'his', 'her'))} {noun}"


def sentence(rng: Random, longest: int = 60) -> str:
    """Draw a capitalised sentence with its punctuation, at most `longest` characters."""
    while True:
        who = rng.choice(NAMES) if rng.random() < 0.4 else noun_phrase(rng)
        text = rng.choice(_CLAUSES)(rng, who)
        text = text[0].upper() + text[1:] + rng.choice("......!?")
        if len(text) <= longest:
            return text


def phrase(rng: Random, most_words: int, longest: int) -> str:
    """Draw 1 to `most_words` lower-case words, at most `longest` characters."""
    while True:
        text = " ".join(word(rng) for _ in range(rng.randint(1, most_words)))
        if len(text) <= longest:
            return text


def story(rng: Random) -> str:
    """Draw a story of a name, an animal, a thing and two places, in three to eight sentences."""
    name, friend = rng.sample(NAMES, 2)
    animal, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    home, away = rng.sample(PLACES, 2)
    mood = rng.choice(ADJECTIVES)
    opening = rng.choice((
        f"Once there was a {mood} {animal} who lived near the {home}.",
        f"{name} lived near the {home} with a {mood} {animal}.",
        f"One day {name} met a {mood} {animal} in the {home}.",
    ))  # fmt: skip
    middle = [
        f"The {animal} liked the {thing} very much.",
        f"{name} and the {animal} went to the {away}.",
        f"At the {away} they found a {rng.choice(ADJECTIVES)} {thing}.",
        f'"Is this your {thing}?" asked {name}.',
        f"{friend} came and {rng.choice(VERBS)} the {thing}.",
        f"The {animal} was {rng.choice(ADJECTIVES)} and sat by the {away}.",
        f"It was {rng.choice(ADJECTIVES)} in the {away}, and nobody was there.",
    ]
    chosen = sorted(rng.sample(range(len(middle)), rng.randint(1, 6)))
    ending = rng.choice((
        f"In the evening {name} and the {animal} went home to the {home}.",
        f"From that day on {name} and {friend} were friends.",
        f"And the {animal} slept beside the {thing}.",
    ))  # fmt: skip
    return " ".join([opening, *(middle[index] for index in chosen), ending])


_CLAUSES = (
    lambda rng, who: f"{who} {rng.choice(VERBS)} {noun_phrase(rng)}",
    lambda rng, who: f"{who} {rng.choice(VERBS)} {noun_phrase(rng)} {rng.choice(ADVERBS)}",
    lambda rng, who: f"{who} was in the {rng.choice(PLACES)}",
    lambda rng, who: f"{who} is {rng.choice(ADJECTIVES)} and {rng.choice(ADJECTIVES)}",
    lambda rng, who: f"{who} will be here at {rng.randint(1, 12)}",
    lambda rng, who: f"{noun_phrase(rng)} is ready for {who}",
    lambda rng, who: f"{who} has {rng.randint(2, 99)} {rng.choice(THINGS)}s",
)
