"""GET /v1/models and /v1/models/{id}: the base and the adapters, as vLLM's cards.

Front process, asyncio loop. Invariant: the list and the detail agree for every id. A page goes on behind an id by name, so adapters that
come or go between two pages neither repeat nor hide others.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Query, Request, Response

from mstar.api.responses import JsonResponse
from mstar.api.services import Services
from mstar.conductor.types import ServedModel
from mstar.errors import ModelNotFound

MAX_PAGE = 1000


def models_router(services: Services) -> APIRouter:
    """The routes over `services`."""
    router = APIRouter()
    conductor = services.conductor

    @router.get("/v1/models")
    async def models(limit: Annotated[int | None, Query(ge=1, le=MAX_PAGE)] = None, after: str | None = None) -> Response:
        """The served models: all, or a page of `limit` behind the id `after`."""
        served, more = conductor.served_models(after, limit)
        return JsonResponse(model_page(served, has_more=more))

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str, request: Request) -> Response:
        """One model's card."""
        return JsonResponse(model_card(_find(model_id, request)))

    def _find(model_id: str, request: Request) -> ServedModel:
        try:
            return _exactly(model_id)
        except ModelNotFound:
            # A name may hold a percent sign that a client did not escape: then the path as it was sent is the name.
            raw = request.scope.get("raw_path", b"").decode("latin-1").partition("/v1/models/")[2]
            if unquote(raw) == model_id and raw != model_id:
                return _exactly(raw)
            raise

    def _exactly(model_id: str) -> ServedModel:
        found = conductor.resolve(model_id)
        if found.id != model_id:  # `<base>:<adapter>` addresses a model but is not the id of one
            raise ModelNotFound(model_id)
        return found

    return router


def model_page(page: list[ServedModel], *, has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": [model_card(model) for model in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": has_more,
    }


def model_card(model: ServedModel) -> dict[str, Any]:
    """One model as vLLM's clients know it."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mstar",
        "root": model.root,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
    }
