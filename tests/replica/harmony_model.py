"""A model folder in Harmony: the demo's tokenizer with gpt-oss' marks, template and ends."""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

MARKS = (
    *("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
    *("<|call|>", "<|endoftext|>"),
)
ENDS = ("<|return|>", "<|endoftext|>", "<|call|>")
TEMPLATE = (Path(__file__).parent / "chat_templates" / "gpt-oss.jinja").read_text()
DEMO = Path("demo/model")


def harmony_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Write the folder; return it."""
    folder.mkdir(exist_ok=True)
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    ends = [tokenizer.token_to_id(mark) for mark in ENDS]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder
