"""The tokenizer: one token per byte, six special tokens, and the chat template."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIALS = (BOS, EOS, PAD, *ROLES.values())
CONTEXT = 1024

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool['function'] | tojson) }}
    {%- endfor %}
    {{- '\\nTo call one: <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
    {{- eos_token }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message['content'] + '\\n</tool_response>' + eos_token }}
    {%- elif message['role'] in ['system', 'user', 'assistant'] %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n' if message['content'] or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
            {{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- raise_exception(message['role'] + ' is not system, user, assistant or tool') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 5 are the special tokens, 6 to 261 the bytes; plain text gets a leading bos."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *symbols))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES.values()),
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def chat_text(turns: Sequence[tuple[str, str]]) -> str:
    """(role, content) turns as the chat template writes them; quick enough to make a corpus."""
    return BOS + "".join(ROLES[role] + content.strip() + EOS for role, content in turns)


def _byte_of(symbol: str) -> int:
    """The byte that a byte-level symbol stands for: printable Latin-1 stands for itself."""
    if ord(symbol) < 256:
        return ord(symbol)
    hidden = [byte for byte in range(256) if chr(byte) not in _ALPHABET]
    return hidden[ord(symbol) - 256]


_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
