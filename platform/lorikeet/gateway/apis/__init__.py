"""What tenants may send and get, in OpenAI's and Anthropic's words.

api_request.py       what every request has, and the Call that each becomes
chat_request.py, completion_request.py   the requests of chats and completions
chat_messages.py, tools.py, fields.py   their parts
responses_request.py, responses_items.py, responses_tools.py
                     /v1/responses, which becomes a chat's Call
anthropic_request.py, anthropic_content.py   /v1/messages, which becomes one too
openapi.py           GET /v1/openapi.json, with the schemas of all these requests

The bytes of answers are formed on replicas, by the formats in answer_stream/.
"""
