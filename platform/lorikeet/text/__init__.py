"""Text of requests: functions of a base model's tokenizer, its chat template and a call.

Gateways and replicas import this package. No engine, no HTTP.

call_encoding.py      a call's prompts as token ids, within the context
prompts.py            chat templates and tokenizing
  harmony_prompts.py    messages as gpt-oss' template reads them
tenant_threads.py     threads for long texts, bounded per tenant
"""
