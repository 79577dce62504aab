"""The console's routes."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from deployments.console.files import FILES, ROOT
from deployments.console.state import state_json
from deployments.generation import OverviewBackend


def add_console(app: Starlette, backend: OverviewBackend) -> None:
    """Add the page, its files and its state."""

    async def file(request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        found = FILES[path]
        if request.headers.get("if-none-match") == found.headers["etag"]:
            return Response(status_code=304, headers=dict(found.headers))
        return Response(found.body, headers=dict(found.headers))

    async def state(request: Request) -> Response:
        body = state_json(await backend.overview(), backend.model_card)
        return JSONResponse(body, headers={"cache-control": "no-store"})

    async def home(request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + ROOT)

    for path in FILES:
        app.add_route(path, file, methods=["GET"], include_in_schema=False)
    app.add_route(f"{ROOT}/state", state, methods=["GET"], include_in_schema=False)
    for path in ("/", f"{ROOT}/"):
        app.add_route(path, home, methods=["GET"], include_in_schema=False)
