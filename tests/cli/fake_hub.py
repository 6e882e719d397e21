"""A stand-in for the Hugging Face Hub: one commit of each repository, over HTTP on loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_COMMIT = "5f" * 20


class Hub:
    """Repositories by name, each a folder with the branch main and the tag v1.

    fetched: paths of the requested files.
    """

    def __init__(self, repositories: Mapping[str, Path], gated: frozenset[str]) -> None:
        self.repositories, self.gated = repositories, gated
        self.fetched: list[str] = []
        self.url = ""


@contextmanager
def running_hub(
    repositories: Mapping[str, Path], gated: frozenset[str] = frozenset()
) -> Iterator[Hub]:
    hub = Hub(repositories, gated)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0].strip("/").split("/")
            if path[:2] == ["api", "models"]:
                repository, rest = "/".join(path[2:4]), path[4:]
            else:
                repository, rest = "/".join(path[:2]), path[2:]
            if repository not in hub.repositories:
                return self._send(404, "RepoNotFound")
            if repository in hub.gated:
                return self._send(403, "GatedRepo")
            folder = hub.repositories[repository]
            if rest and rest[1] not in ("main", "v1", _COMMIT):
                return self._send(404, "RevisionNotFound")
            if rest and rest[0] == "resolve":
                hub.fetched += [rest[2]] if with_body else []
                return self._file(folder / rest[2], with_body=with_body)
            return self._send(200, body=_listing(repository, folder, tree=rest[:1] == ["tree"]))

        def _file(self, file: Path, *, with_body: bool) -> None:
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def _send(self, status: int, code: str = "", body: bytes = b"{}") -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _listing(repository: str, folder: Path, *, tree: bool) -> bytes:
    contents = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    files = [
        {"type": "file", "path": name, "rfilename": name, "size": len(data)}
        | {"oid": hashlib.sha1(data).hexdigest()}
        for name, data in contents.items()
    ]
    if tree:
        return json.dumps(files).encode()
    return json.dumps({"id": repository, "sha": _COMMIT, "siblings": files}).encode()
