"""What the server under test is: asked once, before anything is timed. httpx; proxies from the environment are ignored, as the load does.

Only `/v1/models` has to be there, and not even that if base and adapters are named. `/version` and `/tokenize` are used where they exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from mstar.bench.http1 import Address, parse_base_url
from mstar.bench.prompts import WORDS, seen_ids
from mstar.errors import ConfigError

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server, known by what it says of itself. `models` maps each served name to its parent (None for a base)."""

    address: Address
    api_key: str | None
    version: str | None
    models: dict[str, str | None]

    def base_name(self, wanted: str | None) -> str:
        """`wanted`, or the first base that is served. Raises ConfigError if there is none to take."""
        if wanted is not None:
            return wanted
        bases = [name for name, parent in self.models.items() if parent is None]
        if not bases:
            raise ConfigError(f"{self.address.url}/v1/models lists no base model: give --model NAME")
        return bases[0]

    def adapter_names(self, base: str) -> tuple[str, ...]:
        """Every served adapter of `base`, in the server's order (all adapters if none names `base` as its parent)."""
        children = {name: parent for name, parent in self.models.items() if parent is not None}
        return tuple(name for name, parent in children.items() if parent == base) or tuple(children)


def ask_server(base_url: str, api_key: str | None) -> Server:
    """Who answers there. Raises ConfigError, in one line, if nobody does or the key is refused."""
    address = parse_base_url(base_url)
    version = _get(address, api_key, "/version")
    listed = _get(address, api_key, "/v1/models")
    return Server(address, api_key, _version_text(version), _read_models(listed))


def ask_token_pool(server: Server, model: str) -> tuple[int, ...]:
    """Ids of ordinary words, as this server's tokenizer has them. Raises ConfigError if it has no usable `/tokenize`."""
    body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    reply = _call(server.address, server.api_key, "POST", "/tokenize", body)
    tokens: Any = _json_object(reply).get("tokens") if reply.status_code == 200 else None
    if not isinstance(tokens, Sequence) or not all(isinstance(token, int) for token in tokens):
        raise ConfigError(f"{server.address.url} has no usable /tokenize (HTTP {reply.status_code}): give --vocab-size N, or --text")
    return seen_ids(tokens)


def _call(address: Address, api_key: str | None, method: str, path: str, body: object = None) -> httpx.Response:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, headers=headers) as client:
            reply = client.request(method, address.url + path, json=body)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"cannot reach {address.url}: {reason}") from error
    if reply.status_code in (401, 403):
        hint = "needs --api-key" if api_key is None else "refuses this --api-key"
        raise ConfigError(f"{address.url}{path} {hint} (HTTP {reply.status_code})")
    return reply


def _get(address: Address, api_key: str | None, path: str) -> dict[str, Any]:
    """The JSON object at `path`; empty if the server has none there."""
    reply = _call(address, api_key, "GET", path)
    return _json_object(reply) if reply.status_code == 200 else {}


def _json_object(reply: httpx.Response) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(reply.content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _version_text(found: dict[str, Any]) -> str | None:
    if not found:
        return None
    version = found.get("version")
    return version if isinstance(version, str) else msgspec.json.encode(found).decode()[:200]


def _read_models(found: dict[str, Any]) -> dict[str, str | None]:
    entries = found.get("data")
    cards = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return {str(card.get("id")): card.get("parent") for card in cards}
