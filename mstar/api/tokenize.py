"""POST /tokenize and /detokenize, with vLLM's bodies.

Front process, asyncio loop.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from mstar.api.chat import encode_chat
from mstar.api.prompts import check_token_ids
from mstar.api.responses import JsonResponse
from mstar.api.schemas import DetokenizeRequest, TokenizeRequest
from mstar.api.services import Services
from mstar.errors import RequestError


def tokenize_router(services: Services) -> APIRouter:
    """The routes over `services`."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of a chat as the template renders it."""
        served = await services.find(body.model) if body.model is not None else None
        tokens = await _encode(body, served.chat_template if served is not None else None)
        out: dict[str, Any] = {"count": len(tokens), "max_model_len": services.conductor.max_model_len(), "tokens": tokens}
        if body.return_token_strs:
            out["token_strs"] = [services.text.token_piece(token) for token in tokens]
        return JsonResponse(out)

    async def _encode(body: TokenizeRequest, chat_template: str | None) -> tuple[int, ...]:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either 'prompt' or 'messages'.", code="invalid_value", param="prompt")
        if body.messages is None:
            return await services.text.encode_async(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        return await encode_chat(
            services.text,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            chat_template=chat_template,
            add_special_tokens=body.add_special_tokens,
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        if body.model is not None:
            await services.find(body.model)
        check_token_ids(body.tokens, services.text.vocab_size, param="tokens")
        return JsonResponse({"prompt": services.text.decode(body.tokens)})

    return router
