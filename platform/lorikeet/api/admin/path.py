"""The names in an admin route's path, held to the catalog's rules before any route acts on them."""

from starlette.requests import Request

from lorikeet.catalog.names import check_name
from lorikeet.errors import InvalidInput


async def check_path(request: Request) -> None:
    """A dependency of every admin route.

    An encoded slash would reach another route than the client named. Raises InvalidInput.
    """
    if b"%2f" in request.scope.get("raw_path", b"").lower():
        raise InvalidInput("no name in an address has a '/': want it without %2F")
    for param, name in request.path_params.items():
        check_name(name, "id" if param == "key_id" else param)
