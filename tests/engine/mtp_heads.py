"""Checkpoints with a head for multi-token prediction (MTP), and the head computed by itself."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

_FILE, _HEAD = "model.safetensors", "mtp."


def with_head(checkpoint: Path, folder: Path, *, right: bool = False) -> Path:
    """Copy a checkpoint of Qwen's hybrids and add a random MTP head; return the folder.

    right: whether most of the head's predictions come true: layers of model and head change hidden
        states little, so the next token depends mostly on the last one, whose embedding the head
        reads.
    """
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / _FILE)
    random = torch.Generator().manual_seed(7)
    config = transformers.AutoConfig.from_pretrained(folder)
    attends = config.layer_types.index("full_attention")
    layer = f"model.layers.{attends}."
    for name, tensor in list(tensors.items()):
        if right and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= 5e-4
        if name.startswith(layer):
            values = torch.randn(tensor.shape, generator=random) * tensor.std()
            tensors[f"mtp.layers.0.{name.removeprefix(layer)}"] = values
    width = config.hidden_size
    fc = torch.randn(width, 2 * width, generator=random) / width**0.5
    if right:
        fc = torch.cat([torch.eye(width), torch.zeros(width, width)], 1) + 0.02 * fc
    tensors["mtp.fc.weight"] = fc
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = torch.randn(width, generator=random) * 0.1 * (not right)
    if right:
        tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    return folder


def head_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the head's logits [tokens − 1, vocab] in float32: row t is of token t + 2.

    The model is transformers', and so is the class of the head's layer; transformers has no head.
    """
    of_head = {n: v for n, v in load_file(folder / _FILE).items() if n.startswith(_HEAD)}
    model = _model(folder)
    eps, decoder = model.config.rms_norm_eps, model.model
    attends = model.config.layer_types.index("full_attention")
    with TemporaryDirectory() as other:
        moved = {
            n.replace(f"{_HEAD}layers.0.", f"model.layers.{attends}."): v
            for n, v in of_head.items()
        }
        shutil.copytree(folder, other, dirs_exist_ok=True)
        save_file(load_file(folder / _FILE) | moved, Path(other) / _FILE, metadata={"format": "pt"})
        layer = _model(Path(other)).model.layers[attends]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], 1.0 + of_head[f"{_HEAD}{name}.weight"], eps)

    with torch.inference_mode():
        tokens = torch.tensor([ids])
        hidden = decoder(tokens).last_hidden_state[:, :-1]
        embedded = decoder.embed_tokens(tokens[:, 1:])
        parts = norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")
        x = torch.cat(parts, -1) @ of_head[f"{_HEAD}fc.weight"].T
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turns = decoder.rotary_emb(x, positions)
        x = layer(x, position_embeddings=turns, attention_mask=mask, position_ids=positions)
        return model.lm_head(norm(x, "norm"))[0]


def _model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
