#!/usr/bin/env bash
# llguidance 1.9.1 lets a property's value escape its schema if the name is spelt with \u.
#
# A schema's `properties` hold the value of "a"; other names may have any value unless
# additionalProperties says otherwise. JSON may spell a as \u0061, and llguidance takes such a name
# for another one: the text is accepted, and parses to an "a" that breaks the schema, also behind a
# right "a", which it then replaces. Strings in values cannot be spelt so, nor names in an object
# without properties, nor those that patternProperties or additionalProperties: false hold.
# One would guess that an accepted text matches its schema, as for all other spellings.
#
# Seen: {"a":"x"} is refused, and {"\u0061":"x"} and {"a":1,"\u0061":"x"} are accepted, for an
# integer a; both are refused with additionalProperties false.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet llguidance==1.9.1
cat > run.py <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


integer = {"type": "object", "properties": {"a": {"type": "integer"}}}
for schema in (integer, {**integer, "additionalProperties": False}):
    for text in (r'{"a":1}', r'{"a":"x"}', r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}'):
        verdict = "accepted" if accepts(schema, text) else "refused"
        print("closed" if len(schema) == 3 else "open", text, verdict, "as", json.loads(text))
PYTHON
venv/bin/python run.py | tee seen
diff seen - <<'SEEN'
open {"a":1} accepted as {'a': 1}
open {"a":"x"} refused as {'a': 'x'}
open {"\u0061":"x"} accepted as {'a': 'x'}
open {"a":1,"\u0061":"x"} accepted as {'a': 'x'}
closed {"a":1} accepted as {'a': 1}
closed {"a":"x"} refused as {'a': 'x'}
closed {"\u0061":"x"} refused as {'a': 'x'}
closed {"a":1,"\u0061":"x"} refused as {'a': 'x'}
SEEN
