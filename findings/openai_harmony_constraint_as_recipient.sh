#!/usr/bin/env bash
# openai-harmony 0.0.8 reads the type of a final message as its recipient.
#
# gpt-oss begins an answer in JSON by `<|channel|>final <|constrain|>json<|message|>`; the header of
# a tool call, `commentary to=functions.F <|constrain|>json`, has the same type behind the
# recipient. The parser gives the call the recipient functions.F and the content type
# `<|constrain|>json`. The final message, which names no recipient, gets the recipient
# `<|constrain|>json` and no content type. So a server that takes messages with a recipient for
# calls of tools loses the answer. One would guess the same content type and no recipient.
#
# Seen: recipient '<|constrain|>json', content type None. Needs npm, node, and python3 with venv.
# The vocabulary, which the package would download from OpenAI, is made of js-tiktoken's; the
# package compares its hash.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check openai-harmony==0.0.8
npm install --silent --no-audit --no-fund js-tiktoken@1.0.21
cat > vocabulary.cjs <<'NODE'
const { bpe_ranks } = require("js-tiktoken/ranks/o200k_base");
const lines = bpe_ranks.split("\n").filter(Boolean).flatMap((line) => {
  const [, first, ...tokens] = line.split(" ");
  return tokens.map((token, index) => [Number(first) + index, token]);
});
lines.sort((one, other) => one[0] - other[0]);
const text = lines.map(([rank, token]) => `${token} ${rank}\n`).join("");
require("fs").writeFileSync("o200k_base.tiktoken", text);
NODE
node vocabulary.cjs
TIKTOKEN_ENCODINGS_BASE=$folder venv/bin/python - <<'PYTHON'
"""Parses a call and an answer whose headers have the same type."""

from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def parsed(text):
    tokens = encoding.encode(text, allowed_special="all")
    (message,) = encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    return message.recipient, message.content_type


kind = " <|constrain|>json<|message|>{}"
called = parsed(f"<|channel|>commentary to=functions.f{kind}<|call|>")
final = parsed(f"<|channel|>final{kind}<|return|>")
print("call:  recipient %r, content type %r" % called)
print("final: recipient %r, content type %r" % final)
same = called == ("functions.f", "<|constrain|>json") and final == ("<|constrain|>json", None)
raise SystemExit(not same)
PYTHON
