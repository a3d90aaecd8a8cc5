"""A running server, as `mstar adapters` talks to it: the model list, the status, the adapter routes.

Own process, blocking. Whatever goes wrong is a `Refused` with the server's own words, or an `Unreachable`.
"""

from __future__ import annotations

from typing import Any

import httpx

CONNECT_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 3600.0  # a hub may be slow; the server has its own bounds for everything else
PAGE = 1000


class Refused(Exception):
    """The server answered with an error: its message, code and status."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status


class Unreachable(Exception):
    """No server answered, or not as one."""


class AdminClient:
    """One server at `url`. `api_key` is for what clients may see, `admin_key` for the adapter routes."""

    def __init__(self, url: str, api_key: str | None, admin_key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._admin_key = admin_key
        timeout = httpx.Timeout(LOAD_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.Client(base_url=self._url, timeout=timeout, transport=transport)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def adapters(self) -> list[dict[str, Any]]:
        """The cards of all served adapters, by name."""
        cards: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            page = self._get("/v1/models", {"limit": str(PAGE)} | ({"after": after} if after is not None else {}))
            cards += [card for card in page["data"] if card["parent"] is not None]
            after = page["last_id"]
            if not page["has_more"]:
                return cards

    def status(self) -> dict[str, Any]:
        """`/mstar/status`: slots and host tier of every rank, and what is pinned."""
        return self._get("/mstar/status", {})

    def load(self, name: str, path: str, *, load_inplace: bool, pinned: bool) -> None:
        """Serve `path` as `name`."""
        self._post("load", {"lora_name": name, "lora_path": path, "load_inplace": load_inplace, "pinned": pinned})

    def name_only(self, verb: str, name: str) -> None:
        """`unload`, `pin` or `unpin`."""
        self._post(verb, {"lora_name": name})

    def _get(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        answer = self._send("GET", path, self._api_key, params=query)
        try:
            found = answer.json()
        except ValueError:
            raise Unreachable(f"{self._url}{path} did not answer as mstar does") from None
        return dict(found)

    def _post(self, verb: str, body: dict[str, Any]) -> None:
        try:
            self._send("POST", f"/v1/{verb}_lora_adapter", self._admin_key, json=body)
        except Refused as refused:
            if refused.code == "not_found":
                hint = "the server was started without --enable-runtime-lora: it loads and unloads nothing by request"
                raise Refused(hint, "runtime_lora_disabled", refused.status) from None
            raise

    def _send(self, method: str, path: str, key: str | None, **options: Any) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            answer = self._http.request(method, path, headers=headers, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"no server answers at {self._url}: {str(error) or type(error).__name__}") from None
        if answer.is_success:
            return answer
        try:
            found = answer.json()["error"]
            refused = Refused(str(found["message"]), str(found["code"]), answer.status_code)
        except (ValueError, KeyError, TypeError):
            raise Unreachable(f"{self._url}{path} answered {answer.status_code}, not as mstar does") from None
        raise refused
