"""The two files of an adapter that are read; whatever lies beside them is left where it is."""

from collections.abc import Mapping

from lorikeet.errors import InvalidInput
from lorikeet_engine.adapter_format import CONFIG_FILE, WEIGHTS_FILE

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
MAX_SOURCE_BYTES = 8 << 30
_PICKLE = "adapter_model.bin"


def check_files(source: str, sizes: Mapping[str, int]) -> None:
    """Both files are there and of a size that an adapter can have. Raises InvalidInput.

    sizes: of the files there are beside each other, by name, in bytes.
    """
    if CONFIG_FILE in sizes and WEIGHTS_FILE not in sizes and _PICKLE in sizes:
        raise InvalidInput(
            f"{source} has its weights in {_PICKLE}, a pickle, which can run code when it is "
            "opened: download it and make safetensors of it with `lorikeet convert`"
        )
    for name in ADAPTER_FILES:
        if name not in sizes:
            raise InvalidInput(f"{source} has no {name}: want what save_pretrained wrote")
    total = sum(sizes[name] for name in ADAPTER_FILES)
    if total > MAX_SOURCE_BYTES:
        raise InvalidInput(f"{source} has {total} bytes: the limit is {MAX_SOURCE_BYTES}")
