"""Base models of every family, each with an engine, a plain adapter and reference results."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.corpus.bases import Base
from tests.corpus.draft import Draft
from tests.corpus.reference import Reference, reference
from tests.corpus.register import register
from tests.corpus.served import ServedBase
from tests.corpus.table import PLAIN


@dataclass(frozen=True, slots=True)
class Stand:
    """Base model, engine and references on which the cases of one family are tried.

    beside: a plain adapter that is part of every batch.
    """

    base: Base
    served: ServedBase
    beside: Draft
    beside_blob: Path
    plain_reference: Reference
    base_reference: Reference


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stand]]:
    """Return a function that makes the stand of a family, once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads would only spin over small tensors
    stands: list[Stand] = []

    @functools.cache
    def make(family: str) -> Stand:
        folder = tmp_path_factory.mktemp(family)
        base = Base.save(family, folder / "model")
        beside = Draft(base, folder, rank=8, seed=1)
        PLAIN.build(beside)
        beside.keep_truth()
        references = reference(base, beside.truth), reference(base)
        served = ServedBase(base, folder)
        stands.append(Stand(base, served, beside, register(beside), *references))
        return stands[-1]

    yield make
    for each in stands:
        each.served.close()
    torch.set_num_threads(threads)


@pytest.fixture
def draft_of(stand: Callable[[str], Stand], tmp_path: Path) -> Callable[..., Draft]:
    """Return a function that makes an empty draft."""
    numbers = itertools.count()

    def make(family: str = "llama", rank: int = 4, seed: int = 0) -> Draft:
        scratch = tmp_path / str(next(numbers))
        scratch.mkdir()
        return Draft(stand(family).base, scratch, rank, seed)

    return make
