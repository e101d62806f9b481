"""`specexec serve`: an OpenAI-compatible server, and a page to chat on."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from specexec_cli.cli import options
from specexec_cli.cli.live import PassingLine
from specexec_cli.cli.opening import opened
from specexec_cli.cli.option_groups import Shown, grouped, with_drafts
from specexec_cli.cli.options import option
from specexec_cli.cli.sampling import settled_sampling
from specexec_cli.config import ADVANCED, GenerationConfig, SamplingChoice
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError
from specexec_cli.planning.request import MOST_SLOTS, Request

if TYPE_CHECKING:
    from socket import socket

    from specexec_cli.serve.guards import Access
    from specexec_cli.serve.service import Defaults
    from specexec_cli.session import TextSession

_SERVER = "Server"
_SLOTS = 4  # default: while weights stream, rows of four texts cost no more time than those of one


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the server itself."""

    host: Annotated[str, option(_SERVER, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option(_SERVER, "Port; 0 takes a free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None,
        option(
            _SERVER, "Key that requests must bring; required where others can reach the server.",
            envvar="SPECEXEC_API_KEY", show_envvar=True,
        ),
    ] = None  # fmt: skip
    cors_origin: Annotated[
        list[str] | None,
        option(
            ADVANCED,
            "A page elsewhere that may ask, as in https://chat.example. May be repeated.",
        ),
    ] = None
    queue: Annotated[
        int, option(ADVANCED, "Texts that may wait; more are refused (429).", min=0, max=10_000)
    ] = 32
    slots: Annotated[
        int | None,
        option(
            _SERVER, "Texts at once, each with memory of its own. Default: 4 where that fits.",
            min=1, max=MOST_SLOTS,
        ),
    ] = None  # fmt: skip

    def access(self) -> Access:
        """Who may ask the server.

        Raises:
            ConfigError: other machines may ask, and there is no key.
        """
        from specexec_cli.serve.guards import Access

        origins = tuple(self.cors_origin or ())
        access = Access(host=self.host, api_key=self.api_key or None, origins=origins)
        if not access.loopback and access.api_key is None:
            raise ConfigError(
                f"--host {self.host} lets other machines ask: set a key with --api-key or "
                "SPECEXEC_API_KEY"
            )
        return access


@grouped
def serve(
    *,
    server: ServerOptions,
    generation: Annotated[GenerationConfig, Shown("max_tokens", max_tokens=1024)],
    context: options.Context = None,
    sampling: Annotated[SamplingChoice, Shown(without="seed")],
    asked: Request,
    yes: options.Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model to programs that speak OpenAI's protocol, and on a page of its own.

    --max-tokens and the sampling options hold for requests that say nothing about them; what no
    option says is as the model's makers sample. A request without a seed gets one of its own.
    Ctrl-C ends the server.
    """
    request = replace(with_drafts(asked), context_tokens=context, remember=True)
    _check_extra()

    from specexec_cli.cli.fetching import fetch_first

    with PassingLine("loading the server", shown=not quiet):
        from specexec_cli.serve.run import listen
        from specexec_cli.serve.service import Defaults

    access = server.access()
    interrupted = False
    with listen(server.host, server.port) as address:  # fails before models load for minutes
        fetch_first(request, yes=yes, quiet=quiet)
        try:
            session, slots = _open(request, server.slots, quiet)
            with session:
                session.context_limit = context
                defaults = Defaults(
                    sampling=settled_sampling(session, sampling, quiet),
                    max_tokens=generation.max_tokens,
                )
                interrupted = _run(session, slots, server.queue, defaults, access, address, quiet)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _run(
    session: TextSession,
    slots: int,
    queue: int,
    defaults: Defaults,
    access: Access,
    address: socket,
    quiet: bool,
) -> bool:
    """Serves until a signal comes; returns whether the signal was Ctrl-C."""
    from specexec_cli.engine.factory import open_engine
    from specexec_cli.serve.run import Server
    from specexec_cli.serve.service import Service

    service = Service(session, open_engine(session, slots=slots, most_waiting=queue), defaults)

    def ready() -> None:
        host = f"[{access.host}]" if ":" in access.host else access.host
        at_once = "a text at a time" if slots == 1 else f"{slots} texts at once"
        if not quiet:
            print(
                f"{service.model} at http://{host}:{address.getsockname()[1]} (the API under /v1), "
                f"{at_once}. Ctrl-C ends",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    server = Server(service, access, ready)
    try:
        server.run(sockets=[address])
    finally:
        service.close()
    return server.interrupted


def _open(request: Request, slots: int | None, quiet: bool) -> tuple[TextSession, int]:
    """Opens a session; returns it with its number of texts at once.

    If `slots` is None, that number is _SLOTS, or 1 if memory or the method does not allow more.
    """
    from specexec_cli.drafting.policies import POLICIES
    from specexec_cli.planning.memory import DoesNotFitError

    policy = request.tree.policy
    one_text = policy is not None and POLICIES[policy].needs not in (None, "cost")
    if slots is None and request.method != "dsi" and not one_text:
        several = replace(request, slots=_SLOTS)
        with contextlib.suppress(DoesNotFitError):
            return opened(several, quiet=quiet), _SLOTS
    slots = slots or 1
    return opened(replace(request, slots=slots), quiet=quiet), slots


def _check_extra() -> None:
    """Checks that the packages are installed that `serve` needs.

    Raises:
        ConfigError: a package is missing.
    """
    from importlib.util import find_spec

    needed = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}: pip install {' '.join(missing)}")
