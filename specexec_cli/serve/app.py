"""The routes of the server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from specexec_cli import __version__
from specexec_cli.serve import chat_completions, metrics
from specexec_cli.serve.api_errors import ApiError, api_error, error_body, shaped, without_folders
from specexec_cli.serve.bodies import ChatBody, CompletionBody, checked
from specexec_cli.serve.chat_answer import ChatAnswer
from specexec_cli.serve.chat_completions import Asked
from specexec_cli.serve.completions import CompletionAnswer
from specexec_cli.serve.conversations import Conversations
from specexec_cli.serve.guards import Access, Guard
from specexec_cli.serve.message_bodies import CountBody, MessageBody
from specexec_cli.serve.message_bodies import chat_body as message_chat
from specexec_cli.serve.messages import MessageAnswer
from specexec_cli.serve.mistakes import told
from specexec_cli.serve.models import Models, Offered
from specexec_cli.serve.prompts import PromptMaker
from specexec_cli.serve.reading import Bodies, Window
from specexec_cli.serve.response_bodies import ResponseBody
from specexec_cli.serve.response_bodies import chat_body as response_chat
from specexec_cli.serve.responses import ResponseAnswer
from specexec_cli.serve.service import Service

_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models",
    "/health", "/metrics",
)  # fmt: skip
_PAGE = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "chats.js": "text/javascript; charset=utf-8",
    "markdown.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
}


_B = TypeVar("_B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class _Chat(Generic[_B]):
    """A chat request of one protocol, whose texts are under way."""

    service: Service
    body: _B
    chat: ChatBody  # the request of chat completions that it stands for
    asked: Asked


def create_app(models: Models, access: Access) -> Any:
    """The ASGI application."""
    # without FastAPI's documentation pages, which load scripts from other servers
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    bodies = Bodies()
    _add_errors(app)
    _add_facts(app, models)
    _add_page(app)
    _add_chat(app, models, bodies)
    _add_completions(app, models, bodies)
    return _guarded(app, access)


def _add_chat(app: FastAPI, models: Models, bodies: Bodies) -> None:
    kept = Conversations()

    async def asked(kind: type[_B], request: Request, chat: Callable[[_B], ChatBody]) -> _Chat[_B]:
        """Reads a body and submits the texts of the chat request that it stands for."""
        async with _opened(models, bodies, request) as (service, found, size):
            body, made = await service.encoding(
                lambda _: _read(kind, found, service.window, chat), size
            )
            return _Chat(service, body, made, await chat_completions.ask(service, made, size))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        it = await asked(ChatBody, request, lambda body: body)
        return await ChatAnswer(it.service, request, it.body, it.asked).response()

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        it = await asked(ResponseBody, request, lambda body: response_chat(body, kept))
        answer = ResponseAnswer(it.service, request, it.body, it.chat, it.asked, kept)
        return await answer.response()

    @app.post("/v1/messages")
    async def message(request: Request) -> Response:
        it = await asked(MessageBody, request, message_chat)
        return await MessageAnswer(it.service, request, it.body, it.asked).response()

    @app.post("/v1/messages/count_tokens")
    async def count(request: Request) -> dict[str, int]:
        async with _opened(models, bodies, request) as (service, found, size):

            def counted(maker: PromptMaker) -> int:
                _, body = _read(CountBody, found, service.window, message_chat)
                tools = chat_completions.offered(body)
                chat_completions.dialect(service, tools)
                return len(chat_completions.prompt_of(maker, body, tools).tokens)

            return {"input_tokens": await service.encoding(counted, size)}


def _read(
    kind: type[_B], found: Any, window: Window, chat: Callable[[_B], ChatBody]
) -> tuple[_B, ChatBody]:
    """A parsed body, checked, and the chat request that it stands for.

    Raises:
        ApiError: a field is wrong, or there is no message, or more of them than may be.
    """
    body = checked(kind, found, window)
    try:
        return body, chat(body)
    except ValidationError as error:
        raise told(error) from error


@asynccontextmanager
async def _opened(
    models: Models, bodies: Bodies, request: Request
) -> AsyncIterator[tuple[Service, Any, int]]:
    """The model that a request names, the request's body, parsed, and its size in bytes."""
    async with bodies.read(request) as raw:
        found = await bodies.parsed(raw)
        name = found.get("model") if isinstance(found, dict) else None
        known = name if isinstance(name, str) else None  # what is no text is told of later
        async with models.use(known, request.is_disconnected) as service:
            yield service, found, len(raw)


def _add_completions(app: FastAPI, models: Models, bodies: Bodies) -> None:
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        async with _opened(models, bodies, request) as (service, found, size):
            body = await service.encoding(
                lambda _: checked(CompletionBody, found, service.window), size
            )
            given: Any = body.prompt
            many = isinstance(given, list) and not isinstance(given[0], int)
            grammar = await chat_completions.json_grammar(service, body)

            def encode(maker: PromptMaker) -> list[Any]:
                prompts = [maker.raw(one) for one in (given if many else [given])]
                return service.texts(body, prompts, body.max_tokens, body.logprobs, grammar)

            texts = service.submit(await service.encoding(encode, size))
        return await CompletionAnswer(service, request, body, texts).response()

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(
            501,
            "this server generates text and has no embeddings: ask a server with an embedding "
            "model for them",
            code="not_supported",
        )


def _guarded(app: FastAPI, access: Access) -> Any:
    guarded: Any = Guard(app, access)
    if access.origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=access.origins, allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send headers of their own
        )  # fmt: skip
    return guarded


def _add_facts(app: FastAPI, models: Models) -> None:
    opened = int(time.time())
    day = datetime.fromtimestamp(opened, UTC).isoformat()

    def described(offered: Offered, name: str) -> dict[str, Any]:
        service = models.service if models.is_open(offered) else None
        facts: dict[str, Any] = {"open": service is not None, "version": __version__}
        if service is not None:
            facts |= {
                "context_length": service.context_length, "layers": service.layers,
                "draft": service.draft, **service.facts,
            }  # fmt: skip
        return {
            "id": name, "object": "model", "created": opened, "owned_by": "specexec",
            "type": "model", "display_name": name, "created_at": day,  # for Anthropic's clients
            "specexec": facts,
        }  # fmt: skip

    @app.get("/v1/models")
    async def listed() -> dict[str, Any]:
        every = [described(offered, offered.names[0]) for offered in models.offered]
        ends = {"has_more": False, "first_id": every[0]["id"], "last_id": every[-1]["id"]}
        return {"object": "list", "data": every, **ends}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return described(models.named(name), name)

    @app.get("/health")
    async def health() -> Response:
        now = models.figures()
        word = "shutting down" if models.closing else "failed" if now.failed else "ok"
        told = {"status": word, "running": now.running, "waiting": now.waiting, "slots": now.slots}
        if word == "ok" and now.failing is not None:
            word = "failing"
            told |= {"status": word, "reason": without_folders(now.failing)}
        return JSONResponse(told, 200 if word == "ok" else 503)

    @app.get("/metrics")
    async def figures() -> Response:
        return Response(metrics.page(models.figures()), media_type=metrics.CONTENT_TYPE)


def _add_page(app: FastAPI) -> None:
    folder = resources.files("specexec_cli.serve") / "page"
    files = {name: (folder / name).read_bytes() for name in _PAGE}

    def sent(name: str) -> Response:
        headers = {"Content-Type": _PAGE[name], "Cache-Control": "no-cache"}
        return Response(files[name], headers=headers)

    @app.get("/")
    async def index() -> Response:
        return sent("index.html")

    @app.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return sent(name)


def _add_errors(app: FastAPI) -> None:
    def sent(request: Request, status: int, body: Any, headers: Any = None) -> Response:
        return JSONResponse(shaped(request.url.path, status, body), status, headers)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: Exception) -> Response:
        found = api_error(error)
        headers = {"Retry-After": "1"} if found.status in (429, 503) else {}
        return sent(request, found.status, found.body, headers)

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        if error.status_code == 404:
            text += f". This server has {', '.join(_ROUTES)}"
        body = error_body(error.status_code, text)
        return sent(request, error.status_code, body, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        found = api_error(error)
        return sent(request, found.status, found.body)
