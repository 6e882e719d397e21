"""Admin routes of uploads: an adapter's blob becomes a version, in one request or in parts.

PUT /adapters/…/versions registers a small blob, the request's body.
POST /uploads begins or resumes a large upload; the response lists the missing parts with the URLs
to PUT them to, straight into the store where possible.
PUT /uploads/…/parts/… takes parts that cannot go straight into the store.
POST /adapters/…/versions registers the upload as a version.
All of them are idempotent.
"""

import base64
import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from lorikeet.apis.body import Body
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.resumable_uploads import ResumableUploads
from lorikeet.chat_template import template_warning
from lorikeet.errors import InvalidAdapter, InvalidInput, RequestTooLarge
from lorikeet.gateway.admin.adapter_defaults import DefaultsBody, checked_defaults
from lorikeet.gateway.admin.blob_validation import MAX_BYTES
from lorikeet.gateway.admin.registration import RegisteredVersion, Registration, RegistrationRequest
from lorikeet.gateway.admin.smoke import smoke_test
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import bounded_parts, declared_bytes, json_body
from lorikeet.gateway.error_responses import CREATED, OK
from lorikeet.gateway.parity import Nats, bounds_of, check_parity, parity_json
from lorikeet.gateway.received_file import receive_file
from lorikeet.gateway.services import Services
from lorikeet.parity.probes import MAX_VALUES, Probes
from lorikeet.tokenizer_vocabulary import MAX_ADDED, TokenizerVocabulary, vocabulary_warning
from lorikeet_engine.adapter_format import ValueScan

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Json = dict[str, Any]


class BeginUpload(Body):
    """Request to begin or resume the upload of a blob.

    digest: SHA-256 of the blob.
    tenant, base_model: tenant and base model of the adapter; if given, they are checked before the
        upload.
    """

    digest: Digest
    size_bytes: Annotated[int, Field(ge=1)]
    tenant: str | None = None
    base_model: str | None = None


class TrainedVocabulary(Body):
    """Vocabulary of the tokenizer in the folder that a trainer saved.

    trained: SHA-256 in hex of the vocabulary without added tokens; null: not known.
    added: ids of added tokens, by token.
    """

    trained: Digest | None = None
    added: Annotated[dict[str, int], Field(max_length=MAX_ADDED)]


class RegisterUpload(Body):
    """Request to register a blob that was uploaded, or that the store had already.

    digest: SHA-256 of the blob.
    chat_template: digest of the chat template (template_digest) in the trainer's folder that
        the blob was made from.
    vocabulary: vocabulary of the tokenizer in that folder.
    promote: also point the alias prod to the new version.
    shared: whether all tenants may use the adapter; null: unchanged.
    base_model: base model that the adapter was trained on; null: the one that the blob names.
    defaults: the version's own request defaults; null: the base model's.
    smoke: run a smoke test first; register only if a replica can generate with the adapter.
    probes: the trainer's completions with log-probabilities; register only if those of a replica
        are near them.
    warn_above, refuse_above: mean differences, in nats, above which the comparison warns and
        refuses; null: the defaults.
    """

    max_values: ClassVar[int] = MAX_VALUES

    digest: Digest
    chat_template: Digest | None = None
    vocabulary: TrainedVocabulary | None = None
    promote: bool = False
    shared: bool | None = None
    base_model: str | None = None
    smoke: bool = False
    defaults: DefaultsBody | None = None
    probes: Probes | None = None
    warn_above: Nats | None = None
    refuse_above: Nats | None = None


def upload_routes(
    services: Services, uploads: ResumableUploads, registration: Registration
) -> APIRouter:
    """Return the routes that register a blob sent in one request, and the routes that upload a blob
    in parts.
    """
    endpoints = UploadEndpoints(services, uploads, registration)
    router = APIRouter()
    versions = "/adapters/{tenant}/{name}/versions"
    router.add_api_route(versions, endpoints.register_body, methods=["PUT"])
    router.add_api_route("/uploads", endpoints.begin, methods=["POST"])
    router.add_api_route("/uploads/{digest}/parts/{number}", endpoints.put_part, methods=["PUT"])
    router.add_api_route(versions, endpoints.register, methods=["POST"])
    return router


class UploadEndpoints:
    """Endpoints that register a blob in one request, or upload it in parts and then register it."""

    def __init__(
        self, services: Services, uploads: ResumableUploads, registration: Registration
    ) -> None:
        self._services, self._uploads, self._registration = services, uploads, registration

    async def register_body(
        self,
        request: Request,
        response: Response,
        tenant: str,
        name: str,
        actor: Actor,
        promote: bool = False,
        shared: bool | None = None,
        base_model: str | None = None,
    ) -> Json:
        """Validate and store the request's body, an adapter's blob; register it as a version.

        tenant, name: owner and name of the adapter.
        actor: id of the admin's key.
        promote: also point the alias prod to the new version.
        shared: whether all tenants may use the adapter; None: unchanged.
        base_model: base model that the adapter was trained on; None: the one that the blob names.
        """
        registration = self._registration
        order = RegistrationRequest(tenant, name, actor, promote, shared, base_model)
        limits = await registration.check(tenant, base_model)
        with tempfile.TemporaryDirectory(prefix="lorikeet-upload-") as folder:
            blob = Path(folder) / "adapter.safetensors"
            size_bytes = declared_bytes(request, limits.max_bytes, MAX_BYTES)
            scan = None if size_bytes is None else ValueScan(size_bytes)
            body = bounded_parts(request, limits.max_bytes, MAX_BYTES)
            digest = await receive_file(body, blob, registration.workers, scan)
            facts = await registration.validate_upload(order, blob, digest, scan)
            made = await registration.record(order, blob, facts)
        response.status_code = CREATED if made.is_new else OK
        return made.version

    async def begin(
        self, wanted: Annotated[BeginUpload, json_body(BeginUpload)], actor: Actor
    ) -> Json:
        """Begin or resume an upload: return its missing parts with the URLs to PUT them to."""
        limits = await self._registration.check(wanted.tenant, wanted.base_model)
        if wanted.size_bytes > limits.max_bytes:
            raise RequestTooLarge(
                f"the adapter has {wanted.size_bytes} bytes: the limit is {limits.max_bytes} "
                f"({MAX_BYTES})",
                param="size_bytes",
            )
        return await self._registration.run(_begin, self._uploads, wanted, actor)

    async def put_part(self, request: Request, digest: str, number: int, actor: Actor) -> Json:
        """Receive part `number` of the upload of the blob with this digest."""
        run, uploads = self._registration.run, self._uploads
        upload = await run(uploads.find, digest, actor)
        if number not in upload.numbers:
            raise InvalidInput(
                f"number={number}: this upload has the parts 1 to {upload.numbers[-1]}",
                param="number",
            )
        size = upload.part_size(number)
        with tempfile.TemporaryDirectory(prefix="lorikeet-part-") as folder:
            part = Path(folder) / "part"
            await receive_file(bounded_parts(request, size), part, self._registration.workers)
            await run(_check_part, part, size, request.headers.get("content-md5"))
            await run(uploads.put, upload, number, part)
        return {"number": number, "size_bytes": size}

    async def register(
        self,
        request: Request,
        response: Response,
        tenant: str,
        name: str,
        wanted: Annotated[RegisterUpload, json_body(RegisterUpload)],
        actor: Actor,
    ) -> Json:
        """Register an uploaded blob as a version of an adapter.

        tenant, name: owner and name of the adapter.
        actor: id of the admin's key.
        """
        registration = self._registration
        order = RegistrationRequest(
            tenant, name, actor, wanted.promote, wanted.shared, wanted.base_model
        )
        await registration.check(tenant, wanted.base_model)
        async with registration.downloads:
            with tempfile.TemporaryDirectory(prefix="lorikeet-upload-") as folder:
                blob = Path(folder) / "adapter.safetensors"
                made = await self._record(order, wanted, blob, request.state.request_id)
        await registration.run(self._uploads.end, wanted.digest, actor)
        response.status_code = CREATED if made.is_new else OK
        return made.version

    async def _record(
        self, order: RegistrationRequest, wanted: RegisterUpload, blob: Path, request_id: str
    ) -> RegisteredVersion:
        registration, uploads = self._registration, self._uploads
        await registration.run(uploads.download, wanted.digest, order.actor, blob)
        facts = await self._validated(order, wanted.digest, blob)
        await registration.run(uploads.keep, facts.digest, order.actor, blob)
        services, smoke = self._services, Json()
        size = max(facts.vocabulary, services.base_models[facts.base_model].shape.vocabulary)
        defaults = await checked_defaults(
            wanted.defaults, services.encoders, order.tenant, facts.base_model, size
        )
        order = replace(order, defaults=defaults)
        if wanted.smoke:
            ref = await registration.next_ref(order, facts)
            seen = await smoke_test(services, facts.base_model, ref, request_id, defaults=defaults)
            smoke = {"smoke": seen}
        parity: Json = {}
        if wanted.probes is not None:
            ref = await registration.next_ref(order, facts)
            bounds = bounds_of(wanted.warn_above, wanted.refuse_above)
            about = facts.base_model, ref, request_id, wanted.probes, bounds, defaults
            facts = replace(facts, parity=await check_parity(services, *about))
            parity = {"parity": parity_json(facts.parity)}  # also of a version that exists already
        made = await registration.record(order, blob, facts)
        return made._replace(
            version=made.version | parity | smoke | self._warnings(wanted, facts.base_model)
        )

    def _warnings(self, wanted: RegisterUpload, base_model: str) -> Json:
        """Return warnings of differences between the trainer's folder and the base model's."""
        served, sent = self._services.base_models[base_model], wanted.vocabulary
        has_own = wanted.defaults is not None and wanted.defaults.chat_template is not None
        trained = None if sent is None else TokenizerVocabulary(sent.trained, sent.added)
        return {
            "template_warning": None
            if has_own
            else template_warning(wanted.chat_template, served.chat_template, base_model),
            "vocabulary_warning": None
            if wanted.defaults is not None and wanted.defaults.tokenizer is not None
            else vocabulary_warning(trained, served.vocabulary, base_model),
        }

    async def _validated(self, order: RegistrationRequest, digest: str, blob: Path) -> BlobFacts:
        try:
            return await self._registration.validate_upload(order, blob)
        except InvalidAdapter as error:
            if error.param != "base_model":  # else the blob is right once the admin names one
                await self._registration.run(self._uploads.end, digest, order.actor)
            raise


def _begin(uploads: ResumableUploads, wanted: BeginUpload, actor: str) -> Json:
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
    """Raise InvalidInput unless an uploaded part has the expected size and MD5.

    md5: the request's Content-MD5 header; None: not checked.
    """
    if part.stat().st_size != size:
        raise InvalidInput(f"the part has {part.stat().st_size} bytes: want {size}")
    if md5 is not None:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()
        if base64.b64encode(found).decode() != md5:
            raise InvalidInput("the part's MD5 differs from Content-MD5: send it again")
