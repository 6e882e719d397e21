"""Files of an adapter: containers, files beside it, and broken files."""

import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from lorikeet.cli.adapters.pickled import read_pickle
from lorikeet_engine.adapter_format import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    write_peft_folder,
)
from tests.corpus.draft import Draft
from tests.corpus.features import EQUAL, Axis, Build, Feature

_PICKLE = "adapter_model.bin"
_NO_WEIGHTS = f"has no {WEIGHTS_FILE}"
_NO_CONFIG = f"has no {CONFIG_FILE}"


def _files(name: str, build: Build, says: str = EQUAL) -> Feature:
    """Feature that applies to any trainer's files."""
    return Feature(name, Axis.FILES, build, says)


def _weights(name: str, build: Build, says: str = EQUAL) -> Feature:
    """Feature that needs PEFT's weights file, which other tools may not write."""
    return Feature(name, Axis.FILES, build, says, frozenset({Axis.TOOL}))


def _beside(*names: str) -> Build:
    """Put unrelated files beside the adapter's."""

    def build(draft: Draft) -> None:
        for name in names:
            path = draft.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"\x80\x04}" if name.endswith((".bin", ".pt", ".pth")) else b"{}")

    return build


def _packed(
    pack: Callable[[Path, Iterable[tuple[Path, str]]], object], ending: str, at: str = ""
) -> Build:
    """Put the adapter's files into an archive.

    pack: writes an archive of files, each with its name in the archive.
    ending: ending of the archive's name.
    at: folder in the archive, with a slash; empty for its top.
    """

    def build(draft: Draft) -> None:
        draft.source = draft.scratch / f"my-adapter{ending}"
        files = sorted(path for path in draft.folder.iterdir() if path.is_file())
        pack(draft.source, [(path, at + path.name) for path in files])

    return build


def _zip_of_windows(archive: Path, files: Iterable[tuple[Path, str]]) -> None:
    """Write backslashes in names, as PowerShell 5 does."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path, name in files:
            out.write(path, name.replace("/", "\\"))


def _zip(archive: Path, files: Iterable[tuple[Path, str]]) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path, name in files:
            out.write(path, name)
            out.writestr(f"__MACOSX/._{path.name}", b"\0\5\x16\7")  # added by the Finder of a Mac


def _tar(mode: str) -> Callable[[Path, Iterable[tuple[Path, str]]], None]:
    def pack(archive: Path, files: Iterable[tuple[Path, str]]) -> None:
        with tarfile.open(archive, mode) as out:  # type: ignore[call-overload]
            for path, name in files:
                out.add(path, name)

    return pack


def _two_in_one(draft: Draft) -> None:
    """Put two checkpoints into one archive."""
    draft.source = draft.scratch / "output.tar.gz"
    with tarfile.open(draft.source, "w:gz") as out:
        for place in ("output/checkpoint-500", "output/checkpoint-1000"):
            out.add(draft.folder, place)


def _whole_output(draft: Draft) -> None:
    """Put a trainer's folder, with a checkpoint of other weights in it, into an archive."""
    draft.source = draft.scratch / "output.tar.gz"
    with tarfile.open(draft.source, "w:gz") as out:
        out.add(draft.folder, "output/checkpoint-500", filter=_without_weights)
        out.add(draft.folder, "output")


def _without_weights(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith(".safetensors") else member


def _in_shards(draft: Draft) -> None:
    """Split the weights in two shards, as accelerate and huggingface_hub do with large files."""
    tensors, places = draft.tensors(), {}
    for number in range(2):
        file = f"adapter_model-{number + 1:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[number::2])
        save_file(part, draft.folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (draft.folder / WEIGHTS_FILE).unlink()
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (draft.folder / INDEX_FILE).write_text(json.dumps(index))


def _without_a_shard(draft: Draft) -> None:
    _in_shards(draft)
    (draft.folder / "adapter_model-00002-of-00002.safetensors").unlink()


def _linked(draft: Draft) -> None:
    """Replace files by links to blobs, as in the Hub's cache."""
    blobs = draft.scratch / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(draft.folder.iterdir())):
        if path.is_file():
            path.rename(blobs / f"{number:064}")
            path.symlink_to(os.path.relpath(blobs / f"{number:064}", draft.folder))


def _tar_of_links(draft: Draft) -> None:
    """Put the Hub's cache into an archive with its links."""
    _linked(draft)
    _packed(_tar("w:"), ".tar")(draft)


def _of_zstandard(draft: Draft) -> None:
    draft.source = draft.scratch / "my-adapter.tar.zst"
    draft.source.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))


def _pickled(draft: Draft) -> None:
    """Save a pickle, as PEFT 0.2 did."""
    torch.save(draft.tensors(), draft.folder / _PICKLE)
    (draft.folder / WEIGHTS_FILE).unlink()


def _converted(draft: Draft) -> None:
    """Save a pickle that `lorikeet convert` is to read."""
    _pickled(draft)
    draft.convert = lambda out: write_peft_folder(out, *read_pickle(draft.folder))


def _both(draft: Draft) -> None:
    """Leave an older pickle beside the safetensors file."""
    torch.save({n: torch.zeros_like(t) for n, t in draft.tensors().items()}, draft.folder / _PICKLE)


def _with_metadata(draft: Draft) -> None:
    """Write metadata into the weights file, as diffusers and others do."""
    notes = {"format": "pt", "lora_adapter_metadata": '{"r": 999}', "ss_network_dim": "999"}
    save_file(draft.tensors(), draft.folder / WEIGHTS_FILE, notes)


def _in_a_folder(name: str) -> Build:
    """Give register the parent of the adapter's folder."""

    def build(draft: Draft) -> None:
        draft.source = draft.scratch / "output"
        shutil.copytree(draft.folder, draft.source / name)

    return build


def _with_checkpoints(draft: Draft) -> None:
    """Leave earlier checkpoints, which are other adapters, in folders beside it."""
    for step in (1, 2):
        checkpoint = draft.folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 999}')


def _only(name: str) -> Build:
    """Leave only one file, under another name."""

    def build(draft: Draft) -> None:
        for path in [path for path in draft.folder.iterdir() if path.name != CONFIG_FILE]:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        (draft.folder / name).write_bytes(b"GGUF\3\0\0\0")

    return build


def _merged(draft: Draft) -> None:
    """Replace the adapter by a whole model into which it was merged."""
    shutil.rmtree(draft.folder)
    draft.base.model().save_pretrained(draft.folder)


def _file(draft: Draft) -> None:
    draft.source = draft.folder / WEIGHTS_FILE


def _removed(name: str) -> Build:
    return lambda draft: (draft.folder / name).unlink()


def _bytes(change: Callable[[bytes], bytes]) -> Build:
    """Feature that corrupts the bytes of the weights file."""

    def build(draft: Draft) -> None:
        path = draft.folder / WEIGHTS_FILE
        path.write_bytes(change(path.read_bytes()))

    return build


def _header(change: Callable[[dict[str, dict[str, object]]], object]) -> Build:
    """Feature that changes the header of the weights file."""

    def rewrite(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return _bytes(rewrite)


def _last(header: dict[str, dict[str, object]]) -> dict[str, object]:
    return max(
        (entry for name, entry in header.items() if name != "__metadata__"),
        key=lambda entry: entry["data_offsets"],  # type: ignore[arg-type,return-value]
    )


FILES: tuple[Feature, ...] = (
    # axolotl-ai-cloud/axolotl 9c9c224, src/axolotl/train.py, and hiyouga/LLaMA-Factory b230bbb,
    # src/llamafactory/train/callbacks.py, leave these around what PEFT saves.
    _files(
        "a trainer's papers",
        _beside("README.md", "config.json", "tokenizer.json", "trainer_log.jsonl", "debug.log"),
    ),
    # modelscope/ms-swift 4d8ab34, swift/tuners/peft.py.
    _files("ms-swift's papers", _beside("additional_config.json", "args.json")),
    _files(
        "a checkpoint's state",
        _beside("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"),
    ),
    _files("checkpoints in folders", _with_checkpoints),
    _files("links into the Hub's cache", _linked),
    _files("a .zip", _packed(_zip, ".zip")),
    _files("a .zip of a folder", _packed(_zip, ".zip", "my-adapter/")),
    _files("a .zip of Windows", _packed(_zip_of_windows, ".zip", "my-adapter/")),
    _files("a .tar", _packed(_tar("w:"), ".tar")),
    _files("a .tar.gz of a folder", _packed(_tar("w:gz"), ".tar.gz", "./out/my-adapter/")),
    _files("a .tar.gz of a trainer's whole output", _whole_output),
    _weights("shards", _in_shards),
    _weights("a pickle, converted", _converted),
    _weights("an older pickle beside it", _both),
    _weights("notes in the metadata", _with_metadata),
    # Refused files.
    _weights("a pickle", _pickled, f"{_PICKLE} is a pickle"),
    # foundation-model-stack/fms-hf-tuning, its scripts/post_process_adapters_vLLM.py.
    _weights("tokens added, for vLLM", _beside("new_embeddings.safetensors"), "were added: train"),
    _weights("without a shard", _without_a_shard, "has no adapter_model-00002-of-00002"),
    _files("a .tar.bz2", _packed(_tar("w:bz2"), ".tar.bz2"), "no tar, tar.gz or zip file"),
    _files("a .tar.zst", _of_zstandard, "no tar, tar.gz or zip file"),
    _files("a .tar of links", _tar_of_links, "is neither a plain file nor a folder"),
    _files("an archive of two", _two_in_one, "holds several adapters"),
    _weights("the file alone", _file, "give the folder that it is in"),
    _files("in a folder by its name", _in_a_folder("support"), f"{_NO_CONFIG}.*output/support"),
    _files("in a checkpoint", _in_a_folder("checkpoint-500"), f"{_NO_CONFIG}.*checkpoint-500"),
    _files("without a config", _removed(CONFIG_FILE), _NO_CONFIG),
    _weights("without weights", _removed(WEIGHTS_FILE), _NO_WEIGHTS),
    _files("a whole model", _merged, _NO_CONFIG),
    _files("GGUF", _only("adapter.gguf"), _NO_WEIGHTS),
    _files("MLX of 2024", _only("adapters.npz"), _NO_WEIGHTS),
    _weights(
        "a pointer of Git LFS for weights",
        _bytes(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"),
        "git lfs pull",
    ),
    _weights("an empty file", _bytes(lambda _: b""), "not a safetensors file"),
    _weights("cut in the header", _bytes(lambda data: data[:100]), "not a safetensors file"),
    _weights("cut in the tensors", _bytes(lambda data: data[:-100]), "truncated"),
    _weights("bytes behind", _bytes(lambda data: data + b"\0" * 8), "bytes after the last tensor"),
    _weights(
        "a header that claims more",
        _header(lambda header: _last(header).update(shape=[4096, 4096])),
        "bytes for",
    ),
    _weights(
        "tensors that overlap",
        _header(lambda header: _last(header).update(data_offsets=[0, 4], shape=[1])),
        "overlaps another tensor|bytes for",
    ),
    _weights(
        "an unknown dtype", _header(lambda header: _last(header).update(dtype="F4")), "convert it"
    ),
)
