"""The whole error tree. The class says what happens next.

    MstarError
    ├── ConfigError        refuse to start: exit 2, one readable message
    ├── RequestError       that request gets a reply (4xx, OpenAI's error shape); nothing else changes
    │   ├── ModelNotFound  404 `model_not_found`: the base never answers for an unknown name
    │   └── AdapterError   the load or the request is refused; the name stays free; everything else goes on
    ├── CapacityError      the request waits
    ├── ProtocolError      this process exits; the launcher restarts the instance
    └── WorkerError        the whole instance restarts; streams resume

Leaf module: imports nothing of mstar, so every layer may raise from here.
"""

from __future__ import annotations


class MstarError(Exception):
    """Root of every error that mstar raises on purpose."""


class ConfigError(MstarError):
    """The configuration cannot be served. The message names field, value and what is allowed."""


class RequestError(MstarError):
    """One request is refused.

    `status` is the HTTP status, `code` the string code of OpenAI's error body, `param` the request field at fault.
    """

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status

    @property
    def error_type(self) -> str:
        """OpenAI's `type` for this status."""
        if self.status in (401, 403):
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ModelNotFound(RequestError):
    """The `model` field names nothing that is served."""

    def __init__(self, model: str, hint: str = "") -> None:
        shown = model if len(model) <= 200 else model[:200] + "…"
        super().__init__(
            f"The model `{shown}` does not exist.{' ' + hint if hint else ''}",
            code="model_not_found",
            param="model",
            status=404,
        )


class AdapterError(RequestError):
    """An adapter folder is refused, with the field or key at fault, what was found and what is allowed."""


class CapacityError(MstarError):
    """There is no room now; whoever asked waits. Raised by `admit` only as a backstop."""


class ProtocolError(MstarError):
    """A peer of this epoch broke the protocol: a gap, an undecodable frame, a fingerprint that differs."""


class WorkerError(MstarError):
    """A rank cannot go on; the instance restarts."""
