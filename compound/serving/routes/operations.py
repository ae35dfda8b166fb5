"""Routes for operators: liveness, readiness and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from compound.serving.routes.runs import Handler
from compound.serving.service import Service
from compound.web.problems import json_response


def operation_handlers(service: Service) -> dict[str, Handler]:
    """Return the handlers by path."""

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        status = "draining" if service.draining else "ready" if service.ready else "starting"
        document = {"status": status, "configuration": service.deployments.current.digest}
        if service.deployments.problem:
            document["warning"] = "the last configuration file was rejected; see the log"
        return json_response(document, 200 if status == "ready" else 503)

    async def metrics(request: Request) -> Response:
        service.metrics.deployed(service.deployments.current.digest)
        content, kind = service.metrics.text(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": kind})

    return {"/health": health, "/ready": ready, "/metrics": metrics}
