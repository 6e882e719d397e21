"""What the gateway knows of the base models: their shapes, from their config.json."""

from collections.abc import Mapping
from pathlib import Path

from lorikeet.api.services import BaseModel
from lorikeet.errors import InvalidSetting
from lorikeet_engine.adapter_format import BaseShape, read_json
from lorikeet_engine.errors import ModelError


def read_base_models(folders: Mapping[str, Path]) -> dict[str, BaseModel]:
    """Read every folder's config.json. Raises InvalidSetting, naming the folder.

    An adapter may call its base model by the served name, the folder's, or the one in config.json.
    """
    return {name: _read(folder) for name, folder in folders.items()}


def _read(folder: Path) -> BaseModel:
    try:
        config = read_json(folder / "config.json")
        shape = BaseShape.from_config(config)
    except ModelError as error:
        raise InvalidSetting(
            f"LORIKEET_BASE_MODELS: {folder} is no Hugging Face model folder that can be served: "
            f"{error}"
        ) from error
    return BaseModel(shape, tuple(filter(None, (folder.name, config.get("_name_or_path")))))
