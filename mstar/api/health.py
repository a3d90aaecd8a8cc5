"""Whether the server lives and serves, what it is, and what it is doing: /health, /ready, /ping, /version, /metrics, /mstar/status.

Front process, asyncio loop. `/health` says that the front answers; `/ready` that requests can be served now.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from mstar import __version__
from mstar.api.responses import JsonResponse
from mstar.api.services import Services
from mstar.conductor.metrics import CONTENT_TYPE
from mstar.errors import RequestError


def health_router(services: Services) -> APIRouter:
    """The routes over `services`."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """200 while the front answers."""
        return JsonResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests can be served, else 503 with the reason."""
        if (reason := services.conductor.not_ready_reason()) is not None:
            raise RequestError(f"Not ready: {reason}", code="not_ready", status=503)
        return JsonResponse({"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        """The version of mstar."""
        return JsonResponse({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(services.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @router.get("/mstar/status")
    async def status() -> Response:
        """A fresh answer of every rank: slots, KV pages, requests."""
        return JsonResponse(await services.conductor.status())

    return router
