"""The calls of Ray that `specexec worker --ray` makes, answered without a cluster.

As in Ray, an actor's methods run beside their caller, `max_concurrency` of them at once, what they
return or raise comes with `get`, and an actor is on the node of its scheduling strategy. What is
called otherwise than Ray is called fails. It is not Ray: a test of test_ray_nodes.py makes the same
calls of a real cluster, and is skipped where Ray is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


class RayError(Exception):
    """The base of what `get` raises."""


@dataclass(frozen=True)
class NodeAffinitySchedulingStrategy:
    """That an actor is to be on this node, and on no other."""

    node_id: str
    soft: bool


@dataclass
class FakeRay:
    """A cluster.

    Args:
        nodes: as ray.nodes() tells of them.
        here: the id of the node of this process; None: it is no node of a cluster.
        refusal: what `init` raises where the cluster does not take this process.
    Attributes:
        actors: those that were made, by the ids of their nodes.
    """

    nodes: Sequence[dict[str, Any]]
    here: str | None
    refusal: Exception | None = None
    actors: dict[str, Any] = field(default_factory=dict)

    def _init(self, *, address: str, log_to_driver: bool) -> None:
        assert address == "auto", "a cluster of its own, in place of the one that is there"
        if self.here is None:
            raise ConnectionError("Could not find any running Ray instance.")
        if self.refusal is not None:
            raise self.refusal

    def _remote(self, *, num_cpus: int, max_concurrency: int) -> Callable[[type], Any]:
        def kind_of(kind: type) -> Any:
            def options(*, scheduling_strategy: NodeAffinitySchedulingStrategy) -> Any:
                assert not scheduling_strategy.soft
                return SimpleNamespace(remote=lambda: make(kind, scheduling_strategy.node_id))

            return SimpleNamespace(options=options)

        def make(kind: type, node: str) -> Any:
            made, threads = kind(), ThreadPoolExecutor(max_concurrency)
            self.actors[node] = made

            def method(name: str) -> Any:
                return SimpleNamespace(remote=lambda *a: threads.submit(getattr(made, name), *a))

            return SimpleNamespace(
                **{name: method(name) for name in vars(kind) if not name.startswith("_")}
            )

        return kind_of

    def installed(self) -> Any:
        """The modules in the place of Ray's, as a context."""
        ray, util = ModuleType("ray"), ModuleType("ray.util")
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = (  # type: ignore[attr-defined]
            NodeAffinitySchedulingStrategy
        )
        ray.__dict__.update(
            init=self._init, nodes=lambda: self.nodes, remote=self._remote, get=_get, wait=_wait,
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: self.here),
            exceptions=SimpleNamespace(RayError=RayError), util=util,
        )  # fmt: skip
        return mock.patch.dict(
            sys.modules,
            {"ray": ray, "ray.util": util, "ray.util.scheduling_strategies": strategies},
        )


def _get(asked: Any) -> Any:
    if isinstance(asked, list):
        return [_get(each) for each in asked]
    try:
        return asked.result()
    except Exception as error:
        raise RayError(str(error)) from error


def _wait(asked: list[Future[Any]]) -> tuple[list[Future[Any]], list[Future[Any]]]:
    """One that is done, and the others."""
    done = next(iter(wait(asked, return_when=FIRST_COMPLETED).done))
    return [done], [each for each in asked if each is not done]
