"""All admin routes, behind one check of the key."""

from fastapi import APIRouter, Depends, Request

from lorikeet.catalog.names import check_name
from lorikeet.catalog.resumable_uploads import ResumableUploads
from lorikeet.errors import InvalidInput
from lorikeet.gateway.admin.adapters import adapter_routes
from lorikeet.gateway.admin.fleet_view import FleetView, fleet_routes
from lorikeet.gateway.admin.history import history_routes
from lorikeet.gateway.admin.keys import key_routes
from lorikeet.gateway.admin.pin_report import PinReporter
from lorikeet.gateway.admin.pins import pin_routes
from lorikeet.gateway.admin.registration import Registration
from lorikeet.gateway.admin.smoke import smoke_routes
from lorikeet.gateway.admin.status import status_routes
from lorikeet.gateway.admin.tenants import tenant_routes
from lorikeet.gateway.admin.upload_routes import upload_routes
from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.routes.requests import admin_request_routes
from lorikeet.gateway.routes.usage import UsageReports, admin_usage_routes
from lorikeet.gateway.services import Services
from lorikeet.request_log.recent_traffic import RecentTraffic
from lorikeet.request_log.request_log import RequestLog


def admin_routes(
    services: Services,
    authenticator: RequestAuthenticator,
    catalog_view: GatewayCatalogView,
    registration: Registration,
    request_log: RequestLog,
    usage: UsageReports,
    traffic: RecentTraffic,
) -> APIRouter:
    """Return all routes under /admin/v1, which check an admin's key before anything else."""
    checks = [Depends(authenticator.admin), Depends(_check_path)]
    router = APIRouter(prefix="/admin/v1", dependencies=checks)
    pins = PinReporter(services.catalog, services.engines, catalog_view)
    uploads = ResumableUploads(services.catalog.store, services.part_bytes)
    router.include_router(upload_routes(services, uploads, registration))
    router.include_router(smoke_routes(services, catalog_view))
    router.include_router(adapter_routes(services, catalog_view))
    router.include_router(history_routes(services.catalog, catalog_view))
    router.include_router(pin_routes(services, pins))
    router.include_router(tenant_routes(services.catalog, catalog_view))
    router.include_router(key_routes(services.catalog, catalog_view))
    router.include_router(status_routes(services.engines, catalog_view, pins))
    router.include_router(fleet_routes(FleetView(services.engines, catalog_view, traffic, pins)))
    router.include_router(admin_request_routes(request_log))
    router.include_router(admin_usage_routes(usage, catalog_view))
    return router


async def _check_path(request: Request) -> None:
    """Raise InvalidInput if a name in the request's path does not follow the catalog's rules for
    names.

    A name with an encoded slash is refused too, as it would reach another route than intended.
    """
    if b"%2f" in request.scope.get("raw_path", b"").lower():
        raise InvalidInput("names in an address have no '/': want it without %2F")
    for param, name in request.path_params.items():
        check_name(name, "id" if param == "key_id" else param)
