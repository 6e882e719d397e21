#!/usr/bin/env bash
# Codex 0.171.0 falls back from a refused WebSocket to HTTP at once on status 426 alone.
#
# A provider with supports_websockets is asked for a WebSocket on /responses first. A server
# without WebSockets usually refuses it by 403 (uvicorn's default), 404 or 405. Codex retries such
# a refusal like a broken connection, seven attempts over some seven seconds in each session,
# before it sends the same request by POST. After a 426 it sends the POST at once.
# One would guess that every 4xx of the handshake is final.
#
# Seen: 426: 1 attempt, then POST; 403: 7 attempts, then POST. Needs npm and python3.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund @openai/codex@0.171.0
cat > server.py <<'PYTHON'
"""Refuses WebSockets by the given status and answers POSTs; prints the method of each request."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if "websocket" in self.headers.get("upgrade", "").lower():
            print("upgrade", flush=True)
            self.answer(int(sys.argv[1]), b"{}", "application/json")
        else:
            self.answer(404, b"{}", "application/json")

    def do_POST(self):
        print("post", flush=True)
        self.rfile.read(int(self.headers["content-length"]))
        part = {"type": "output_text", "text": "hello", "annotations": []}
        said = {"type": "message", "id": "m", "role": "assistant", "content": [part]}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        events = [
            {"type": "response.created", "response": {"id": "r"}},
            {"type": "response.output_item.done", "output_index": 0, "item": said},
            {"type": "response.completed", "response": {"id": "r", "usage": usage}},
        ]
        text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        self.answer(200, text.encode(), "text/event-stream")

    def answer(self, status, body, kind):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
open(f"port.{sys.argv[1]}", "w").write(str(server.server_port))
server.serve_forever()
PYTHON
for case in 426:1 403:7; do
  status=${case%:*} attempts=${case#*:}
  python3 server.py "$status" > "seen.$status" 2> /dev/null &
  until [ -s "port.$status" ]; do sleep 0.1; done
  mkdir -p "home.$status" work
  cat > "home.$status/config.toml" <<TOML
model = "m"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "http://127.0.0.1:$(cat "port.$status")/v1"
env_key = "KEY"
wire_api = "responses"
supports_websockets = true
TOML
  (cd work && CODEX_HOME="$folder/home.$status" KEY=none timeout 90 \
    ../node_modules/.bin/codex exec --skip-git-repo-check "say hello" < /dev/null > /dev/null 2>&1)
  echo "$status: $(grep -c upgrade "seen.$status") attempts, then $(tail -n 1 "seen.$status")"
  [ "$(grep -c upgrade "seen.$status")" = "$attempts" ]
  [ "$(tail -n 1 "seen.$status")" = post ]
done
echo "as described"
