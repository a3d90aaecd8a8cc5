"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's bodies and texts; and pin and unpin beside them.

Front process, asyncio loop. Only present with `enable_runtime_lora`; the admin key is checked and the audit line written by `guard.py`,
for every call, also for those that never reach a route. A 200 means usable now on every rank.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from mstar.api.schemas import LoadAdapterRequest, UnloadAdapterRequest
from mstar.api.services import Services

LOAD_PATH = "/v1/load_lora_adapter"
UNLOAD_PATH = "/v1/unload_lora_adapter"
PIN_PATH = "/v1/pin_lora_adapter"
UNPIN_PATH = "/v1/unpin_lora_adapter"
ADMIN_PATHS = frozenset((LOAD_PATH, UNLOAD_PATH, PIN_PATH, UNPIN_PATH))


def adapters_router(services: Services) -> APIRouter:
    """The routes over `services`."""
    router = APIRouter()

    @router.post(LOAD_PATH)
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
        """Serve an adapter under a name."""
        request.scope["mstar.audit"] = f"name={body.lora_name!r} path={body.lora_path!r} inplace={body.load_inplace} pinned={body.pinned}"
        await services.conductor.load_adapter(body.lora_name, body.lora_path, load_inplace=body.load_inplace, pinned=body.pinned)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(UNLOAD_PATH)
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
        """Stop serving an adapter."""
        request.scope["mstar.audit"] = f"name={body.lora_name!r}"
        await services.conductor.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @router.post(PIN_PATH)
    async def pin_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
        """Keep an adapter in its slot."""
        request.scope["mstar.audit"] = f"name={body.lora_name!r}"
        await services.conductor.pin_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' pinned successfully.")

    @router.post(UNPIN_PATH)
    async def unpin_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
        """Let an adapter's slot turn again."""
        request.scope["mstar.audit"] = f"name={body.lora_name!r}"
        await services.conductor.unpin_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' unpinned successfully.")

    return router
