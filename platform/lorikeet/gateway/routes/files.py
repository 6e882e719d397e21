"""Files of tenants, the input and output of batches, in the shape of OpenAI's API: /v1/files."""

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lorikeet.catalog.records import TenantRecord
from lorikeet.errors import InvalidInput, NotFound, RateLimited, StoreError, UnsupportedParameter
from lorikeet.file_store import LIFETIME_S, SHORTEST_S, FileStore, Order, StoredFile
from lorikeet.gateway.body import bounded_parts, timed_parts
from lorikeet.gateway.reads import TenantReads
from lorikeet.retry_after import FULL_GATEWAY_S

T = TypeVar("T")
Json = dict[str, Any]

MAX_FILE_BYTES = 200 * 2**20
"""Size limit of an uploaded file, as OpenAI's of a batch."""
MAX_TRANSFERS = 4
"""Limit on the uploads and downloads of one tenant at once in a gateway: each takes disk space."""
_FORM_BYTES = 2**16  # what a form may hold beside its file
_MAX_FIELDS = 8
_PIECE_BYTES = 2**14  # parsed at once: the parser is Python, and other requests must go on
_READ_BYTES = 2**18
_READS = 5
"""Number of reads that an upload or a list costs, for the requests to the store."""
_NAME_LENGTH = 255
_OFF = "this service keeps no files: its operator can set LORIKEET_FILES_BYTES"


class StoredFiles:
    """Access of a gateway to tenants' files. For use in one event loop.

    store: store of files; None: files are off.
    """

    def __init__(self, store: FileStore | None) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="files")
        self._transfers = Counter[str]()

    async def call(self, ask: Callable[[FileStore], T]) -> T:
        """Return the result of `ask`, called with the store on a thread.

        Raises NotFound if files are off, and what `ask` raises.
        """
        store = self._store
        if store is None:
            raise NotFound(_OFF)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: ask(store))

    @contextmanager
    def transfer(self, tenant: str) -> Iterator[None]:
        """Count an upload or download within the context. Raises RateLimited beyond
        MAX_TRANSFERS.
        """
        if self._transfers[tenant] >= MAX_TRANSFERS:
            raise RateLimited(
                f"{MAX_TRANSFERS} files of this tenant are on their way already, the most that a "
                "gateway allows: wait for one to end",
                retry_after_s=FULL_GATEWAY_S,
            )
        self._transfers[tenant] += 1
        try:
            yield
        finally:
            self._transfers[tenant] -= 1
            if not self._transfers[tenant]:
                del self._transfers[tenant]


def file_routes(reads: TenantReads, files: StoredFiles) -> APIRouter:
    """Return the routes of files. Each call counts as one or several reads.

    reads: check of each request's key and of its tenant's limit on reads.
    """
    router = APIRouter(prefix="/v1/files")

    @router.post("")
    async def upload_file(request: Request) -> Json:
        async with reads.admitted(request, _READS) as caller:
            tenant = caller.tenant
            # before the body is read
            await files.call(lambda store: store.check_quota(tenant, 1, 1))
            with files.transfer(tenant.name):
                async with _form(request) as form:
                    upload, lifetime_s = _upload(form), _lifetime_s(form)
                    saved = await files.call(lambda s: _save(s, tenant, upload, lifetime_s))
            return saved.json()

    @router.get("")
    async def list_files(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: str | None = None,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> Json:
        async with reads.admitted(request, _READS) as caller:
            tenant = caller.tenant.name
            page, more = await files.call(
                lambda store: store.page(tenant, limit, after, order, purpose)
            )
            return list_json([file.json() for file in page], more)

    @router.get("/{file_id}")
    async def get_file(request: Request, file_id: str) -> Json:
        async with reads.admitted(request) as caller:
            return (await files.call(lambda store: store.get(caller.tenant.name, file_id))).json()

    @router.delete("/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Json:
        async with reads.admitted(request) as caller:
            await files.call(lambda store: store.delete(caller.tenant.name, file_id))
        return {"id": file_id, "object": "file", "deleted": True}

    @router.get("/{file_id}/content")
    async def get_content(request: Request, file_id: str) -> Response:
        async with reads.admitted(request, _READS) as caller:
            tenant = caller.tenant.name
            with ExitStack() as held:
                held.enter_context(files.transfer(tenant))
                content = await files.call(lambda store: _open(store, tenant, file_id))
                held.enter_context(content)
                return _FileResponse(content, held.pop_all())

    return router


def list_json(objects: list[Json], more: bool) -> Json:
    """Return a page of objects in the shape of OpenAI's lists.

    more: whether other objects follow.
    """
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": more,
    }


@asynccontextmanager
async def _form(request: Request) -> AsyncGenerator[FormData, None]:
    """Yield the form in a request's body, whose file is on disk.

    Raises InvalidInput for a body that is no form, RequestTooLarge, RequestTimeout, StoreError if
    the disk is full.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidInput(
            "Content-Type: want multipart/form-data with the fields file and purpose",
            param="content-type",
        )
    body = timed_parts(bounded_parts(request, MAX_FILE_BYTES + _FORM_BYTES))
    parser = MultiPartParser(
        request.headers,
        _in_pieces(body),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=_FORM_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidInput(f"the body is no form: {error.message}") from None
    except OSError as error:
        raise StoreError(f"{tempfile.gettempdir()}: {error.strerror}: free space there") from error
    try:
        yield form
    finally:
        await form.close()


async def _in_pieces(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a body in small pieces, between which other tasks run."""
    async for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            yield part[start : start + _PIECE_BYTES]
            await asyncio.sleep(0)


def _upload(form: FormData) -> UploadFile:
    """Return the form's file. Raises InvalidInput unless the form describes a file for a batch."""
    known = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in form:
        if name not in known:
            raise UnsupportedParameter(
                f"not supported here: {name[:_NAME_LENGTH]}", param=name[:_NAME_LENGTH]
            )
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidInput("file: want a file with a filename", param="file")
    if form.get("purpose") != "batch":
        raise UnsupportedParameter(
            "purpose: want batch: files are the input of batches here", param="purpose"
        )
    if not upload.size:
        raise InvalidInput("file: the file is empty", param="file")
    if upload.size > MAX_FILE_BYTES:
        raise InvalidInput(f"file: want at most {MAX_FILE_BYTES} bytes", param="file")
    return upload


def _lifetime_s(form: FormData) -> int:
    """Return the file's lifetime in seconds, from the form's expires_after; LIFETIME_S without it.

    Raises InvalidInput unless it has SHORTEST_S to LIFETIME_S seconds from the file's creation.
    """
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return LIFETIME_S
    if anchor != "created_at":
        raise InvalidInput("expires_after[anchor]: want created_at", param="expires_after[anchor]")
    with suppress(ValidationError):
        value = TypeAdapter(int).validate_python(seconds)
        if SHORTEST_S <= value <= LIFETIME_S:
            return value
    raise InvalidInput(
        f"expires_after[seconds]: want an integer from {SHORTEST_S} to {LIFETIME_S}",
        param="expires_after[seconds]",
    )


def _save(
    store: FileStore, tenant: TenantRecord, upload: UploadFile, lifetime_s: int
) -> StoredFile:
    """Save an upload.

    Raises InsufficientQuota if the tenant's files would exceed its limits, StoreError if the disk
    is full or the store fails.
    """
    with tempfile.TemporaryDirectory(prefix="lorikeet-file-") as folder:
        path = Path(folder) / "file"
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(upload.file, file, _READ_BYTES)
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}: free space there") from error
        name = (upload.filename or "file")[:_NAME_LENGTH]
        return store.upload(tenant, path, name, lifetime_s)


def _open(store: FileStore, tenant: str, file_id: str) -> BinaryIO:
    """Return an open file, without a name on disk, with the contents of a tenant's file.

    Raises NotFound if the tenant has no such file, StoreError if the store fails.
    """
    with tempfile.TemporaryDirectory(prefix="lorikeet-file-") as folder:
        path = Path(folder) / "file"
        store.download(tenant, file_id, path)
        return path.open("rb")


class _FileResponse(StreamingResponse):
    """Response with the bytes of an open file.

    held: context to leave when the response has been sent.
    """

    def __init__(self, content: BinaryIO, held: ExitStack) -> None:
        size = os.fstat(content.fileno()).st_size
        super().__init__(
            iter(lambda: content.read(_READ_BYTES), b""),
            media_type="application/octet-stream",
            headers={"content-length": str(size)},
        )
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        with self._held:
            await super().__call__(scope, receive, send)
