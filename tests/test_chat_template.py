"""Reading a folder's chat template, and the warning when it differs from the base model's."""

import json
from pathlib import Path

import pytest

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
    ("served", "said"), [("b", "another chat template than llama"), (None, "has none: they are")]
)
def test_a_template_that_differs_from_the_base_models_causes_a_warning(
    served: str | None, said: str
) -> None:
    assert said in (template_warning("a", served, "llama") or "")
