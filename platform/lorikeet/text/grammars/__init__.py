"""Grammars: texts that constrain an answer.

answer_grammar.py    the grammar of a call's answer: format or tool calls, after thinking
├── format_grammar.py   JSON schemas, regular expressions, choices
└── tool_grammar.py     tool calls in the syntax of the model's chat template
    ├── gemma_arguments.py    arguments as {key:value,…} with quoting marks
    ├── python_arguments.py   arguments as key=value pairs
    ├── xml_arguments.py      arguments as tags around keys and values
    ├── bare_texts.py         values that are bare text
    └── argument_rules.py     rules of schemas on arguments that a call names one after another
held_schema.py       JSON schemas in keywords that grammars hold
├── schema_logic.py     negation, and proofs that options exclude each other
└── patterns.py         patterns without look-ahead
schema_faults.py     the place of a schema's fault, in words
schema_check.py      check of a finished answer against a schema

A grammar is text in llguidance's variant of Lark, or llguidance's JSON for a schema.
Replicas compile grammars (replica/grammar_sandbox.py, replica/grammar_matcher.py).
"""
