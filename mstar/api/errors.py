"""Every error of every route in OpenAI's shape: `{"error": {message, type, param, code}}` with a string code.

Front process, asyncio loop. Owns: the mapping from exceptions (ours, FastAPI's validation, Starlette's 404/405/413, anything
unexpected) to one body. Invariant: nothing internal leaks, a 500 says only that it is one; the log has the rest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from mstar.errors import RequestError

logger = logging.getLogger(__name__)

_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}
_SHOWN_CHARS = 80  # of a wrong value in a message
_NOT_AGAIN = ("request_crashed_worker", "deadline_exceeded")  # the same request would do the same again
_RETRY_AFTER_S = {429: "1", 503: "1"}


def error_body(error: RequestError) -> dict[str, Any]:
    """The JSON body of a refused request."""
    return {"error": {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}}


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole HTTP response of a refused request. Lone surrogates in names that clients sent come out escaped."""
    out = dict(headers or {})
    if error.code in _NOT_AGAIN:
        out["x-should-retry"] = "false"  # OpenAI's clients try every 5xx again, and heed this
    if error.status in _RETRY_AFTER_S:
        out.setdefault("Retry-After", _RETRY_AFTER_S[error.status])
    content = json.dumps(error_body(error)).encode("ascii")
    return Response(content, status_code=error.status, headers=out, media_type="application/json")


def internal_error() -> RequestError:
    """What a client is told about our own bugs."""
    return RequestError("The server had an internal error while answering this request.", code="internal_error", status=500)


def body_too_large() -> RequestError:
    """A body over the configured bound."""
    return RequestError("The request body is larger than this server takes (max_body_bytes).", code="body_too_large", status=413)


def install_error_handlers(app: FastAPI) -> None:
    """Make every exception that leaves a route, and every path without a route, an OpenAI error."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected)


def _respond(request: Request, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    request.scope["mstar.error_code"] = error.code  # the audit line names it
    return error_response(error, headers)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _respond(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _respond(request, validation_error(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    if status == 413:
        return _respond(request, body_too_large())
    message = {
        404: f"Unknown path: {request.method} {request.url.path}",
        405: f"{request.method} is not allowed on {request.url.path}",
    }.get(status, str(error.detail) or HTTPStatus(status).phrase)
    code = _CODES.get(status, HTTPStatus(status).phrase.lower().replace(" ", "_"))
    return _respond(request, RequestError(message, code=code, status=status), error.headers)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises it again after this response, so that the server logs the traceback.
    return _respond(request, internal_error())


def validation_error(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The first problem that pydantic found, as one sentence that names the field and shows the value."""
    first = errors[0]
    kind, where = first["type"], [str(part) for part in first["loc"][1:] if not _is_union_branch(part)]
    if kind == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first.get('ctx', {}).get('error', 'cannot be parsed')}.", code="invalid_json")
    if not where:
        return RequestError("The body must be a JSON object, sent with Content-Type: application/json.", code="invalid_json")
    param = ".".join(where)
    if kind == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)
    message = str(first["msg"]).removeprefix("Value error, ")
    return RequestError(f"Invalid '{param}': {message}, found {_shown(first.get('input'))}.", code="invalid_value", param=param)


def _is_union_branch(part: str | int) -> bool:
    """pydantic names the branch of a union in the location (`stop.str`): not a field that the client wrote."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"  # its repr may be as large as the body
    text = repr(value[: _SHOWN_CHARS + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
