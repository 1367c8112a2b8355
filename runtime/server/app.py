"""The HTTP application over a runtime, be it in this process or behind a supervisor."""

from __future__ import annotations

from fastapi import FastAPI

from trellis.runtime.server.auth import BearerAuth
from trellis.runtime.server.errors import install_error_handlers
from trellis.runtime.server.native import native_routes
from trellis.runtime.server.openai import openai_routes
from trellis.runtime.server.runtime import Runtime


def create_app(runtime: Runtime) -> FastAPI:
    """All routes. The runtime stays the caller's: it is neither started nor closed here."""
    app = FastAPI(title="Trellis", description="A server for model programs.")
    app.include_router(native_routes(runtime))
    app.include_router(openai_routes(runtime))
    install_error_handlers(app)
    if runtime.config.api_key is not None:
        app.add_middleware(BearerAuth, key=runtime.config.api_key)
    return app
