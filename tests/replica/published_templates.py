"""Chat templates as models were published with."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "chat_templates"
QWEN3 = (_FOLDER / "qwen3.jinja").read_text()
QWEN3_5 = (_FOLDER / "qwen3.5.jinja").read_text()
QWEN3_6 = (_FOLDER / "qwen3.6.jinja").read_text()
GEMMA_4_TEMPLATE = (_FOLDER / "gemma4.jinja").read_text()
MINISTRAL_3 = (_FOLDER / "ministral3.jinja").read_text()
FIRST_MINISTRAL_3 = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
    "{{ raise_exception('[THINK] and [/THINK] in parts') if messages | length > 99 }}"
)
"""Like the template that Ministral 3 was published with: it reads no `reasoning_content`."""
R1 = (_FOLDER / "deepseek-r1-distill.jinja").read_text()
