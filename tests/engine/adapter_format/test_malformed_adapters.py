"""More than 200 kinds of bad adapters: each refused by name, quickly, in little memory."""

import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorikeet_engine.adapter_format import check_values, read_spec
from lorikeet_engine.errors import AdapterError
from tests.engine.malformed import BLOB, LIMITS, SHAPE, Case, file_of, good_blob
from tests.engine.malformed_blobs import blob_cases
from tests.engine.malformed_folders import folder_cases

CASES = [*blob_cases(), *folder_cases()]
MOST_S, MOST_BYTES = 1.0, 200 * 10**6


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result and cost of each case, by name."""
    folder = tmp_path_factory.mktemp("malformed")
    for number, case in enumerate(CASES):
        (folder / f"{number:03}").mkdir()
        for name, data in case.files().items():
            (folder / f"{number:03}" / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.judge_adapters", str(folder)],
        cwd=Path(__file__).parents[3],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {CASES[int(verdict["name"])].name: verdict for verdict in found}


def test_there_are_200_kinds_and_no_two_are_the_same() -> None:
    assert len(CASES) >= 200
    assert len({case.name for case in CASES}) == len(CASES)
    contents = {
        hashlib.sha256(repr(sorted(case.files().items())).encode()).digest() for case in CASES
    }
    assert len(contents) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_malformed_adapter_is_refused_by_name_at_little_cost(
    case: Case, verdicts: dict[str, Any]
) -> None:
    verdict = verdicts[case.name]
    assert verdict["said"] is not None, "it was let in"
    assert re.search(case.says, verdict["said"]), verdict["said"]
    assert len(verdict["said"]) < 2_000
    assert verdict["cpu_s"] < MOST_S
    assert verdict["bytes"] < MOST_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_refused_or_harmless_but_never_raises_anything_else(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        data = bytearray(file_of(*good_blob(draw)))
        for _ in range(draw.randrange(1, 9)):
            at = draw.randrange(len(data) if draw.random() < 0.3 else 1500)
            data[at] = draw.choice([draw.randrange(256), data[at] ^ (1 << draw.randrange(8))])
        (tmp_path / BLOB).write_bytes(data)
        with contextlib.suppress(AdapterError):
            check_values(tmp_path / BLOB, read_spec(tmp_path / BLOB, SHAPE, LIMITS), "float32")
