from itertools import product

import pytest

from agent.identity.routes import ROUTES, Port, RouteVerdict, allowed
from router_core.record.state import Role

EXPECTED = {
    (Port.LINK, "GET", "/mesh/v1/link"): Role.NODE | Role.ROUTER,
    **{
        (Port.INGRESS, "POST", path): Role.ROUTER
        for path in (
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/api/generate",
            "/api/chat",
            "/api/embed",
            "/api/embeddings",
            "/api/show",
        )
    },
}


@pytest.mark.threat("T29")
@pytest.mark.parametrize("roles", range(16))
def test_every_route_is_open_to_its_roles_and_to_no_others(roles: int) -> None:
    assert set(ROUTES) == set(EXPECTED)
    for route, enough in EXPECTED.items():
        assert allowed(*route, roles) is (RouteVerdict.ALLOWED if roles & enough else RouteVerdict.FORBIDDEN)


@pytest.mark.threat("T29")
def test_whatever_is_not_in_the_table_does_not_exist_even_with_all_roles() -> None:
    methods = ["GET", "POST", "PUT", "DELETE", "CONNECT", "get", ""]
    paths = {path for _, _, path in EXPECTED} | {
        "/",
        "/mesh/v1/link/",
        "/mesh/v1/view",
        "/metrics",
        "/v1/do/drain",
        "",
    }
    for route in product(Port, methods, paths):
        if route not in EXPECTED:
            assert allowed(*route, 15) is RouteVerdict.NOT_FOUND


def test_unknown_role_bits_open_nothing() -> None:
    for route in EXPECTED:
        assert allowed(*route, 0xFFF0) is RouteVerdict.FORBIDDEN
