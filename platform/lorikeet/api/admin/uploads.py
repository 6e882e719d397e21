"""Admin routes: a blob that comes in parts, straight into the store where it can, then a version.

POST /uploads says which parts are missing and where to PUT them; PUT /uploads/…/parts/… takes
those that cannot go to the store; POST /adapters/…/versions makes the upload a version. All three
may be repeated at will.
"""

import base64
import hashlib
import tempfile
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from lorikeet.api.admin.registration import Order, Registration
from lorikeet.api.body import Body, json_body
from lorikeet.api.body_file import receive
from lorikeet.api.errors import CREATED, OK
from lorikeet.api.gate import Actor
from lorikeet.api.request_scope import request_id_of
from lorikeet.api.services import Services
from lorikeet.api.smoke import smoke
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.uploads import Uploads
from lorikeet.errors import InvalidAdapter, InvalidInput, RequestTooLarge

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Begin(Body):
    """A blob that is to come. digest: SHA-256 of its bytes.

    tenant, base_model: what it is to be registered for, if that should be checked already.
    """

    digest: Digest
    size_bytes: Annotated[int, Field(ge=1)]
    tenant: str | None = None
    base_model: str | None = None


class Uploaded(Body):
    """A blob that came, or that the store had already, and what to do with it.

    smoke: only if a replica can generate with it, and say how it differs from the base model.
    """

    digest: Digest
    promote: bool = False
    shared: bool | None = None
    base_model: str | None = None
    smoke: bool = False


def uploads_routes(services: Services, uploads: Uploads, registration: Registration) -> APIRouter:
    """Begin or resume an upload, send its parts, register it."""
    router = APIRouter()

    @router.post("/uploads")
    async def begin(wanted: Annotated[Begin, json_body(Begin)], actor: Actor) -> dict[str, Any]:
        limits = await registration.check(wanted.tenant, wanted.base_model)
        if wanted.size_bytes > limits.max_bytes:
            raise RequestTooLarge(
                f"the adapter has {wanted.size_bytes} bytes: the limit is {limits.max_bytes}",
                param="size_bytes",
            )
        return await registration.run(_begun, uploads, wanted, actor)

    @router.put("/uploads/{digest}/parts/{number}")
    async def put_part(request: Request, digest: str, number: int, actor: Actor) -> dict[str, Any]:
        upload = await registration.run(uploads.find, digest, actor)
        if number not in upload.numbers:
            raise InvalidInput(
                f"number={number}: this upload has the parts 1 to {upload.numbers[-1]}",
                param="number",
            )
        size = upload.part_size(number)
        with tempfile.TemporaryDirectory(prefix="lorikeet-part-") as folder:
            part = Path(folder) / "part"
            await receive(request, part, size, registration.workers)
            await registration.run(_check_part, part, size, request.headers.get("content-md5"))
            await registration.run(uploads.put, upload, number, part)
        return {"number": number, "size_bytes": size}

    @router.post("/adapters/{tenant}/{name}/versions")
    async def register(
        request: Request,
        response: Response,
        tenant: str,
        name: str,
        wanted: Annotated[Uploaded, json_body(Uploaded)],
        actor: Actor,
    ) -> dict[str, Any]:
        order = Order(tenant, name, actor, wanted.promote, wanted.shared, wanted.base_model)
        await registration.check(tenant, wanted.base_model)
        async with registration.turns:
            with tempfile.TemporaryDirectory(prefix="lorikeet-upload-") as folder:
                blob = Path(folder) / "adapter.safetensors"
                version, is_new = await validated(order, wanted, blob, request_id_of(request))
        await registration.run(uploads.end, wanted.digest, actor)
        response.status_code = CREATED if is_new else OK
        return version

    async def validated(
        order: Order, wanted: Uploaded, blob: Path, request_id: str
    ) -> tuple[dict[str, Any], bool]:
        await registration.run(uploads.download, wanted.digest, order.actor, blob)
        facts = await examined(order, wanted.digest, blob)
        await registration.run(uploads.keep, wanted.digest, order.actor, blob)
        seen: dict[str, Any] = {}
        if wanted.smoke:
            ref = await registration.next_ref(order, facts)
            seen = {"smoke": await smoke(services, facts.base_model, ref, request_id)}
        version, is_new = await registration.record(order, blob, facts)
        return version | seen, is_new

    async def examined(order: Order, digest: str, blob: Path) -> BlobFacts:
        try:
            return await registration.examine(order, blob)
        except InvalidAdapter as error:
            if error.param != "base_model":  # else it is right once the admin says which
                await registration.run(uploads.end, digest, order.actor)
            raise

    return router


def _begun(uploads: Uploads, wanted: Begin, actor: str) -> dict[str, Any]:
    upload, missing = uploads.begin(wanted.digest, wanted.size_bytes, actor)
    return {
        "digest": upload.digest,
        "size_bytes": upload.size_bytes,
        "part_bytes": upload.part_bytes,
        "missing": [
            {
                "number": number,
                "size_bytes": upload.part_size(number),
                "url": uploads.url(upload, number),
            }
            for number in missing
        ],
    }


def _check_part(part: Path, size: int, md5: str | None) -> None:
    """Raises InvalidInput."""
    if part.stat().st_size != size:
        raise InvalidInput(f"the part has {part.stat().st_size} bytes: want {size}")
    if md5 is not None:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()
        if base64.b64encode(found).decode() != md5:
            raise InvalidInput("the part was damaged on its way: send it again")
