"""Requests of tenants, by the schemas of OpenAI's and Anthropic's APIs.

api_request.py       fields common to all requests, and conversion to a Call
chat_request.py, completion_request.py   /v1/chat/completions and /v1/completions
chat_messages.py, tools.py, fields.py, structured_outputs.py, no_ops.py   parts of these requests
responses_request.py, responses_items.py, responses_tools.py
                     /v1/responses, converted to the Call of a chat
anthropic_request.py, anthropic_content.py   /v1/messages, converted to the Call of a chat
openapi.py           GET /v1/openapi.json, with the schemas of all these requests

Replicas make the bytes of answers, by the formats in answer_stream/.
"""
