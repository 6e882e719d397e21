"""Vocabularies of base models' and adapters' tokenizers, and a warning if the two differ.

Prompts and answers of an adapter are written by its base model's tokenizer, unless the adapter was
registered with its own. A trainer may have added tokens, and saved its own tokenizer beside the
adapter.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lorikeet.chat_template import bounded_text
from lorikeet.errors import InvalidInput

TOKENIZER_FILES = ("tokenizer.json", "added_tokens.json")
"""Names of files that hold a vocabulary; added_tokens.json counts only without tokenizer.json."""
MAX_TOKENIZER_BYTES = 64 << 20
"""Size limit in bytes of a file that holds a vocabulary; Gemma 3's tokenizer.json has 33 MB."""
MAX_ADDED = 16_384
"""Maximum number of added tokens that are compared; Gemma 3 has 6,415."""
SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
"""Names of special tokens in tokenizer_config.json, which chat templates use as variables."""
_MAX_CONFIG_BYTES = 8 << 20  # Gemma's tokenizer_config.json has 1.2 MB
_SHOWN = 3


class TokenizerVocabulary(NamedTuple):
    """Vocabulary of a tokenizer.

    trained: SHA-256 in hex of the vocabulary without added tokens; None if unknown.
    added: ids of added tokens, which are matched whole in a text, by token.
    """

    trained: str | None
    added: Mapping[str, int]


def read_vocabulary(folder: Path) -> TokenizerVocabulary | None:
    """Return the vocabulary of a folder's tokenizer; None if no file with a vocabulary can be read.

    Skips files larger than MAX_TOKENIZER_BYTES and files that are not regular.
    """
    for name in TOKENIZER_FILES:
        try:
            found = json.loads(bounded_text(folder / name, MAX_TOKENIZER_BYTES))
            if name == "added_tokens.json":
                return TokenizerVocabulary(None, _ids(found))
            added = {each["content"]: each["id"] for each in found.get("added_tokens") or ()}
            return TokenizerVocabulary(_digest(found["model"]["vocab"]), _ids(added))
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
            continue
    return None


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Return the tokenizer in an adapter's folder as JSON, for a registration: the digest of its
    vocabulary and merges, its added tokens, and the texts of its special tokens.

    Raises InvalidInput if there is no tokenizer.json, or if a file is too large or malformed.
    """
    try:
        found = json.loads(bounded_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES))
        fields = ("id", "content", "special", "single_word", "lstrip", "rstrip", "normalized")
        added = [{name: each[name] for name in fields} for each in found.get("added_tokens") or ()]
        model = model_digest(found["model"])
        file = folder / "tokenizer_config.json"
        config = json.loads(bounded_text(file, _MAX_CONFIG_BYTES)) if file.exists() else {}
        given = {name: config.get(name) for name in SPECIAL_TOKENS}
        special = {
            name: each["content"] if isinstance(each, Mapping) else each
            for name, each in given.items()
            if each is not None
        }
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"--use-tokenizer: the source has no tokenizer.json that can be read ({error}): save "
            "the fast tokenizer of the training there, with save_pretrained"
        ) from None
    return {"model": model, "added": added, "special_tokens": special}


def model_digest(model: Mapping[str, Any]) -> str:
    """Return the SHA-256 in hex of the vocabulary and the merges of a tokenizer.

    model: `model` of a tokenizer.json, in which merges are pairs, or texts with a space between
        both parts.
    """
    saved = model.get("merges") or ()
    merges = [each.split(" ") if isinstance(each, str) else each for each in saved]
    return hashlib.sha256(json.dumps([_digest(model["vocab"]), *merges]).encode()).hexdigest()


def vocabulary_warning(
    trained: TokenizerVocabulary | None, served: TokenizerVocabulary | None, base_model: str
) -> str | None:
    """Return a warning if an adapter's tokenizer has tokens that its base model's tokenizer lacks
    or numbers otherwise.

    The result is a clause without a full stop, or None.

    trained: vocabulary of the adapter's folder.
    served: vocabulary of the base model's folder.
    base_model: name of the base model.
    """
    if trained is None or served is None:
        return None
    writes = f"{base_model}'s tokenizer writes prompts and answers: if training used"
    if served.trained and trained.trained not in (None, served.trained):
        return (
            f"its folder's tokenizer has another vocabulary than {base_model}, and {writes} it, "
            "serve a copy of the base model's folder with the adapter's tokenizer under another "
            "name"
        )
    others = [token for token, at in trained.added.items() if served.added.get(token) != at]
    if not others:
        return None
    named = ", ".join(token[:40] for token in others[:_SHOWN])
    return (
        f"its folder's tokenizer has {len(others)} tokens that {base_model} lacks or numbers "
        f"otherwise ({named}{', …' if len(others) > _SHOWN else ''}), and {writes} them, register "
        "it with --use-tokenizer"
    )


def _digest(vocabulary: Any) -> str:
    """Return the SHA-256 in hex of a vocabulary: ids by token, or pairs of a token and a score."""
    pairs = (
        vocabulary
        if isinstance(vocabulary, Mapping)
        else {token: number for number, (token, _) in enumerate(vocabulary)}
    )
    return hashlib.sha256(json.dumps(sorted(pairs.items())).encode()).hexdigest()


def _ids(tokens: Any) -> Mapping[str, int]:
    """Return the mapping from token to id that `tokens` is. Raise ValueError if it is something
    else, or has more than MAX_ADDED tokens.
    """
    if not isinstance(tokens, Mapping) or len(tokens) > MAX_ADDED:
        raise ValueError(f"want at most {MAX_ADDED} added tokens")
    if not all(isinstance(each, str) and isinstance(at, int) for each, at in tokens.items()):
        raise ValueError("want ids by token")
    return tokens
