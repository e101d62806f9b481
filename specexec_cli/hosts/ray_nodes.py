"""Workers on the nodes of a Ray cluster that is there already: `specexec worker --ray FILE`.

Every node but the one that this runs on gets a worker, called as its host. Ray starts the workers
and tells when one ends, and no more: what they and the session send each other is specexec's own,
and proved by specexec's token, which never travels. A node where Ray asks for no token is refused,
since anybody who reaches it may run anything there. Workers end with the process that started them,
however that ends.

Ray is imported here alone. It comes with the cluster, in the cluster's version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from specexec_cli.errors import ConfigError, WorkerError
from specexec_cli.hosts.wire import TOKEN_VARIABLE
from specexec_cli.planning.hosts import address_of, read_hosts

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

    def start(self, name: str, arguments: Sequence[str]) -> str | None:
        """Starts the worker; or why it may not be started here."""
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            return f"Ray asks for no token on {name}: start it there with RAY_AUTH_MODE=token"
        if not os.environ.get(TOKEN_VARIABLE):
            return f"{TOKEN_VARIABLE} is not set on {name}: set it in front of `ray start` there"
        command = [sys.executable, "-c", _WORKER, "worker", *arguments, name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        return None

    def wait(self) -> int:
        """The exit code of the worker, once it has ended by itself."""
        return self._process.wait()


def write_hosts_file(path: Path, join: str, names: Sequence[str]) -> None:
    """Writes the file of hosts for a session that these nodes' workers join.

    One that is there, with keys of its user, is kept if it names them all.

    Raises:
        ConfigError: it names another address, or lacks one of them; or it cannot be written.
    """
    if path.exists():
        found = read_hosts(path)
        lacking = {*names} - {host.name for host in found.hosts}
        if lacking or address_of(found.listen) != address_of(join):
            raise ConfigError(
                f'{path} is of other machines: it needs listen = "{join}" and a [[host]] for each '
                f"of {', '.join(names)}; delete it, and it is written anew"
            )
        return
    try:
        path.write_text(
            f'listen = "{join}"\n' + "".join(f'\n[[host]]\nname = "{name}"\n' for name in names)
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


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


def start_on_nodes(arguments: Sequence[str]) -> dict[str, Any]:
    """Starts a worker on every other node of the cluster that this machine is a node of.

    Args:
        arguments: of `specexec worker`, up to its name, which follows.
    Returns:
        the nodes' actors, by the names of their workers. The workers end with this process.
    Raises:
        ConfigError: there is no Ray, or no cluster, or it lets this process not in.
        WorkerError: there is no other node, or one may have no worker.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError:
        raise ConfigError(
            "Ray is not installed here: install the package ray in the cluster's version"
        ) from None

    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError:
        raise ConfigError(
            "no Ray cluster has a node here: run `ray start` on each machine"
        ) from None
    except (RuntimeError, ray.exceptions.RayError) as error:
        why = " ".join(str(error).split("\n\n")[0].split())
        raise ConfigError(
            "the Ray cluster does not take this process, which needs the cluster's versions of "
            f"Ray and Python, and its RAY_AUTH_TOKEN: {why}"
        ) from error
    nodes = other_nodes(ray.nodes(), ray.get_runtime_context().get_node_id())
    kind = ray.remote(num_cpus=0, max_concurrency=2)(Node)
    actors = {
        name: kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(at, soft=False))
        .remote()
        for name, at in nodes.items()
    }  # fmt: skip
    try:
        said = ray.get([each.start.remote(name, arguments) for name, each in actors.items()])
    except ray.exceptions.RayError as error:
        raise WorkerError(f"Ray starts no worker: {error}") from error
    if refusals := [why for why in said if why]:
        raise WorkerError("; ".join(refusals))
    return actors


def wait_for_one(actors: dict[str, Any]) -> NoReturn:
    """Waits until one of the workers has ended.

    Raises:
        WorkerError: it has.
    """
    import ray

    waits = {each.wait.remote(): name for name, each in actors.items()}
    (ended,), _ = ray.wait([*waits])
    try:
        how = f"with code {ray.get(ended)}"
    except ray.exceptions.RayError as error:
        how = f"as Ray tells: {error}"
    raise WorkerError(f"the worker on {waits[ended]} has ended, {how}")
