"""Cases drawn from the table of features: each feature once, and five hundred in all."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle
from random import Random

from tests.corpus.bases import FAMILIES
from tests.corpus.draft import Draft
from tests.corpus.features import Axis, Feature
from tests.corpus.table import ACCEPTED, PLAIN, REFUSED

COUNT = 500
RANKS = (1, 2, 4, 7, 8, 16, 32)
_SEED = 23
_DRAWN = 12  # candidates for each case: the one with the most new pairs is taken


@dataclass(frozen=True, slots=True)
class Case:
    """One adapter to build and register.

    features: at most one of each axis, in the order of the axes.
    """

    family: str
    rank: int
    features: tuple[Feature, ...]
    seed: int

    @property
    def says(self) -> str:
        """Return a regular expression for register's refusal; empty if the adapter is served."""
        return next((feature.says for feature in self.features if feature.says), "")

    @property
    def silent(self) -> bool:
        return any(feature.silent for feature in self.features)

    @property
    def name(self) -> str:
        marked = [f.name for f in self.features if f is not PLAIN or len(self.features) == 1]
        return f"{self.seed} {self.family} r{self.rank}: {', '.join(marked)}"

    def build(self, draft: Draft) -> None:
        """Let the trainer save the adapter, then apply the other features."""
        trainer, *others = self.features
        trainer.build(draft)
        draft.keep_truth()
        for feature in others:
            feature.build(draft)

    def pairs(self) -> set[tuple[str, str]]:
        """Return all pairs of features; the family and the rank count as features."""
        names = [self.family, f"r{self.rank}", *(feature.name for feature in self.features)]
        return set(combinations(names, 2))


def cases_of(table: Iterable[tuple[tuple[Feature, ...], Sequence[str]]]) -> Iterator[Case]:
    """Yield one case for each form of a table and each of its base models."""
    number = 0
    for features, families in table:
        for family in families:
            yield Case(family, RANKS[number % 5], features, number)
            number += 1


def each_form(cases: Iterable[Case]) -> list[Case]:
    """Return one case for each form, of one of its base models in turn."""
    forms: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        forms.setdefault(tuple(feature.name for feature in case.features), []).append(case)
    return [found[number % len(found)] for number, found in enumerate(forms.values())]


def each_once() -> list[Case]:
    """Return cases in which every feature occurs once: served features together, refused features
    alone.
    """
    families, ranks = cycle(FAMILIES), cycle(RANKS)
    served, seen = [], set()
    while any(not seen.issuperset(features) for features in ACCEPTED.values()):
        chosen: list[Feature] = []
        for features in ACCEPTED.values():
            new = [f for f in features if f not in seen and all(map(f.fits, chosen))]
            chosen += new[:1]
        seen.update(chosen)
        served.append(_with_training(chosen))
    equal = [Case(next(families), next(ranks), f, seed) for seed, f in enumerate(served)]
    refused = [
        Case("llama", 4, _with_training([feature]), seed)
        for seed, feature in enumerate(REFUSED, len(equal))
    ]
    return equal + refused


def five_hundred() -> list[Case]:
    """Return each feature once, then random cases, three in ten of which have one refused
    feature.
    """
    random, cases = Random(_SEED), each_once()
    seen = set().union(*(case.pairs() for case in cases))
    refused = cycle(random.sample(REFUSED, len(REFUSED)))
    while len(cases) < COUNT:
        fault = [next(refused)] if len(cases) % 10 < 3 else []
        drawn = [_drawn(random, fault, len(cases)) for _ in range(_DRAWN)]
        best = max(drawn, key=lambda case: len(case.pairs() - seen))
        seen |= best.pairs()
        cases.append(best)
    return cases


def _drawn(random: Random, fault: Sequence[Feature], number: int) -> Case:
    """Draw a random case of features that fit each other.

    fault: refused features that the case has in any case.
    number: number of the case, its seed.
    """
    chosen = list(fault)
    for axis in random.sample(list(Axis), len(Axis)):
        fitting = [f for f in ACCEPTED[axis] if all(map(f.fits, chosen))]
        if fitting and random.random() < 0.8:
            chosen.append(random.choice(fitting))
    return Case(random.choice(list(FAMILIES)), random.choice(RANKS), _with_training(chosen), number)


def _with_training(chosen: Iterable[Feature]) -> tuple[Feature, ...]:
    features = list(chosen)
    if all(feature.axis is not Axis.TRAINING for feature in features):
        features.append(PLAIN)
    return tuple(sorted(features, key=lambda feature: feature.axis))
