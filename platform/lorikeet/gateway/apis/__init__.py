"""What tenants may send and get, in OpenAI's words.

openai_requests.py   the requests, and the Call that each becomes
chat_messages.py, tools.py, fields.py   their parts
response_types.py    the responses, as types
openapi.py           GET /v1/openapi.json, made of all these types

The bytes of responses are formed on replicas, in answer_stream/openai_format.py.
"""
