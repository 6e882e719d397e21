"""Text of requests and answers: functions of a tokenizer, a chat template and a call.

Gateways and replicas import this package. No engine, no HTTP, and no API's formats.

prompts.py            a call's prompts as token ids, within the context
  harmony_prompts.py    messages as gpt-oss' template reads them
adapter_templates.py  adapters' own chat templates, and their check
  template_server.py    the processes that render them
tenant_threads.py     threads for long texts, bounded per tenant
choice_stream.py      one choice of an answer, from tokens to parts of a Choice (choice.py)
  detokenizer.py        ids to text, and stop strings
  reasoning.py          text to thinking and answer
  tools/                text to tool calls
  logprobs.py, prompt_logprobs.py   log probabilities as JSON
  harmony.py            the same for gpt-oss, whose answers are in messages
prompt_echoes.py      prompts that answers repeat
grammars/             grammars that constrain answers
"""
