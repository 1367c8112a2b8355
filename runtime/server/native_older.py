"""Routes that clients of the original system, SGLang, still call and that say nothing new here."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from trellis.runtime.config import ServerConfig
from trellis.runtime.manager.fields import Fields
from trellis.runtime.server.errors import JsonResponse
from trellis.runtime.server.exchange import read_json


def older_routes(config: ServerConfig) -> APIRouter:
    router = APIRouter()

    @router.get("/get_server_args")
    async def server_args() -> Response:
        """The configuration alone; ``/server_info`` has it under ``config``."""
        return JsonResponse(config.public())

    @router.post("/concate_and_append_request")
    async def concatenate_and_append(request: Request) -> Response:
        """A client says that the texts of ``src_rids`` now follow the text of ``dst_rid``.

        Nothing is kept by these ids, and nothing has to be: the client's next request carries the whole text, and
        the part of it that is a cached prefix is found there. So what follows is computed exactly, where keys and
        values that were computed apart from each other would only come near it.
        """
        fields = Fields(await read_json(request))
        for i, each in enumerate(fields.elements("src_rids")):
            fields.check_string(each, f"src_rids[{i}]")
        fields.string("dst_rid")
        fields.done()
        return JsonResponse({"success": True})

    return router
