"""Text of requests: functions of a base model's tokenizer, its chat template and a call.

Gateways and replicas import this package. No engine, no HTTP.

call_encoding.py      a call's prompts as token ids, within the context
prompts.py            chat templates and tokenizing
  harmony_prompts.py    messages as gpt-oss' template reads them
adapter_templates.py  adapters' own chat templates, and their check
  template_server.py    the processes that render them
tenant_threads.py     threads for long texts, bounded per tenant
"""
