"""GET /ui and its files: a page without data, served without a key on both listeners.

The page fetches its data with the key that the user enters: an admin's shows the whole service, a
tenant's its tenant.
"""

import hashlib
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",
    # No foreign sources, nothing inline, no framing: markup in an adapter's name stays text.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def ui_routes() -> APIRouter:
    """Make the routes of the page and its files, which are read once."""
    router, files = APIRouter(), _read()

    @router.get("/ui")
    async def page(request: Request) -> Response:
        return _respond(request, files[_PAGE])

    @router.get("/ui/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _respond(request, files[name])

    return router


def _read() -> dict[str, _File]:
    files = {}
    for file in resources.files("lorikeet.ui").joinpath("static").iterdir():
        content, kind = file.read_bytes(), _TYPES["." + file.name.rpartition(".")[2]]
        files[file.name] = _File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files


def _respond(request: Request, file: _File) -> Response:
    headers = _HEADERS | {"etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
