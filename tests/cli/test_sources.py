"""An adapter is the same from every kind of source; invalid sources are refused by name."""

import gzip
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet.catalog.store.object_store import open_store
from lorikeet.cli.adapters.sources import check_source, open_source
from lorikeet.errors import InvalidInput, LorikeetError, StoreError
from lorikeet_engine.adapter_format import blob_digest, write_blob
from tests.cli.conftest import Lorikeet
from tests.cli.fake_hub import Hub, running_hub
from tests.cli.peft_folders import peft_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS, "tokenizer_config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A PEFT folder with other files of a training run beside the adapter."""
    made = peft_folder(tmp_path / "adapter")
    (made / "README.md").write_text("trained on a laptop")
    (made / "tokenizer_config.json").write_text("{}")  # it may have a chat template
    (made / "tokenizer.py").write_text("raise SystemExit('never run')")
    return made


def digest(folder: Path, tmp_path: Path) -> str:
    return write_blob(folder, tmp_path / "blob")


# A tar file.


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("inside", [".", "my-adapter", "runs/7/final"])
def test_a_tar_file_gives_the_same_adapter_as_its_folder(
    folder: Path, tmp_path: Path, mode: str, inside: str
) -> None:
    with tarfile.open(tmp_path / "a.tar", mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname=inside)
    with open_source(str(tmp_path / "a.tar")) as unpacked:
        assert {file.name for file in unpacked.iterdir()} == set(FILES)
        assert digest(unpacked, tmp_path) == digest(folder, tmp_path)
    assert not unpacked.exists()


@pytest.mark.parametrize("inside", ["", "output/"])
def test_of_a_trainers_output_with_checkpoints_the_outermost_adapter_is_taken(
    folder: Path, tmp_path: Path, inside: str
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    save_file({"x": np.zeros(1, np.float32)}, other / WEIGHTS)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in FILES:
            archive.write(other / name, f"{inside}checkpoint-5/{name}")
        for name in FILES:
            archive.write(folder / name, f"{inside}{name}")
    with open_source(str(tmp_path / "a.zip")) as unpacked:
        assert digest(unpacked, tmp_path) == digest(folder, tmp_path)


def test_an_archive_of_two_adapters_beside_each_other_is_refused_with_their_names(
    folder: Path, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for inside in ("out/checkpoint-5", "out/checkpoint-5/copy", "out/checkpoint-10"):
            tar.add(folder, inside)
    says = "several adapters, in out/checkpoint-10 and out/checkpoint-5"
    assert_refused(tmp_path / "a.tar", says)


def assert_refused(source: str | Path, says: str) -> None:
    """Assert that a source is refused with this message, a regular expression."""
    with pytest.raises(InvalidInput, match=says), open_source(str(source)):
        pass


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> object:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


def bomb() -> bytes:
    """A header that claims a size of a gigabyte."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    return info.tobuf()


def negative() -> bytes:
    """A member of negative size."""
    info = tarfile.TarInfo("x")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 11 + b"\x00"  # -256 in base 256
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ([member("../adapter_config.json")], "'../adapter_config.json' leads out"),
        ([member("a/../../x")], "'a/../../x' leads out"),
        ([member("/etc/passwd")], "'/etc/passwd' leads out"),
        ([member("x", tarfile.SYMTYPE, "/etc/passwd")], "'x' is neither a plain file"),
        ([member("x", tarfile.LNKTYPE, CONFIG)], "'x' is neither a plain file"),
        ([member("x", tarfile.FIFOTYPE)], "'x' is neither a plain file"),
        ([member("x", tarfile.CHRTYPE)], "'x' is neither a plain file"),
        ([member("x", tarfile.GNUTYPE_SPARSE)], "'x' is neither a plain file"),
        ([member(CONFIG)], "is there twice"),
        ([member(f"x{n}") for n in range(1000)], "1000 members"),
        ([member("x", size=9 << 30)], f"{8 << 30} bytes"),
        ([bomb()], "a header of 1073741824 bytes"),
        ([negative()], "can be read|neither a plain file"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_tar_file_with_a_suspicious_member_is_refused(
    folder: Path, tmp_path: Path, added: list[object], says: str
) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name in FILES:
            tar.add(folder / name, arcname=name)
        end = tar.offset
    blocks = [a if isinstance(a, bytes) else a.tobuf() for a in added]  # type: ignore[attr-defined]
    (tmp_path / "a.tar").write_bytes(plain.getvalue()[:end] + b"".join(blocks) + bytes(1024))
    assert_refused(tmp_path / "a.tar", says)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[: len(data) // 2], "can be read"),
        (lambda data: data[:2] + bytes(100), "can be read"),
        (lambda data: b"PK\3\4" + data, "no tar, tar.gz or zip file"),
        (lambda data: b"", "can be read"),
    ],
)
def test_a_damaged_archive_is_refused(
    folder: Path, tmp_path: Path, spoil: Callable[[bytes], bytes], says: str
) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, arcname=".")
    path.write_bytes(spoil(path.read_bytes()))
    assert_refused(path, says)


def test_added_tokens_in_an_archive_are_refused_not_lost(folder: Path, tmp_path: Path) -> None:
    (folder / "new_embeddings.safetensors").write_bytes(b"")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(folder, arcname=".")
    says = "new_embeddings.safetensors has embeddings of tokens that were added"
    assert_refused(tmp_path / "a.tar", says)


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ([], f"has no {CONFIG}"),
        ([CONFIG], f"has no {WEIGHTS}"),
        ([WEIGHTS], f"has no {CONFIG}"),
        ([CONFIG, "adapter_model.bin"], "lorikeet convert"),
    ],
)
def test_an_archive_without_an_adapter_names_the_missing_file(
    folder: Path, tmp_path: Path, kept: list[str], says: str
) -> None:
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in (*kept, "README.md"):
            tar.add(folder / name, arcname=name)
    assert_refused(tmp_path / "a.tar", says)


def test_a_lone_safetensors_file_is_refused_in_favour_of_its_folder(folder: Path) -> None:
    assert_refused(folder / WEIGHTS, "give the folder")


# A bucket.


@pytest.fixture
def bucket(s3_bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """s3://bucket/models, an allowed prefix, with the adapter under good/."""
    store = open_store(f"{s3_bucket}/models")
    for file in folder.iterdir():
        store.put_file(f"good/{file.name}", file)
    store.put_file(f"half/{CONFIG}", folder / CONFIG)
    monkeypatch.setenv("LORIKEET_IMPORT_FROM", f"s3://else/x, {s3_bucket}/models/")
    return f"{s3_bucket}/models"


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_prefix_of_a_bucket_gives_the_same_adapter_as_the_folder(
    bucket: str, folder: Path, tmp_path: Path, ending: str
) -> None:
    with open_source(f"{bucket}/good{ending}") as copied:
        assert {file.name for file in copied.iterdir()} == set(FILES)
        assert digest(copied, tmp_path) == digest(folder, tmp_path)


@pytest.mark.parametrize("beside", ["models-of-others/good", "good", "", "models/../good"])
def test_only_allowed_prefixes_are_read(bucket: str, beside: str) -> None:
    outside = f"{bucket.removesuffix('/models')}/{beside}"
    assert_refused(outside, "only from s3://else/x, s3://")


def test_no_bucket_is_read_before_one_is_allowed(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORIKEET_IMPORT_FROM")
    assert_refused(f"{bucket}/good", "from no bucket yet: set LORIKEET_IMPORT_FROM")


def test_a_prefix_without_an_adapter_names_the_missing_file(bucket: str) -> None:
    assert_refused(f"{bucket}/half", f"half has no {WEIGHTS}")


def test_a_missing_bucket_is_named(monkeypatch: pytest.MonkeyPatch, bucket: str) -> None:
    monkeypatch.setenv("LORIKEET_IMPORT_FROM", "s3://no-such-bucket")
    with pytest.raises((StoreError, InvalidInput)), open_source("s3://no-such-bucket/x"):
        pass


# A zip file.


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("inside", ["", "my-adapter/", "my-adapter\\"])
def test_a_zip_file_gives_the_same_adapter_as_its_folder(
    folder: Path, tmp_path: Path, packing: int, inside: str
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", packing) as archive:
        for file in folder.iterdir():
            archive.write(file, f"{inside}{file.name}")
    with open_source(str(tmp_path / "a.zip")) as unpacked:
        assert {file.name for file in unpacked.iterdir()} == set(FILES)
        assert digest(unpacked, tmp_path) == digest(folder, tmp_path)


def link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("x")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ([f"../{CONFIG}"], f"'../{CONFIG}' leads out"),
        ([f"..\\{CONFIG}"], f"'../{CONFIG}' leads out"),
        (["/etc/passwd"], "'/etc/passwd' leads out"),
        ([link()], "'x' is neither a plain file"),
        ([f"x{n}" for n in range(1000)], "1000 members"),
    ],
)
def test_a_zip_file_with_a_suspicious_member_is_refused(
    folder: Path, tmp_path: Path, added: list[str | zipfile.ZipInfo], says: str
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in FILES:
            archive.write(folder / name, name)
        for member in added:
            archive.writestr(member, "x")
    assert_refused(tmp_path / "a.zip", says)


def test_a_zip_files_member_is_read_only_up_to_its_stated_size(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / WEIGHTS, WEIGHTS)
        archive.writestr(CONFIG, b" " * 50_000_000)
    size = (50_000_000).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(size, (100).to_bytes(4, "little")))
    assert_refused(path, "zip file that can be read")


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_file_of_an_unbounded_compression_method_is_refused(
    folder: Path, tmp_path: Path, packing: int
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", packing) as archive:
        for name in FILES:
            archive.write(folder / name, name)
    assert_refused(tmp_path / "a.zip", "another method than deflate")


def test_a_zip_file_with_a_huge_list_of_members_is_refused(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in FILES:
            archive.write(folder / name, name)
        for number in range(100):
            archive.writestr(f"{number}-{'x' * 60_000}", "")
    assert_refused(tmp_path / "a.zip", r"header of 6\d{6} bytes")


# Shards, and what MLX saves, from everywhere.


@pytest.fixture(params=["shards", "mlx"])
def other(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, set[str]]:
    """The folder in another layout, and the names of the files that are read."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    if request.param == "mlx":
        names = {"A": "lora_a", "B": "lora_b"}
        turned = {
            f"{n.removeprefix('base_model.model.')[:-14]}.{names[n[-8]]}": t.T.copy()
            for n, t in tensors.items()
        }
        save_file(turned, folder / "adapters.safetensors")
        config = {"model": "tiny", "lora_parameters": {"rank": 4, "scale": 2.0}}
        (folder / CONFIG).write_text(json.dumps(config))
        return folder, {CONFIG, FILES[-1], "adapters.safetensors"}
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    return folder, {CONFIG, FILES[-1], f"{WEIGHTS}.index.json", *places.values()}


def test_other_layouts_are_read_completely_from_an_archive(
    other: tuple[Path, set[str]], tmp_path: Path
) -> None:
    folder, names = other
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(folder, arcname="it")
    with open_source(str(tmp_path / "a.tar.gz")) as unpacked:
        assert {file.name for file in unpacked.iterdir()} == names
        assert digest(unpacked, tmp_path) == digest(folder, tmp_path)


def test_shards_are_read_from_a_gzip_stream_in_its_order(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_back, seek = [], gzip.GzipFile.seek

    def watched(stream: gzip.GzipFile, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET and offset < seek(
            stream, 0, io.SEEK_CUR
        ):  # it is then unpacked from its beginning
            went_back.append(offset)
        return seek(stream, offset, whence)

    parts = [f"part-{number:02}.safetensors" for number in range(32)]
    index = {"weight_map": {name: name for name in parts}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).rename(folder / parts[0])
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name in [CONFIG, f"{WEIGHTS}.index.json", *reversed(parts)]:
            tar.add(folder / parts[0] if name in parts else folder / name, name)
    monkeypatch.setattr(gzip.GzipFile, "seek", watched)
    with open_source(str(tmp_path / "a.tar.gz")) as unpacked:
        assert {file.name for file in unpacked.iterdir()} >= set(parts)
    assert len(went_back) == 2  # to read the index, and to copy


def test_other_layouts_are_read_completely_from_a_bucket(
    other: tuple[Path, set[str]], tmp_path: Path, bucket: str
) -> None:
    folder, names = other
    for name in names:
        open_store(f"{bucket}/training/other").put_file(name, folder / name)
    with open_source(f"{bucket}/training/other") as copied:
        assert {file.name for file in copied.iterdir()} == names
        assert digest(copied, tmp_path) == digest(folder, tmp_path)


def test_other_layouts_are_read_completely_from_the_hub(
    lorikeet: Lorikeet, other: tuple[Path, set[str]], tmp_path: Path
) -> None:
    folder, names = other
    with running_hub({"acme/other": folder}) as hub:
        arguments = ["register", "hf:acme/other", "acme/support", "--json"]
        status, said, errors = command(lorikeet, hub.url, tmp_path / "home", *arguments)
        assert (status, errors) == (0, "")
        assert set(hub.fetched) == names
    assert json.loads(said)["digest"] == digest(folder, tmp_path)


@pytest.mark.parametrize("tensors", [1, 36_864], ids=["one", "of each expert"])
def test_a_missing_shard_is_named(tensors: int, folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(folder / f"{WEIGHTS}.index.json")
    names = (f"model.layers.0.mlp.experts.{n}.gate_proj.lora_A.weight" for n in range(tensors))
    index = {"weight_map": dict.fromkeys(names, "part-7.safetensors")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(folder, arcname=".")
    assert_refused(tmp_path / "a.tar", r"has no part-7\.safetensors")


# The Hugging Face Hub.


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[Hub]:
    pickled = peft_folder(tmp_path / "pickled")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    shutil.copytree(folder, tmp_path / "run" / "checkpoint-500")
    repositories = {
        "acme/lora": folder,
        "acme/old": pickled,
        "acme/run": tmp_path / "run",
        "meta/gated": folder,
    }
    with running_hub(repositories, gated=frozenset({"meta/gated"})) as running:
        yield running


def command(lorikeet: Lorikeet, hub: str, home: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command in its own process: the Hub's client reads HF_ENDPOINT on import."""
    done = subprocess.run(
        [sys.executable, "-c", "from lorikeet.cli import main; main()", *arguments],
        env=os.environ
        | {"LORIKEET_SERVER": lorikeet.url, "LORIKEET_ADMIN_KEY": lorikeet.admin_key}
        | {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, " ".join(done.stderr.split())


@pytest.mark.parametrize("revision", [[], ["--revision", "v1"]])
def test_only_the_adapters_files_of_a_hub_repository_are_fetched(
    lorikeet: Lorikeet, hub: Hub, folder: Path, tmp_path: Path, revision: list[str]
) -> None:
    arguments = ["register", "hf:acme/lora", "acme/support", "--json", *revision]
    status, said, errors = command(lorikeet, hub.url, tmp_path / "home", *arguments)
    assert (status, errors) == (0, "")
    assert json.loads(said)["digest"] == digest(folder, tmp_path)
    assert sorted(hub.fetched) == list(FILES)


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("acme/none", None, "hf:acme/none: there is no such repository, or it is private"),
        ("acme/lora", "v2", "hf:acme/lora at v2: there is no such revision"),
        ("meta/gated", None, "hf:meta/gated is gated: ask for access"),
        ("acme/old", None, "has its weights in adapter_model.bin, a pickle.*lorikeet convert"),
        ("acme/run", None, f"has no {CONFIG}: there are adapters in checkpoint-500"),
        ("acme/lora/x y", None, "want hf:organisation/name"),
    ],
)
def test_a_repository_that_the_hub_refuses_is_named_with_the_remedy(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, revision: str | None, says: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    with pytest.raises(LorikeetError, match=says), open_source(f"hf:{name}", revision):
        pass
    assert hub.fetched == []


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with (
        pytest.raises(
            LorikeetError, match=r"acme/lora could not be read: .*refused.*give the folder"
        ),
        open_source("hf:acme/lora"),
    ):
        pass


def test_without_the_hubs_client_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with (
        pytest.raises(LorikeetError, match="pip install huggingface_hub"),
        open_source("hf:acme/lora"),
    ):
        pass


# What is no source.


@pytest.mark.parametrize(
    ("source", "revision", "says"),
    [
        ("nowhere", None, "no folder or file 'nowhere'$"),
        ("acme/lora", None, "a repository of the Hugging Face Hub is hf:acme/lora"),
        ("./my-adapter", None, r"no folder or file './my-adapter'$"),
        ("/nowhere", None, "no folder or file '/nowhere'$"),
        ("https://example.com/a.tar", None, "download it and give the folder"),
        ("gs://bucket/x", None, "s3://bucket/prefix"),
        (".", "v1", "a revision is for hf:organisation/name only"),
    ],
)
def test_an_invalid_source_is_refused_with_valid_ones(
    source: str, revision: str | None, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_source(source, revision)


def test_an_invalid_source_is_wrong_usage(lorikeet: Lorikeet) -> None:
    for arguments in (["nowhere"], ["acme/lora"], [".", "--revision", "v1"]):
        source, *options = arguments
        assert lorikeet.run("register", source, "acme/support", *options).exit_code == 2


def test_a_tar_file_is_registered(lorikeet: Lorikeet, folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
        tar.add(folder, arcname="my-adapter")
    said = json.loads(lorikeet.do("register", str(tmp_path / "a.tgz"), "acme/support", "--json"))
    write_blob(folder, tmp_path / "blob")
    assert said["digest"] == blob_digest(tmp_path / "blob")
    assert said["gpu_bytes"] == 2 * 4 * (8 + 8) * 4  # two layers of rank 4, float32
