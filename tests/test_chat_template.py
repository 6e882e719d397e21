"""Which chat template a folder has, and who is warned that it is not the base model's."""

import json
from pathlib import Path

import pytest

from lorikeet.chat_template import template_digest, template_warning

ONE, OTHER = "{{ messages }}", "{{ messages | length }}"


def written(folder: Path, **files: object) -> Path:
    """A folder of these files: .jinja as text, .json as JSON unless it is text already."""
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
def test_a_template_is_the_same_wherever_it_is_kept(
    files: dict[str, object], tmp_path: Path
) -> None:
    want = template_digest(written(tmp_path / "want", chat_template=ONE))
    assert template_digest(written(tmp_path / "got", **files)) == want


@pytest.mark.parametrize(
    "config", [{}, {"chat_template": None}, {"chat_template": [1]}, [1], "no JSON", {"a": ONE}]
)
def test_a_folder_may_have_none(config: object, tmp_path: Path) -> None:
    assert template_digest(written(tmp_path, tokenizer_config=config)) is None


def test_nobody_is_warned_where_the_templates_are_one_or_the_adapter_has_none() -> None:
    assert template_warning(None, "a", "llama") is None
    assert template_warning("a", "a", "llama") is None


@pytest.mark.parametrize(
    ("served", "said"), [("b", "another chat template than llama"), (None, "has none: they are")]
)
def test_a_difference_is_told(served: str | None, said: str) -> None:
    assert said in (template_warning("a", served, "llama") or "")
