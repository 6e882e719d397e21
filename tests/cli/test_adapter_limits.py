"""A tenant's own limits: set by command, applied at registration, kept in snapshots."""

import hashlib
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import SHAPE, peft_folder


def register(lorikeet: Lorikeet, folder: Path, adapter: str = "acme/x") -> tuple[int, str]:
    result = lorikeet.run("register", str(folder), adapter)
    return result.exit_code, " ".join(result.stderr.split())


def test_a_tenants_own_limit_applies_below_the_services(lorikeet: Lorikeet, tmp_path: Path) -> None:
    lorikeet.do("tenants", "create", "globex")
    said = lorikeet.do("tenants", "limit", "acme", "--rank", "4")
    assert re.search(r"Rank +4 *\n *Bytes of an adapter +as the service", said)
    low, high = peft_folder(tmp_path / "low", rank=4), peft_folder(tmp_path / "high", rank=5)
    assert register(lorikeet, low)[0] == 0
    status, error = register(lorikeet, high)
    assert status == 1
    assert "has rank 5: the limit is 4" in error
    assert "(LORIKEET_MAX_RANK, or the tenant's own" in error
    assert "; 5 admits it)" in error
    assert register(lorikeet, high, "globex/x")[0] == 0
    lorikeet.do("tenants", "limit", "acme", "--rank", "none", "--adapter-bytes", "1KiB")
    error = register(lorikeet, high)[1]
    assert "bytes: the limit is 1024 (LORIKEET_MAX_ADAPTER_BYTES" in error
    lorikeet.do("tenants", "limit", "acme", "--rank", "none", "--adapter-bytes", "none")
    assert register(lorikeet, high)[0] == 0


def test_a_tenants_limit_above_the_services_does_not_raise_it(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    lorikeet.do("tenants", "limit", "acme", "--rank", "1000", "--adapter-bytes", "1TiB")
    status, error = register(lorikeet, peft_folder(tmp_path / "a", rank=17))
    assert (status, "the limit is 16" in error) == (1, True)


def test_copies_of_the_base_models_matrices_count_for_no_limit(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    folder = peft_folder(tmp_path / "copied")
    file = folder / "adapter_model.safetensors"
    matrix = np.ones((SHAPE.vocabulary, SHAPE.hidden), np.float32)
    save_file(load_file(file) | {"base_model.model.lm_head.weight": matrix}, file)
    lorikeet.do("tenants", "limit", "acme", "--adapter-bytes", str(file.stat().st_size))
    status, error = register(lorikeet, folder)
    assert (status, "lm_head.weight differs from tiny's" in error) == (1, True)
    lorikeet.engines.base_matrices.add(hashlib.sha256(matrix.tobytes()).hexdigest())
    assert register(lorikeet, folder)[0] == 0
    save_file(load_file(file) | {"base_model.model.lm_head.weight": matrix[1:]}, file)
    assert "set LORIKEET_MAX_ADAPTER_BYTES to the size" in register(lorikeet, folder)[1]
