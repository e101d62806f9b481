"""Starts `specexec worker` on the nodes of a Ray cluster that is there already (docs/hosts.md).

    export SPECEXEC_TOKEN=...                # in front of `ray start` on every node, and here
    python scripts/ray_workers.py MODEL --join 192.168.1.10 --hosts hosts.toml

Run it on the node where the session is to be opened, with --hosts and the file that this writes.
Every other node gets a worker, called as its host. Ray starts the workers and tells when one ends,
and no more: what they and the session send each other is specexec's own, and proved by specexec's
token, which never travels. A node where Ray asks for no token is refused, since anybody who reaches
it may run anything there. Workers end with this command, however it ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specexec_cli.errors import SpecexecError, WorkerError
from specexec_cli.hosts.wire import TOKEN_VARIABLE, token_of_environment
from specexec_cli.planning.hosts import address_of

# A worker whose standard input ends has lost the actor that started it, also where that was killed
# and Ray is too old to end what it had started.
_WORKER = """
import os, sys, threading
from specexec_cli.cli.main import main
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
sys.exit(main())
"""


class Node:
    """An actor: a worker on its node, in a process of its own that ends with the actor."""

    def start(self, name: str, options: Sequence[str]) -> str | None:
        """Starts the worker; or why it may not be started here."""
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            return f"Ray asks for no token on {name}: start it there with RAY_AUTH_MODE=token"
        if not os.environ.get(TOKEN_VARIABLE):
            return f"{TOKEN_VARIABLE} is not set on {name}: set it in front of `ray start` there"
        command = [sys.executable, "-c", _WORKER, "worker", *options, "--name", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        return None

    def wait(self) -> int:
        """The exit code of the worker, once it has ended by itself."""
        return self._process.wait()


def hosts_file(join: str, names: Sequence[str]) -> str:
    """The file of hosts for a session that these nodes' workers join."""
    return f'listen = "{join}"\n' + "".join(f'\n[[host]]\nname = "{name}"\n' for name in names)


def other_nodes(nodes: Sequence[dict[str, Any]], here: str) -> dict[str, str]:
    """The ids of all nodes but this one, by host name; of one host's, all but the first are
    numbered.

    Raises:
        WorkerError: there is none.
    """
    found, seen = dict[str, str](), Counter[str]()
    for node in nodes:
        if node["Alive"] and node["NodeID"] != here:
            name = node["NodeManagerHostname"]
            seen[name] += 1
            found[name if seen[name] == 1 else f"{name}-{seen[name]}"] = node["NodeID"]
    if not found:
        raise WorkerError("the Ray cluster has no other node: run `ray start` on each machine")
    return found


def run(model: str, join: str, hosts: Path) -> None:
    """Starts all workers, and waits until one ends.

    Raises:
        WorkerError: a node may not have one, or one has ended.
    """
    token_of_environment()
    address_of(join)

    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address="auto", log_to_driver=True)
    nodes = other_nodes(ray.nodes(), ray.get_runtime_context().get_node_id())
    kind = ray.remote(num_cpus=0, max_concurrency=2)(Node)
    actors = {
        name: kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(at, soft=False))
        .remote()
        for name, at in nodes.items()
    }  # fmt: skip
    begun = [each.start.remote(name, [model, "--join", join]) for name, each in actors.items()]
    if refusals := [why for why in ray.get(begun) if why]:
        raise WorkerError("; ".join(refusals))
    hosts.write_text(hosts_file(join, [*nodes]))
    print(f"{', '.join(nodes)} wait for a session: open it with --hosts {hosts}", flush=True)
    waits = {each.wait.remote(): name for name, each in actors.items()}
    (ended,), _ = ray.wait([*waits])
    try:
        how = f"with code {ray.get(ended)}"
    except ray.exceptions.RayError as error:
        how = f"as Ray tells: {error}"
    raise WorkerError(f"the worker on {waits[ended]} has ended, {how}")


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--join", required=True, help="address of this node, for the workers")
    parser.add_argument("--hosts", type=Path, required=True, help="the file of hosts to write")
    args = parser.parse_args()
    try:
        run(args.model, args.join, args.hosts)
    except SpecexecError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
