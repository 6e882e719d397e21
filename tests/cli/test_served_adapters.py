"""Adapters given to `lorikeet serve`: names, base models, and registration again and again."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.cli.admin_client import AdminClient
from lorikeet.cli.serve.adapters import (
    CheckedAdapter,
    GivenAdapter,
    check_adapters,
    name_adapters,
    register_adapters,
)
from lorikeet.errors import InvalidAdapter, InvalidInput, LorikeetError
from lorikeet.gateway.services import ServedModel
from lorikeet_engine.adapter_format import AdapterLimits
from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import SHAPE, peft_folder

TINY = {"tiny": ServedModel(SHAPE)}
LIMITS = AdapterLimits(max_rank=16, max_bytes=2**20)
WIDE = replace(SHAPE, hidden=16)


def checked(
    lorikeet: Lorikeet, *given: str, models: Mapping[str, ServedModel] = TINY
) -> list[CheckedAdapter]:
    named = name_adapters(given)
    return check_adapters(named, "acme", models, LIMITS, lorikeet.catalog, quiet=True)


def serve(lorikeet: Lorikeet, *given: str) -> dict[str, str]:
    """Check and register adapters as one start does; return those that were refused."""
    lorikeet.catalog.reader.refresh()
    admin = AdminClient(lorikeet.url, lorikeet.admin_key)
    return register_adapters(checked(lorikeet, *given), "acme", admin, lambda _: None)


def versions(lorikeet: Lorikeet, name: str) -> tuple[int, int]:
    """Return the number of an adapter's versions, and the one that is prod."""
    answer = json.loads(lorikeet.do("show", f"acme/{name}", "--json"))
    return len(answer["versions"]), answer["aliases"]["prod"]


def trained_on(folder: Path, base_model: str | None) -> Path:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": base_model}))
    return folder


@pytest.mark.parametrize(
    ("folder", "name", "is_said"),
    [
        ("support", "support", False),
        ("Support Bot (v2)", "support-bot-v2", True),
        ("a..b", "a.b", True),
        ("_private_", "private", True),
        ("x" * 80, "x" * 64, True),
        ("run.tar.gz", "run", False),
    ],
)
def test_an_adapter_is_named_after_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, name: str, is_said: bool
) -> None:
    source = tmp_path / folder
    source.mkdir()
    assert name_adapters([str(source)]) == [GivenAdapter(name, str(source))]
    said = capsys.readouterr().err
    assert said == (f"{source} is named {name}.\n" if is_said else "")


def test_a_pattern_stands_for_several_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "a"):
        (tmp_path / "tuned" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for pattern in ("./tuned/*", f"{tmp_path}/tuned/?"):
        assert [adapter.name for adapter in name_adapters([pattern])] == ["a", "b"]


def test_a_name_is_given_in_front_of_its_source(tmp_path: Path) -> None:
    assert name_adapters([f"mine={tmp_path}"]) == [GivenAdapter("mine", str(tmp_path))]
    assert name_adapters(["mine=hf:acme/lora"]) == [GivenAdapter("mine", "hf:acme/lora")]
    assert name_adapters(["hf:acme/lora"]) == [GivenAdapter("lora", "hf:acme/lora")]
    with pytest.raises(InvalidInput, match="name='My One'"):
        name_adapters([f"My One={tmp_path}"])


def test_two_adapters_of_one_name_are_refused(tmp_path: Path) -> None:
    for run in ("one", "two"):
        (tmp_path / run / "final").mkdir(parents=True)
    given = [f"{tmp_path}/one/final", f"{tmp_path}/two/final"]
    with pytest.raises(InvalidInput, match=r"one/final and .*two/final are both named 'final'"):
        name_adapters(given)
    assert len(name_adapters([given[0], given[0]])) == 1


def test_a_folder_without_a_possible_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "適応").mkdir()
    with pytest.raises(InvalidInput, match=r"name it, as in my-adapter="):
        name_adapters([str(tmp_path / "適応")])


def test_new_adapters_are_registered_and_become_prod(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folders = [str(peft_folder(tmp_path / name, seed)) for seed, name in enumerate("ab")]
    assert serve(lorikeet, *folders) == {}
    assert versions(lorikeet, "a") == versions(lorikeet, "b") == (1, 1)


def test_unchanged_folders_register_nothing(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folder = str(peft_folder(tmp_path / "a"))
    serve(lorikeet, folder)
    before = lorikeet.catalog.reader.refresh().seq
    serve(lorikeet, folder)
    assert lorikeet.catalog.reader.refresh().seq == before


def test_a_changed_folder_is_a_new_version_and_prod(
    lorikeet: Lorikeet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = peft_folder(tmp_path / "a")
    serve(lorikeet, str(folder))
    shutil.rmtree(folder)
    serve(lorikeet, str(peft_folder(folder, seed=1)))
    assert versions(lorikeet, "a") == (2, 2)
    assert "Registered acme/a version 2, now prod." in capsys.readouterr().err


def test_a_rollback_survives_the_next_start(
    lorikeet: Lorikeet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = peft_folder(tmp_path / "a")
    serve(lorikeet, str(folder))
    shutil.rmtree(folder)
    serve(lorikeet, str(peft_folder(folder, seed=1)))
    lorikeet.do("rollback", "acme/a")
    serve(lorikeet, str(folder))
    assert versions(lorikeet, "a") == (2, 1)
    said = capsys.readouterr().err
    assert "acme/a: these weights are version 2, and prod is 1: `lorikeet promote acme/a@2`" in said


def test_what_the_server_refuses_is_reported_and_the_others_are_registered(
    lorikeet: Lorikeet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(peft_folder(tmp_path / name, seed)) for seed, name in enumerate("ab")]
    serve(lorikeet, folders[0])
    lorikeet.do("tenants", "limit", "acme", "--adapters", "2")
    third = str(peft_folder(tmp_path / "c", seed=3))
    refused = serve(lorikeet, *folders, third)
    assert list(refused) == ["c"]
    assert versions(lorikeet, "b") == (1, 1)
    assert f"{third} was not registered" in " ".join(capsys.readouterr().err.split())


def test_the_name_decides_between_base_models_of_one_shape(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    folder = trained_on(peft_folder(tmp_path / "a"), "acme/Two-Instruct")
    models = {"one": ServedModel(SHAPE), "Two-Instruct": ServedModel(SHAPE)}
    (adapter,) = checked(lorikeet, str(folder), models=models)
    assert (adapter.base.name, adapter.base.by_name) == ("Two-Instruct", True)


def test_shapes_decide_if_no_name_does_and_this_is_said(
    lorikeet: Lorikeet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained_on(peft_folder(tmp_path / "a"), "/home/me/checkpoint")
    models = {"wide": ServedModel(WIDE), "mine": ServedModel(SHAPE)}
    (adapter,) = checked(lorikeet, str(folder), models=models)
    assert adapter.base.name == "mine"
    said = " ".join(capsys.readouterr().err.split())
    assert "a: trained on '/home/me/checkpoint', and served on mine, whose shapes fit" in said


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"one": SHAPE, "two": SHAPE}, "'checkpoint', and fits one and two: leave it out here"),
        ({"wide": WIDE}, "'checkpoint', and does not fit wide: "),
    ],
)
def test_an_adapter_of_no_or_several_base_models_is_refused(
    lorikeet: Lorikeet, tmp_path: Path, models: dict[str, object], said: str
) -> None:
    folder = trained_on(peft_folder(tmp_path / "a"), "checkpoint")
    served = {name: ServedModel(shape) for name, shape in models.items()}  # type: ignore[arg-type]
    with pytest.raises(InvalidAdapter) as refused:
        checked(lorikeet, str(folder), models=served)
    assert refused.value.message.startswith(f"{folder}: it names the base model {said}")


def test_a_folder_without_a_config_is_refused(lorikeet: Lorikeet, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(LorikeetError, match=r"a: .*adapter_config\.json"):
        checked(lorikeet, str(folder))


def test_a_file_that_may_not_be_read_is_named(
    lorikeet: Lorikeet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = peft_folder(tmp_path / "a")

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied", str(folder / "adapter_config.json"))

    monkeypatch.setattr("lorikeet.cli.adapters.register.write_blob", refuse)
    with pytest.raises(LorikeetError, match=r"adapter_config\.json may not be read: `chmod"):
        checked(lorikeet, str(folder))
