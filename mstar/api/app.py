"""The HTTP application: every route over one conductor.

Front process, asyncio loop; never imports torch. A request goes: guard (keys) -> body limit -> route -> conductor -> answer; whatever goes
wrong on the way leaves through `errors.py`.
"""

from __future__ import annotations

from fastapi import FastAPI

from mstar import __version__
from mstar.api.adapters import adapters_router
from mstar.api.body_limit import BodyLimit
from mstar.api.chat import chat_router
from mstar.api.completions import completions_router
from mstar.api.errors import install_error_handlers
from mstar.api.guard import Guard
from mstar.api.health import health_router
from mstar.api.models import models_router
from mstar.api.seeds import SeedSource
from mstar.api.services import Services
from mstar.api.text import TextProcessor
from mstar.api.tokenize import tokenize_router
from mstar.conductor.metrics import Metrics
from mstar.conductor.types import ConductorApi
from mstar.config import ServeConfig


def create_app(conductor: ConductorApi, text: TextProcessor, config: ServeConfig, metrics: Metrics) -> FastAPI:
    """Build the application. Nothing is started and no socket is bound."""
    services = Services(conductor, text, config, metrics, SeedSource(config.seed))
    app = FastAPI(title="mstar", version=__version__, redirect_slashes=False, redoc_url=None)
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    app.add_middleware(Guard, config=config)  # added last: outermost
    install_error_handlers(app)
    for make_router in (completions_router, chat_router, models_router, tokenize_router, health_router):
        app.include_router(make_router(services))
    if config.enable_runtime_lora:
        app.include_router(adapters_router(services))
    return app
