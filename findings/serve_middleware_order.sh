#!/usr/bin/env bash
# Ray Serve 2.60.0 applies a list of Starlette's middleware in the reverse of Starlette's order.
#
# RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names a function that returns a list of
# starlette.middleware.Middleware for Serve's HTTP proxy. Starlette(middleware=[first, second]) makes
# `first` the outermost: it sees a request first. Serve wraps its application by each entry in turn,
# so the last of the same list is the outermost. Middleware that must see a request before the others
# (one that refuses headers, say) therefore belongs at the end of the list.
#
# Seen: a request meets first, second in Starlette and second, first in Serve's proxy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "ray[serve]==2.60.0" starlette httpx
cd "$folder"
cat > seen.py <<'PYTHON'
from starlette.middleware import Middleware


class Note:
    def __init__(self, app, name):
        self.app, self.name = app, name

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            met = dict(scope["headers"]).get(b"x-met", b"") + f" {self.name}".encode()
            others = [header for header in scope["headers"] if header[0] != b"x-met"]
            scope = {**scope, "headers": [*others, (b"x-met", met)]}
        await self.app(scope, receive, send)


def middlewares():
    return [Middleware(Note, name="first"), Middleware(Note, name="second")]
PYTHON
cat > ask.py <<'PYTHON'
import httpx
import ray
from ray import serve
from seen import middlewares
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient


async def met(request):
    return PlainTextResponse(request.headers["x-met"])


@serve.deployment
class Met:
    async def __call__(self, request):
        return request.headers["x-met"]


by_starlette = Starlette(routes=[Route("/", met)], middleware=middlewares())
in_starlette = TestClient(by_starlette).get("/").text.split()
ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
serve.start(http_options={"port": 18099})
serve.run(Met.bind())
in_serve = httpx.get("http://127.0.0.1:18099/", timeout=60).text.split()
serve.shutdown()
print("in Starlette:", in_starlette, "in Serve:", in_serve)
assert in_starlette == ["first", "second"], in_starlette
assert in_serve == ["second", "first"], in_serve
PYTHON
PYTHONPATH=$folder RAY_USAGE_STATS_ENABLED=0 \
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=seen:middlewares venv/bin/python ask.py 2>/dev/null
echo "as described"
