"""The HTTP application: routes, and how failures leave it. Knows a ``Backend``, not Ray."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from deployments import __version__, console, telemetry
from deployments.generation import Backend, ModelCard, OverviewBackend
from deployments.observing.watch import Watch
from deployments.openai.answer import CHAT, COMPLETION, Answer, Dialect
from deployments.openai.docs import FAILURES, document_bodies
from deployments.openai.errors import BodyTimeout, MethodNotAllowed, RouteNotFound
from deployments.openai.fields import ignored_fields
from deployments.openai.limits import Limits
from deployments.openai.middleware import (
    BearerAuth,
    BodyLimit,
    RequestContext,
    client_of,
    failure_response,
    request_id_of,
)
from deployments.openai.parse import Schema, check_headers, parse_body
from deployments.openai.prepare import effective_defaults, require_model
from deployments.openai.reading import reading_of
from deployments.openai.respond import GenerationResponse
from deployments.openai.responses.answer import ResponseAnswer, renamed
from deployments.openai.responses.conversation import as_chat, in_words_of_responses
from deployments.openai.responses.schema import ResponsesRequest
from deployments.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.openai.tokenizing import DetokenizeRequest, Json, TokenizeRequest, detokenize, tokenize
from deployments.openai.unserved import reason_of
from deployments.preparing import Preparer
from dflash_core.errors import DFlashError

OPEN_PATHS = ("/health", *console.PATHS)
_MAX_SHOWN = 100  # characters of a path in a message


def create_app(
    backend: OverviewBackend,
    *,
    limits: Limits | None = None,
    api_keys: tuple[str, ...] = (),
    open_paths: tuple[str, ...] = OPEN_PATHS,
    returns_request_id: bool = True,
    watch: Watch | None = None,
) -> FastAPI:
    """Build the application over a backend. Without ``api_keys`` everybody may come in.

    ``returns_request_id`` is false behind a proxy that returns the id itself, or clients would see two.
    """
    limits = limits or Limits()
    app = FastAPI(title="DFlash Serve", version=__version__, redirect_slashes=False)
    preparer = Preparer(backend, limits)
    _add_generation(app, backend, limits, preparer)
    _add_tokenizing(app, backend, limits, preparer)
    _add_models(app, backend)
    _add_operations(app, backend)
    console.add_console(app, backend)
    _add_failures(app)
    document_bodies(app)
    # The last added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    if api_keys:
        app.add_middleware(BearerAuth, api_keys=api_keys, open_paths=open_paths)
    app.add_middleware(RequestContext, returns_id=returns_request_id, watch=watch)
    return app


def _add_generation(app: FastAPI, backend: Backend, limits: Limits, preparer: Preparer) -> None:
    async def respond(request: Request, schema: type[GenerationRequest], dialect: Dialect) -> Response:
        check_headers(request.headers)
        body = await _read_body(request, limits.body_timeout_s)
        parsed = parse_body(body, schema)
        ignored = ignored_fields(parsed.extra)
        generation = await preparer.prepare(parsed, len(body), request_id_of(request.scope))
        generation = replace(generation, client=client_of(request.scope))
        reading = await preparer.run(len(body), reading_of, parsed, generation.prompt_ids, backend.tokenizer)
        answer = Answer(generation, dialect, backend.tokenizer, reading)
        return GenerationResponse(backend, generation, answer, limits, _told(ignored))

    @app.post("/v1/chat/completions", responses=FAILURES)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        return await respond(request, ChatRequest, CHAT)

    @app.post("/v1/completions", responses=FAILURES)
    async def completions(request: Request) -> Response:
        """Continue a prompt, whole or as server-sent events."""
        return await respond(request, CompletionRequest, COMPLETION)

    @app.post("/v1/responses", responses=FAILURES)
    async def responses(request: Request) -> Response:
        """Answer with typed items, whole or as server-sent events. Nothing is stored."""
        check_headers(request.headers)
        body = await _read_body(request, limits.body_timeout_s)
        parsed = parse_body(body, ResponsesRequest)
        chat, ignored = as_chat(parsed)
        with in_words_of_responses():
            generation = await preparer.prepare(chat, len(body), request_id_of(request.scope))
            reading = await preparer.run(
                len(body), reading_of, chat, generation.prompt_ids, backend.tokenizer
            )
        generation = replace(renamed(generation), client=client_of(request.scope))
        answer = ResponseAnswer(generation, parsed, backend.tokenizer, reading)
        return GenerationResponse(backend, generation, answer, limits, _told(ignored))


def _told(ignored: Sequence[str]) -> dict[str, str]:
    return {"x-dflash-ignored": ", ".join(ignored)} if ignored else {}


def _add_tokenizing(app: FastAPI, backend: Backend, limits: Limits, preparer: Preparer) -> None:
    async def respond(request: Request, schema: type[Schema], work: Callable[[Schema, Backend], Json]):
        check_headers(request.headers)
        body = await _read_body(request, limits.body_timeout_s)
        return JSONResponse(await preparer.run(len(body), work, parse_body(body, schema), backend))

    @app.post("/tokenize", responses=FAILURES)
    async def tokens(request: Request) -> Response:
        """Show the tokens of a prompt or a conversation."""
        return await respond(request, TokenizeRequest, tokenize)

    @app.post("/detokenize", responses=FAILURES)
    async def text(request: Request) -> Response:
        """Show the text of tokens."""
        return await respond(request, DetokenizeRequest, detokenize)


async def _read_body(request: Request, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await request.body()
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout_s:g} seconds.") from None


def _add_models(app: FastAPI, backend: Backend) -> None:
    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """List the served names."""
        card = backend.model_card
        return JSONResponse({"object": "list", "data": [_model(name, card) for name in card.names]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> JSONResponse:
        """Describe one served name."""
        require_model(model_id, backend.model_card)
        return JSONResponse(_model(model_id, backend.model_card))


def _model(name: str, card: ModelCard) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.names[0],
        "parent": None,
        "max_model_len": card.max_context,
        "dflash": {
            "drafter": card.drafter,
            "block_size": card.block_size,
            "defaults": effective_defaults(card),
        },
    }


def _add_operations(app: FastAPI, backend: OverviewBackend) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> JSONResponse:
        """Tell the server's state; 503 unless it takes requests."""
        state = dict(await backend.health())
        return JSONResponse(state, 200 if state.get("status") == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Show the statistics as Prometheus text."""
        page = telemetry.render(router.snapshot for router in (await backend.overview()).routers)
        return Response(page, headers={"content-type": telemetry.CONTENT_TYPE})

    @app.get("/version")
    async def version() -> JSONResponse:
        """Tell the version of the server."""
        return JSONResponse({"version": __version__})


def _add_failures(app: FastAPI) -> None:
    @app.exception_handler(DFlashError)
    async def ours(request: Request, error: DFlashError) -> Response:
        return failure_response(error, request.scope)

    @app.exception_handler(HTTPException)
    async def frameworks(request: Request, error: HTTPException) -> Response:
        # Not ``request.url``: that one is put together with the header ``host``, whatever it says.
        shown = request.scope["path"]
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
        path = f"{request.method[:_MAX_SHOWN]} {shown}"
        translated: DFlashError
        match error.status_code:
            case 404:
                reason = reason_of(request.scope["path"].removeprefix(request.scope.get("root_path", "")))
                because = f"Not served: {path}: {reason}." if reason else f"Unknown route: {path}."
                translated = RouteNotFound(f"{because} See /docs for those that exist.")
            case 405:
                translated = MethodNotAllowed(f"Not allowed: {path}.")
            case _:
                translated = DFlashError(str(error.detail))
        response = failure_response(translated, request.scope)
        response.headers.update(error.headers or {})
        return response
