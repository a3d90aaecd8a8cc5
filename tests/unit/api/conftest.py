"""Fixtures of the API tests: the tiny tokenizer and an application over a scripted conductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mstar.api.app import create_app
from mstar.api.text import TextProcessor
from mstar.conductor.metrics import Metrics
from mstar.config import ServeConfig
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
