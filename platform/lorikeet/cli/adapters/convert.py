"""The command convert: makes a PEFT folder of an adapter in an older format, offline."""

from pathlib import Path
from typing import Annotated

import typer

from lorikeet.cli.adapters.pickled import read_pickle
from lorikeet.cli.output import AsJson, print_answer
from lorikeet_engine.adapter_format import (
    BaseShape,
    has_trtllm_pair,
    read_json,
    read_trtllm_pair,
    write_peft_folder,
)

Source = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="A folder with adapter_model.bin or pytorch_model.bin, or with TensorRT-LLM's "
        "model.lora_weights.npy and model.lora_config.npy.",
        show_default=False,
    ),
]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="The PEFT folder to make.", show_default=False)
]


def convert(
    source: Source,
    out: Out,
    base_model: Annotated[
        Path | None,
        typer.Option(
            help="For TensorRT-LLM's tensors: the base model's folder, or its config.json.",
            exists=True,
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="For TensorRT-LLM's tensors: alpha, unless B is scaled already."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a PEFT folder of an adapter in an older format.

    No code in the old files is run, and no server is asked. `lorikeet register` takes the folder.

    Example: `lorikeet convert ./old-adapter ./my-adapter`
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise typer.BadParameter(f"{str(out)!r} exists already: give a new or empty folder")
    if has_trtllm_pair(source):
        if base_model is None:
            raise typer.BadParameter(
                "TensorRT-LLM's tensors do not hold their matrices' widths: give --base-model"
            )
        tensors, config = read_trtllm_pair(source, *_base(base_model), alpha)
    elif base_model is not None or alpha is not None:
        raise typer.BadParameter("--base-model and --alpha are for TensorRT-LLM's tensors only")
    else:
        tensors, config = read_pickle(source)
    write_peft_folder(out, tensors, config)
    made = {"folder": str(out), "linears": len(tensors) // 2}
    text = f"{made['folder']} is a PEFT folder now: {made['linears']} linears."
    print_answer(made, text, as_json)


def _base(path: Path) -> tuple[BaseShape, str]:
    """Read a base model's shape and name. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    return BaseShape.from_config(config), config.get("_name_or_path") or file.parent.name
