"""`specexec worker`: gives this machine's memory to a session on another one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from specexec_cli.cli import options
from specexec_cli.cli.lean_imports import lean_imports
from specexec_cli.cli.live import PassingLine
from specexec_cli.cli.option_groups import Shown, grouped
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.hosts.worker import Offer


@grouped
def worker(
    *,
    asked: Annotated[Request, Shown("model revision models_file offline device cache cache_gb")],
    join: Annotated[
        str,
        typer.Option(metavar="HOST[:PORT]", help="The session's address: `listen` there."),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="Name in the file of hosts. Default: this machine's host name."),
    ] = None,
    ray: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Start one on every other node of a Ray cluster, and write this file of hosts.",
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Run layers of MODEL for a session on another machine.

    The session is opened with --hosts. Both need the model's files and the same SPECEXEC_TOKEN. The
    worker listens nowhere: it joins, opens the layers that it is told, and joins again when a
    session is over. Ctrl-C ends it.
    """
    from specexec_cli.hosts.wire import token_of_environment
    from specexec_cli.planning.hosts import address_of

    address, token = address_of(join), token_of_environment()
    if ray is not None:
        if name is not None:
            raise ConfigError("--name is of one worker: with --ray each is called as its host")
        _on_nodes(_arguments(asked, join, quiet), join, ray)

    def tell(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    with PassingLine("loading the worker", shown=not quiet), lean_imports():
        from specexec_cli.hosts.files import digest_of
        from specexec_cli.hosts.worker import work_for

        offer = _offer(asked, name or socket.gethostname(), tell)
    try:
        digest_of(offer.checkpoint, tell)  # which it then has at hand when a session asks
        work_for(address, token, offer, tell)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _arguments(asked: Request, join: str, quiet: bool) -> list[str]:
    """What workers elsewhere are started with, so that they are asked for what this one is."""
    model = asked.model and (
        str(Path(asked.model).resolve()) if exists(asked.model) else asked.model
    )
    return [
        *([model] if model else []),
        f"--join={join}",
        f"--device={asked.device}",
        *([f"--revision={asked.revision}"] if asked.revision else []),
        *([f"--models-file={asked.models_file.resolve()}"] if asked.models_file else []),
        *([f"--cache-gb={asked.cache_gb}"] if asked.cache_gb else []),
        *([] if asked.cache else ["--no-cache"]),
        *(["--offline"] if asked.offline else []),
        *(["--quiet"] if quiet else []),
        "--name",  # is each node's own
    ]


def _on_nodes(arguments: Sequence[str], join: str, file: Path) -> NoReturn:
    """Starts workers on the other nodes of a Ray cluster, and ends when one of them does."""
    from specexec_cli.hosts.ray_nodes import start_on_nodes, wait_for_one, write_hosts_file

    try:
        workers = start_on_nodes(arguments)
        write_hosts_file(file, join, [*workers])
        print(f"{', '.join(workers)} wait for a session: open it with --hosts {file}", flush=True)
        wait_for_one(workers)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _offer(asked: Request, name: str, notice: Callable[[str], None]) -> Offer:
    """What this machine has for a session: the model's files, and its memory as it is then.

    Arithmetic that no earlier run has measured is measured now.
    """
    from specexec_cli.catalog.hub import fetch
    from specexec_cli.hosts.facts import hello_of
    from specexec_cli.hosts.worker import Offer
    from specexec_cli.loading import pick_device, this_site
    from specexec_cli.offload.store import read_checkpoint
    from specexec_cli.planning.chosen_models import choose_pair, registry_of, sized
    from specexec_cli.planning.dtype_choice import calibrated_for
    from specexec_cli.prefixes.folder import Bound

    device = pick_device(asked.device)
    entry = choose_pair(registry_of(asked), asked).target
    checkpoint = read_checkpoint(fetch(entry, offline=True))
    target = sized(entry, offline=True)
    site = calibrated_for(this_site(device, notice), target)
    flops, layers = site.flops, site.layers
    return Offer(
        checkpoint=checkpoint,
        sizes=target.sizes,
        device=device,
        machine=lambda dtype: this_site(device).machine(dtype),
        hello=lambda: hello_of(name, replace(this_site(device), flops=flops, layers=layers)),
        kept=Bound(asked.cache_bytes) if asked.cache else None,
    )
