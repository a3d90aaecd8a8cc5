"""Fixtures of the API tests: the tiny tokenizer and an application over a scripted conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mstar.api.app import create_app
from mstar.api.text import TextProcessor
from mstar.conductor.metrics import Metrics
from mstar.config import ServeConfig
from tests.unit.api.requests_and_errors import one_token
from tests.unit.api.scripted_conductor import ScriptedConductor
from tests.unit.api.tiny_text import save_tiny_tokenizer


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.load(save_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def make_app(text: TextProcessor) -> Callable[..., FastAPI]:
    def make(conductor: ScriptedConductor, **settings: Any) -> FastAPI:
        metrics = Metrics("tiny")
        app = create_app(conductor, text, ServeConfig(model="/models/tiny", **settings), metrics)
        app.state.metrics = metrics
        return app

    return make


@pytest.fixture
def client_of() -> Callable[[FastAPI], httpx.AsyncClient]:
    """An HTTP client that talks to the application in this process; a 500 is an answer, as over a socket."""

    def client(app: FastAPI, **kwargs: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://test", **kwargs)

    return client


@pytest.fixture
def post(make_app: Callable[..., FastAPI], client_of: Callable[..., httpx.AsyncClient]) -> Callable[..., httpx.Response]:
    """One request against a fresh application; no stream may be left running."""

    def send(
        path: str, body: Any = None, *, method: str = "POST", conductor: ScriptedConductor | None = None, **kwargs: Any
    ) -> httpx.Response:
        played = conductor or ScriptedConductor(one_token)
        settings = kwargs.pop("settings", {})

        async def call() -> httpx.Response:
            async with client_of(make_app(played, **settings)) as client:
                if body is not None:
                    kwargs["json"] = body
                return await client.request(method, path, **kwargs)

        response = asyncio.run(call())
        assert all(len(stream.ends) == 1 for stream in played.streams)
        return response

    return send
