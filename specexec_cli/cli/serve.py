"""`specexec serve`: a server of OpenAI's and Anthropic's protocols, and a page to chat on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specexec_cli.cli import options
from specexec_cli.cli.complete import names
from specexec_cli.cli.lean_imports import lean_imports, load_torch_beside
from specexec_cli.cli.live import PassingLine
from specexec_cli.cli.opening import opened
from specexec_cli.cli.option_groups import Shown, grouped, with_drafts
from specexec_cli.cli.options import option
from specexec_cli.cli.sampling import settled_sampling
from specexec_cli.config import (
    ADVANCED,
    AUTO_DRAFT,
    SELF_DRAFTS,
    SUFFIX,
    GenerationConfig,
    SamplingChoice,
)
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError
from specexec_cli.planning.request import MOST_SLOTS, Request

if TYPE_CHECKING:
    from socket import socket

    from specexec_cli.serve.guards import Access
    from specexec_cli.serve.models import Models, Offered
    from specexec_cli.serve.service import Service
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

    idle_unload: Annotated[
        int | None,
        option(
            ADVANCED, "Seconds without a text after which a model leaves memory. Default: never.",
            min=1,
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
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            autocompletion=names,
            help="Further models, which requests may name.",
        ),
    ] = None,
    yes: options.Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve models by OpenAI's and Anthropic's protocols and a page.

    --max-tokens and the sampling options hold for requests that say nothing about them; what no
    option says is as the model's makers sample. A request without a seed gets one of its own.
    Ctrl-C ends the server.
    """
    request = replace(with_drafts(asked), context_tokens=context, remember=True)
    _check_extra()
    load_torch_beside()
    requests = _each(request, more or [])

    from specexec_cli.cli.fetching import fetch_first

    with PassingLine("loading the server", shown=not quiet), lean_imports():
        from specexec_cli.serve.models import Models, Offered
        from specexec_cli.serve.run import listen

    access = server.access()
    interrupted = False

    def opens(one: Request, quiet: bool) -> Callable[[], Service]:
        return lambda: _service(one, server, generation.max_tokens, sampling, quiet)

    with listen(server.host, server.port) as address:  # fails before models load for minutes
        for one in requests:
            fetch_first(one, yes=yes, quiet=quiet)
        offered = [Offered(names=_names(one), open=opens(one, True)) for one in requests]
        _check_names(offered)
        try:
            models = Models(offered, opens(request, quiet)(), server.idle_unload)
            try:
                interrupted = _run(models, access, address, quiet)
            finally:
                models.close()
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _each(request: Request, more: Sequence[str]) -> list[Request]:
    """The request for each of the models.

    Raises:
        ConfigError: an option is for one model alone.
    """
    own = {
        "draft": request.draft, "revision": request.revision, "tokenizer": request.tokenizer,
        "hosts": request.hosts,  # whose workers have one model's files
    }  # fmt: skip
    for name, value in own.items() if more else ():
        if value not in (None, SUFFIX, AUTO_DRAFT, *SELF_DRAFTS):
            raise ConfigError(f"--{name} is for one model, and several are named: leave it out")
    return [request, *(replace(request, model=name) for name in more)]


def _names(request: Request) -> tuple[str, ...]:
    """The names by which a model may be asked for: without folders, and a hub id in whole too."""
    from specexec_cli.catalog.models_file import is_path
    from specexec_cli.planning.chosen_models import choose_pair, registry_of

    pair = choose_pair(registry_of(request), request)
    names = [pair.name, pair.target.name]
    whole = [name for name in names if not (is_path(name) or Path(name).exists())]
    return tuple(dict.fromkeys([*whole, *(Path(name).name for name in names)]))


def _check_names(offered: Sequence[Offered]) -> None:
    """Checks that each model has a name of its own.

    Raises:
        ConfigError: two have the same.
    """
    own = [one.names[0] for one in offered]
    for name in own:
        if own.count(name) > 1:
            raise ConfigError(
                f"two of the models are called '{name}': requests could not tell them apart"
            )


def _service(
    request: Request, server: ServerOptions, max_tokens: int, sampling: SamplingChoice, quiet: bool
) -> Service:
    """Opens a model, with the engine that runs its texts."""
    from specexec_cli.engine.factory import open_engine
    from specexec_cli.serve.service import Defaults, Service

    with contextlib.ExitStack() as opened_so_far:
        session, slots = _open(request, server.slots, quiet)
        opened_so_far.callback(session.close)
        session.context_limit = request.context_tokens
        chosen = settled_sampling(session, sampling, quiet)
        engine = open_engine(session, slots=slots, most_waiting=server.queue)
        opened_so_far.callback(engine.close)
        service = Service(session, engine, Defaults(sampling=chosen, max_tokens=max_tokens))
        opened_so_far.pop_all()  # they stay open
        return service


def _run(models: Models, access: Access, address: socket, quiet: bool) -> bool:
    """Serves until a signal comes; returns whether the signal was Ctrl-C."""
    from specexec_cli.serve.run import Server

    def ready() -> None:
        host = f"[{access.host}]" if ":" in access.host else access.host
        slots, more = models.figures().slots, len(models.offered) - 1
        at_once = "a text at a time" if slots == 1 else f"{slots} texts at once"
        others = f" and {more} more" if more else ""
        if not quiet:
            print(
                f"{models.offered[0].names[0]}{others} at http://{host}:{address.getsockname()[1]} "
                f"(the API under /v1), {at_once}. Ctrl-C ends",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    server = Server(models, access, ready)
    server.run(sockets=[address])
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
