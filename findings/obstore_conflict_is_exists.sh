#!/usr/bin/env bash
# obstore 0.12.1 reports S3's "conflict, try again" of a conditional put as "already exists".
#
# S3 answers a PUT with If-None-Match: * by 412 (PreconditionFailed) if the object exists, and by 409
# (ConditionalRequestConflict) if another conditional request for the key was under way: nobody may
# have won, and S3's documentation asks for a retry. obstore.put(..., mode="create") raises
# AlreadyExistsError for both. A log of commits that takes AlreadyExistsError for a lost race and
# reads the winner's object finds none.
#
# Seen: AlreadyExistsError for 412 and for 409, after one request each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet obstore==0.12.1
cd "$folder" && venv/bin/python - <<'PYTHON'
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
from obstore.store import S3Store

CODES = {409: "ConditionalRequestConflict", 412: "PreconditionFailed"}
requests = []


class Server(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status = int(self.path.rpartition("/")[2])
        requests.append((status, self.headers["If-None-Match"]))
        body = f"<Error><Code>{CODES[status]}</Code><Message>m</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
store = S3Store(
    "bucket",
    endpoint=f"http://127.0.0.1:{server.server_port}",
    access_key_id="key",
    secret_access_key="secret",
    region="us-east-1",
    client_options={"allow_http": True},
)
for status in CODES:
    try:
        obstore.put(store, str(status), b"entry", mode="create")
        raised = "nothing"
    except Exception as error:
        raised = type(error).__name__
    print(status, CODES[status], "→", raised)
    assert raised == "AlreadyExistsError", raised
assert requests == [(409, "*"), (412, "*")], requests
PYTHON
echo "as described"
