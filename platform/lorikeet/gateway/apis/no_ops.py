"""Unsupported fields of OpenAI and vLLM, each with its values that have no effect.

Clients send such defaults without being asked. A field with one of these values counts as absent;
with any other value the request is refused and the field named.
"""

from lorikeet.gateway.body import NoOps

STREAM_OPTIONS_NO_OPS: NoOps = {"include_obfuscation": (False,)}

SAMPLING_NO_OPS: NoOps = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "priority": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT_NO_OPS: NoOps = {
    **SAMPLING_NO_OPS,
    "add_special_tokens": (False,),  # the chat template adds special tokens
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "store": (False,),
}

POOL_NO_OPS: NoOps = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "task": ("classify",),
}

EMBED_NO_OPS: NoOps = {**POOL_NO_OPS, "task": ("embed",)}

COMPLETIONS_NO_OPS: NoOps = {**SAMPLING_NO_OPS, "add_special_tokens": (True,), "suffix": ("",)}
