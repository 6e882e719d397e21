"""APIs of OpenAI, Anthropic and vLLM that tenants call: each API's requests and answers.

chat/         /v1/chat/completions
completions/  /v1/completions, with the answers of chat/
responses/    /v1/responses, as a chat
messages/     /v1/messages, as a chat
pooling/      /v1/classify, /v1/score, /v1/pooling, /v1/rerank and /v1/embeddings

Each folder has request.py, the schema of a request, which becomes a Call (protocol/messages.py) in
a gateway, and answer.py, the bytes that a replica makes of the call's choices (text/choice.py).

request.py    fields common to all requests that generate
  body.py       schema of a JSON object, and errors that name a field
  fields.py, tools.py, structured_outputs.py   parts of requests
answer.py     a call's answer: the engine's outputs in, bytes of the called API out
errors.py     error bodies and statuses
"""
