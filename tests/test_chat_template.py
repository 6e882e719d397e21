"""Reading a folder's chat template, and the warning when it differs from the base model's."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from lorikeet import chat_template
from lorikeet.chat_template import template_digest, template_warning

ONE, OTHER = "{{ messages }}", "{{ messages | length }}"


def written(folder: Path, **files: object) -> Path:
    """Write a folder of these files: .jinja as text, .json as JSON unless it is text already."""
    folder.mkdir(exist_ok=True)
    for stem, content in files.items():
        ending = "jinja" if stem == "chat_template" else "json"
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem.removesuffix('_')}.{ending}").write_text(text)
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template": f"{ONE}\n"},
        {"chat_template": ONE, "tokenizer_config": {"chat_template": OTHER}},
        {"tokenizer_config": {"chat_template": ONE}},
        {
            "tokenizer_config": {
                "chat_template": [
                    {"name": "tool_use", "template": OTHER},
                    {"name": "default", "template": ONE},
                ]
            }
        },
        {"tokenizer_config": {}, "chat_template_": {"chat_template": ONE}},
    ],
)
def test_equal_templates_have_one_digest_in_every_file_they_are_kept_in(
    files: dict[str, object], tmp_path: Path
) -> None:
    want = template_digest(written(tmp_path / "want", chat_template=ONE))
    assert template_digest(written(tmp_path / "got", **files)) == want


@pytest.mark.parametrize(
    "config", [{}, {"chat_template": None}, {"chat_template": [1]}, [1], "no JSON", {"a": ONE}]
)
def test_a_folder_without_a_template_has_no_digest(config: object, tmp_path: Path) -> None:
    assert template_digest(written(tmp_path, tokenizer_config=config)) is None


def test_equal_templates_and_adapters_without_a_template_cause_no_warning() -> None:
    assert template_warning(None, "a", "llama") is None
    assert template_warning("a", "a", "llama") is None


@pytest.mark.parametrize(
    ("served", "said"), [("b", "another chat template than llama"), (None, "has none, so they are")]
)
def test_a_template_that_differs_from_the_base_models_causes_a_warning(
    served: str | None, said: str
) -> None:
    assert said in (template_warning("a", served, "llama") or "")


def test_a_file_that_is_no_regular_file_is_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    (tmp_path / "tokenizer_config.json").symlink_to("/dev/zero")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "a"}')
    assert template_digest(tmp_path) == hashlib.sha256(b"a").hexdigest()


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("a")
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "other")
    assert template_digest(tmp_path) == hashlib.sha256(b"a").hexdigest()


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_over_the_limit_is_skipped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_BYTES", 100)
    (tmp_path / name).write_text('{"chat_template": "' + "a" * 100 + '"}')
    assert template_digest(tmp_path) is None


def test_a_config_nested_too_deeply_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[" * 5000 + "]" * 5000)
    assert template_digest(tmp_path) is None
