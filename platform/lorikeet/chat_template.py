"""Which chat template a model's or an adapter's folder has, and whether the two are one.

Chats with an adapter are written by its base model's template. A trainer may have used another: it
saves its tokenizer, with the template, beside the adapter.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
"""Where a template may be; the first that has one counts, as in transformers."""


def template_digest(folder: Path) -> str | None:
    """SHA-256 of a folder's chat template without blanks around it, as hex; None if it has none."""
    for name in TEMPLATE_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8")
            template = text if name.endswith(".jinja") else _default(json.loads(text))
        except (OSError, ValueError):
            continue
        if template is not None:
            return hashlib.sha256(template.strip().encode()).hexdigest()
    return None


def template_warning(trained: str | None, served: str | None, base_model: str) -> str | None:
    """Warn of an adapter whose chats are not written as in training.

    trained, served: template_digest of its folder and of its base model's. Return a clause without
    a full stop; None where there is nothing to warn of.
    """
    if trained in (None, served):
        return None
    if served is None:
        return (
            f"its folder has a chat template, and {base_model}, by whose template chats with it "
            "are written, has none: they are refused until there is a chat_template.jinja in the "
            "base model's folder"
        )
    return (
        f"its folder has another chat template than {base_model}, by whose template chats with it "
        "are written: compare a prompt of both, and if they differ, serve a copy of the base "
        "model's folder with the adapter's chat_template.jinja under another name, or write "
        "prompts yourself for /v1/completions"
    )


def _default(config: Any) -> str | None:
    """The template in a tokenizer's config, which may be one of several by name."""
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
