"""The routes of the server."""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from specexec_cli import __version__
from specexec_cli.serve import chat_completions, metrics
from specexec_cli.serve.api_errors import ApiError, api_error, error_body, without_folders
from specexec_cli.serve.bodies import ChatBody, CompletionBody, parsed
from specexec_cli.serve.completions import CompletionAnswer
from specexec_cli.serve.guards import Access, Guard
from specexec_cli.serve.prompts import Prompt, PromptMaker
from specexec_cli.serve.reading import Bodies
from specexec_cli.serve.service import Service

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
_PAGE = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "chats.js": "text/javascript; charset=utf-8",
    "markdown.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
}


def create_app(service: Service, access: Access) -> Any:
    """The ASGI application."""
    # without FastAPI's documentation pages, which load scripts from other servers
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    bodies = Bodies()
    _add_errors(app)
    _add_facts(app, service)
    _add_page(app)
    _add_chat(app, service, bodies)
    _add_completions(app, service, bodies)
    return _guarded(app, access)


def _add_chat(app: FastAPI, service: Service, bodies: Bodies) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        async with bodies.read(request) as raw:
            size = len(raw)
            body = await service.encoding(lambda _: parsed(ChatBody, raw, service.window), size)
            service.check_model(body.model)
            tools = chat_completions.offered(body)
            known = chat_completions.dialect(service, tools)
            count = body.max_completion_tokens or body.max_tokens
            top = chat_completions.top_logprobs(body)
            grammar = await chat_completions.grammar(service, body, tools, known)

            def encode(maker: PromptMaker) -> tuple[Prompt, list[Any]]:
                prompt = maker.chat(
                    chat_completions.template_messages(body.messages),
                    [tool.model_dump(exclude_none=True) for tool in tools] or None,
                    chat_completions.thinking(body),
                    answer_at_once=grammar is not None,
                )
                return prompt, service.texts(body, [prompt], count, top, grammar)

            prompt, requests = await service.encoding(encode, size)
            texts = service.submit(requests)
        answer = chat_completions.ChatAnswer(service, request, body, texts, prompt, known, tools)
        return await answer.response()


def _add_completions(app: FastAPI, service: Service, bodies: Bodies) -> None:
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        async with bodies.read(request) as raw:
            size = len(raw)
            body = await service.encoding(
                lambda _: parsed(CompletionBody, raw, service.window), size
            )
            service.check_model(body.model)
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


def _add_facts(app: FastAPI, service: Service) -> None:
    opened = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": opened, "owned_by": "specexec",
            "specexec": {
                "context_length": service.context_length, "layers": service.layers,
                "draft": service.draft, "version": __version__, **service.facts,
            },
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(service.model)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return described(name)

    @app.get("/health")
    async def health() -> Response:
        now = service.engine.figures()
        word = "shutting down" if service.closing else "failed" if now.failed else "ok"
        told = {"status": word, "running": now.running, "waiting": now.waiting, "slots": now.slots}
        if word == "ok" and now.failing is not None:
            word = "failing"
            told |= {"status": word, "reason": without_folders(now.failing)}
        return JSONResponse(told, 200 if word == "ok" else 503)

    @app.get("/metrics")
    async def figures() -> Response:
        return Response(metrics.page(service.engine), media_type=metrics.CONTENT_TYPE)


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
    @app.exception_handler(ApiError)
    async def told(request: Request, error: Exception) -> Response:
        found = api_error(error)
        headers = {"Retry-After": "1"} if found.status in (429, 503) else {}
        return JSONResponse(found.body, found.status, headers)

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        if error.status_code == 404:
            text += f". This server has {', '.join(_ROUTES)}"
        return JSONResponse(error_body(error.status_code, text), error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        found = api_error(error)
        return JSONResponse(found.body, found.status)
