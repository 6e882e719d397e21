"""Fields that are not served, OpenAI's and vLLM's, with the values of them that ask for nothing.

Clients send such defaults unasked. They are taken as absent; any other value is refused by name.
"""

from lorikeet.gateway.body import NoOps

STREAM_OPTIONS_NO_OPS: NoOps = {"include_obfuscation": (False,)}

_VLLM: NoOps = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT_NO_OPS: NoOps = {
    **_VLLM,
    "add_special_tokens": (False,),  # the chat template writes them
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "store": (False,),
}

COMPLETIONS_NO_OPS: NoOps = {**_VLLM, "add_special_tokens": (True,), "suffix": ("",)}
