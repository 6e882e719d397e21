"""Selection of an adapter's files in a source; no other files are copied."""

from collections.abc import Callable, Mapping

from lorikeet.chat_template import MAX_TEMPLATE_BYTES, TEMPLATE_FILES
from lorikeet.errors import InvalidInput
from lorikeet.tokenizer_vocabulary import MAX_TOKENIZER_BYTES, TOKENIZER_FILES
from lorikeet_engine.adapter_format import (
    CONFIG_FILE,
    EMBEDDING_FILES,
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MLX_WEIGHTS_FILE,
    WEIGHTS_FILE,
    pickled_weights,
    refuse_added_tokens,
    shard_names,
)
from lorikeet_engine.errors import AdapterRejected

KNOWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, MLX_WEIGHTS_FILE, INDEX_FILE)
"""Files that mark a folder as an adapter's: any one suffices. The index names the shards."""
BASE_CONFIG_FILE = "config.json"
MAX_SOURCE_BYTES = 8 << 30


def adapter_files(
    source: str, sizes: Mapping[str, int], read: Callable[[str], bytes]
) -> tuple[str, ...]:
    """Return the names of the files to copy: the adapter's config and weights (one file, or an
    index and shards), and those of the following that exist and are not too large: files of chat
    template and tokenizer, the base model's config, and files that say how texts are embedded.

    source: name of the source, for errors.
    sizes: bytes of all files of the folder, by name.
    read: returns the content of a small file.

    Raises InvalidInput if config or weights are missing or too large, or if a file is of a refused
    kind, such as pickled weights.
    """
    try:
        refuse_added_tokens(sizes)
    except AdapterRejected as error:
        raise InvalidInput(f"{source}: {error.message}") from error
    for weights in (WEIGHTS_FILE, MLX_WEIGHTS_FILE):
        if weights in sizes:
            return _checked(source, sizes, (CONFIG_FILE, weights))
    if INDEX_FILE in sizes:
        if sizes[INDEX_FILE] > MAX_INDEX_BYTES:
            raise InvalidInput(f"{source}: {INDEX_FILE} is over {MAX_INDEX_BYTES} bytes")
        try:
            shards = shard_names(read(INDEX_FILE))
        except AdapterRejected as error:
            raise InvalidInput(f"{source}: {error.message}") from error
        return _checked(source, sizes, (CONFIG_FILE, INDEX_FILE, *shards))
    pickles = pickled_weights(sizes)
    if CONFIG_FILE in sizes and pickles:
        raise InvalidInput(
            f"{source} has its weights in {pickles[0]}, a pickle, which can run code when it is "
            "opened: download it and make safetensors of it with `lorikeet convert`"
        )
    return _checked(source, sizes, (CONFIG_FILE, WEIGHTS_FILE))


def _checked(source: str, sizes: Mapping[str, int], names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in sizes:
            raise InvalidInput(f"{source} has no {name}: {_instead(sizes)}")
    total = sum(sizes[name] for name in names)
    if total > MAX_SOURCE_BYTES:
        raise InvalidInput(f"{source} has {total} bytes: the limit is {MAX_SOURCE_BYTES}")
    limits = dict.fromkeys(TEMPLATE_FILES, MAX_TEMPLATE_BYTES)
    limits |= dict.fromkeys(TOKENIZER_FILES, MAX_TOKENIZER_BYTES)
    limits |= dict.fromkeys((BASE_CONFIG_FILE, *EMBEDDING_FILES), MAX_TEMPLATE_BYTES)
    beside = (name for name, limit in limits.items() if sizes.get(name, limit + 1) <= limit)
    return (*names, *beside)


def _instead(sizes: Mapping[str, int]) -> str:
    """Suggest another source, for the error about a source without an adapter.

    sizes: size in bytes of each file by name, including files in subfolders.
    """
    ending = f"/{CONFIG_FILE}"
    inside = sorted(name.removesuffix(ending) for name in sizes if name.endswith(ending))
    if inside:
        return f"there are adapters in {', '.join(inside[:3])}: download one and give its folder"
    return "want a folder that save_pretrained wrote"
