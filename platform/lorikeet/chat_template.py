"""Chat templates of base models and adapters, and a warning if the two differ.

Chats with an adapter are rendered by its base model's template, unless the adapter was registered
with its own. A trainer may have used another template and saved it with the tokenizer beside the
adapter.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
"""Names of files that may hold a template; the first file with a template counts, as in
transformers.
"""
MAX_TEMPLATE_BYTES = 8 << 20
"""Size limit in bytes of a file that may hold a template; Gemma's tokenizer_config.json has
1.2 MB.
"""


def template_digest(folder: Path) -> str | None:
    """Return the SHA-256 in hex of the chat template in a model's or an adapter's folder.

    Space around the template does not count. None: there is no template.
    """
    template = read_template(folder)
    return None if template is None else hashlib.sha256(template.strip().encode()).hexdigest()


def read_template(folder: Path) -> str | None:
    """Return a folder's chat template; None without a template.

    Skips files larger than MAX_TEMPLATE_BYTES, and files that are not regular.
    """
    for name in TEMPLATE_FILES:
        try:
            text = bounded_text(folder / name, MAX_TEMPLATE_BYTES)
            template = text if name.endswith(".jinja") else _default(json.loads(text))
        except (OSError, ValueError, RecursionError):
            continue
        if template is not None:
            return template
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
            "are written, has none, so they are refused: register it with --use-chat-template"
        )
    return (
        f"its folder has another chat template than {base_model}, by whose template chats with it "
        "are written: if training used the folder's, register it with --use-chat-template"
    )


def bounded_text(path: Path, max_bytes: int) -> str:
    """Return the text of a regular file.

    Raises ValueError if the file is not regular, is larger than `max_bytes` or is no text, and
    OSError if it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} is over {max_bytes} bytes")
    return content.decode()


def _default(config: Any) -> str | None:
    """Return the template in a tokenizer's config; of several named templates, the default one."""
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
