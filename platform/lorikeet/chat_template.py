"""Chat templates of base models and adapters, and a warning if the two differ.

Chats with an adapter are rendered by its base model's template. A trainer may have used another
template and saved it with the tokenizer beside the adapter.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
"""Files that may hold a template; the first that has one counts, as in transformers."""


def template_digest(folder: Path) -> str | None:
    """Return the SHA-256 in hex of a folder's stripped chat template; None without a template."""
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
    """Return a warning if an adapter's chats are rendered by another template than in training.

    The result is a clause without a full stop, or None.

    trained: template_digest of the adapter's folder.
    served: template_digest of the base model's folder.
    base_model: name of the base model.
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
    """Return the template in a tokenizer's config; of several named ones the default."""
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
