"""Sampling defaults of adapters, and of a base model's folder, in generation_config.json."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lorikeet.apis.fields import AnyTopK, MinP, RepetitionPenalty, Temperature, TopP
from lorikeet.errors import InvalidSetting

_FILE = "generation_config.json"


class SamplingDefaults(BaseModel):
    """Defaults of a request's fields, as keys of generation_config.json, read as vLLM reads them.

    `do_sample` is ignored, as by vLLM and SGLang: a request is greedy at temperature 0.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: AnyTopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None

    def values(self) -> Mapping[str, int | float]:
        """Return the values that are set, by the name of the request's field."""
        values: dict[str, int | float] = self.model_dump(exclude_none=True)
        return values


def read_sampling_defaults(folder: Path) -> Mapping[str, int | float]:
    """Return the sampling defaults of a base model, by the name of the request's field; {} without
    generation_config.json.

    folder: folder of the base model.

    Raises InvalidSetting for a value that no request could have.
    """
    file = folder / _FILE
    if not file.exists():
        return {}
    try:
        found = SamplingDefaults.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise InvalidSetting(
            f"{file}: {where}: {problem['msg']}: correct it, or set "
            "LORIKEET_GENERATION_CONFIG=none, which uses no defaults of the file"
        ) from error
    return found.values()
