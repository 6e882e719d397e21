#!/usr/bin/env bash
# transformers 5.24.0's continue_final_message eats more than the message's own trailing whitespace.
#
# With a chat template that trims content, as Llama's does, apply_chat_template cuts the prompt
# behind the last message and strips the whitespace before the cut. So "Well" and "Well  \n" give
# the same prompt, although the second asks to go on after a line end. And where the message is
# empty, the strip reaches the template's own text: the line end behind the assistant's header is
# lost, so the prompt differs from that of add_generation_prompt, which a model was trained on.
# One would guess that a continued prompt ends with the message as it was given.
#
# Seen: three prompts that end in 'Well', 'Well' and 'assistant:', instead of 'assistant:\n'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3 transformers==5.24.0 jinja2==3.1.6
cd "$folder" && venv/bin/python - <<'PYTHON'
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
tokenizer.chat_template = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
user = {"role": "user", "content": "Hi"}


def prompt(*said, **how):
    turns = [user, *({"role": "assistant", "content": text} for text in said)]
    return tokenizer.apply_chat_template(turns, tokenize=False, **how)


begun = prompt(add_generation_prompt=True)
ends = [prompt(text, continue_final_message=True) for text in ("Well", "Well  \n", "")]
print("opened:", repr(begun), "continued:", ends)
assert begun == "user:\nHi\nassistant:\n", begun
assert ends == [begun + "Well", begun + "Well", begun.rstrip()], ends
PYTHON
echo "as described"
