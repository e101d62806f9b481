"""A session whose target runs on several devices at once: --method dsi.

The models live in worker processes; this one keeps the tokenizer, the orchestrator and the text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from specexec_cli.config import BenchMethod, DsiOptions, Method, SamplingConfig, TreeConfig
from specexec_cli.core import GenerationStats, PassProgress, StepResult
from specexec_cli.device import peak_ram_bytes
from specexec_cli.dsi.decoding import dsi
from specexec_cli.dsi.engine import ModelSpec, load_drafter, load_target
from specexec_cli.dsi.messages import DRAFTER
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.dsi.plan import DsiPlan, make_plan
from specexec_cli.dsi.processes import ProcessWorkers
from specexec_cli.dsi.ray_workers import RayCluster, RayWorkers
from specexec_cli.errors import ConfigError
from specexec_cli.opening import Found, Notice, pick_device
from specexec_cli.session import Session

_PATIENCE = 20.0  # a worker this many times slower than measured counts as hung


class DsiSession(Session):
    """Generates through a pool of workers; everything else is a Session's."""

    distributed = True

    def __init__(
        self,
        found: Found,
        workers: ProcessWorkers | RayWorkers,
        plan: DsiPlan,
        settings: Mapping[str, str],
        notice: Notice,
    ) -> None:
        # not super().__init__: no model is in this process
        self.choice = found.choice
        self.tokenizer = found.tokenizer
        self.eos_ids = found.eos_ids
        self.settings = {**found.settings, **settings}
        self.stats = GenerationStats()
        self.context = []
        self._drafter = None
        self._workers = workers
        config = DsiConfig(lookahead=plan.lookahead, timeout_s=_PATIENCE * plan.long_pass_s + 60.0)
        self._orchestrator = Orchestrator(workers, config, notice)
        self._passes_before = self._bytes_before = 0
        self._shortest_window = min(ready.context_length for ready in workers.ready.values())
        self._layers = int(found.config.num_hidden_layers)
        self._vocab_size = int(found.config.vocab_size)

    @property
    def method(self) -> Method:
        """Always over all devices."""
        return "dsi"

    @property
    def _window(self) -> int:
        return self._shortest_window

    @property
    def vocab_size(self) -> int:
        """Tokens that the target knows."""
        return self._vocab_size

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""
        return self._layers

    def on_layer(self, callback: Callable[[PassProgress], None]) -> None:
        """No live status: several passes run at once, none of them here."""

    def _prepare(self, tokens: Sequence[int], limit: int, tree: TreeConfig) -> None:
        self.context = list(tokens)
        self.stats = GenerationStats(prompt_tokens=len(tokens))
        self._passes_before = self._orchestrator.passes
        self._bytes_before = self._orchestrator.bytes_streamed

    def _steps(
        self,
        tokens: Sequence[int],
        limit: int,
        sampling: SamplingConfig,
        tree: TreeConfig,
        method: Method | BenchMethod | None,
        continuation: Sequence[int],
    ) -> Iterator[StepResult]:
        return dsi(self._workers, self._orchestrator, sampling, tokens, limit, self.eos_ids)

    def _count(self, step: StepResult, elapsed_s: float) -> None:
        """Passes are those begun, prefills and stale ones included, and bytes are theirs."""
        stats = self.stats
        if stats.target_passes == 0:
            stats.ttft_s = elapsed_s
            stats.first_tokens = len(step.tokens)
            stats.prompt_rows = step.pending_rows
        stats.add(step)
        stats.target_passes = self._orchestrator.passes - self._passes_before
        stats.bytes_streamed = self._orchestrator.bytes_streamed - self._bytes_before
        stats.total_s = elapsed_s
        stats.peak_ram_bytes = peak_ram_bytes()

    def close(self) -> None:
        """Ends every worker; idempotent."""
        self._workers.close()


def choose_devices(options: DsiOptions, device: str) -> list[str]:
    """Where workers run: --devices, else --device, else every GPU, else the CPU.

    Raises:
        ConfigError: a device that is not here.
    """
    named = options.devices or (() if device == "auto" else (device,))
    if named:
        return [str(pick_device(name)) for name in named]
    return [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]


def target_servers(options: DsiOptions, devices: Sequence[str]) -> int:
    """Instances of the target: --sp, else as the devices allow."""
    # from three devices on, the drafter has one to itself
    return options.sp or (len(devices) - 1 if len(devices) > 2 else len(devices))


def open_dsi(found: Found, options: DsiOptions, device: str, notice: Notice) -> DsiSession | None:
    """Starts the workers and measures them; None, with a notice, where DSI would not pay.

    Numbers given by the user (--sp, --lookahead) are obeyed whatever the plan says.

    Raises:
        WorkerError: a worker did not start.
    """
    if found.draft is None:
        return None
    found.check_tokenizers()
    cluster = RayCluster(options.ray) if options.ray is not None else None
    devices = ray_devices(cluster) if cluster else choose_devices(options, device)
    forced = options.sp is not None or options.lookahead is not None
    if len(devices) < 2 and not forced:
        notice("DSI needs two devices or more and there is one: using --method specexec")
        if cluster is not None:
            cluster.close()
        return None
    servers = target_servers(options, devices)
    spec = partial(
        ModelSpec,
        dtype=found.settings["dtype"],
        threads=max(1, (os.cpu_count() or 1) // (servers + 1)),
        vocab_size=int(found.config.vocab_size),
    )
    placed = partial(
        spec,
        folder=found.target.folder,
        tiers=found.placement.tiers,
        slots=found.placement.slots,
        device_slots=found.placement.device_slots,
    )
    servers_to_load = [
        partial(load_target, placed(device=devices[n % len(devices)])) for n in range(servers)
    ]
    drafter_to_load = partial(
        load_drafter, spec(folder=found.draft.folder, device=devices[-1], tiers=None)
    )
    workers = (
        ProcessWorkers(servers_to_load, drafter_to_load)
        if cluster is None
        else RayWorkers(
            cluster, servers_to_load, drafter_to_load, gpus=_share(cluster.gpus, servers + 1)
        )
    )
    try:
        plan = _plan(workers, options.lookahead)
        if not plan.worthwhile and not forced:
            notice(f"{plan.describe()}: not worth it, using --method specexec")
            workers.close()
            return None
        notice(plan.describe())
        settings = {
            "offload": found.placement.label,
            "device": ",".join(devices),
            "sp": str(servers),
            "lookahead": str(plan.lookahead),
        }
        return DsiSession(found, workers, plan, settings, notice)
    except BaseException:
        workers.close()
        raise


def ray_devices(cluster: RayCluster) -> list[str]:
    """One entry for each GPU of the cluster, or the CPU; an actor sees its own GPU as the first."""
    return ["cuda:0"] * cluster.gpus or ["cpu"]


def _share(gpus: int, workers: int) -> float:
    """GPUs for each worker: one, or an equal part where there are fewer."""
    return 1.0 if gpus >= workers else math.floor(1e4 * gpus / workers) / 1e4


def _plan(workers: ProcessWorkers | RayWorkers, lookahead: int | None) -> DsiPlan:
    """From the slowest server's passes and the drafter's single rows, as measured at the start."""
    slowest: dict[int, float] = {}
    for server in workers.servers:
        for rows, seconds in workers.ready[server].pass_s.items():
            slowest[rows] = max(slowest.get(rows, 0.0), seconds)
    draft_s = workers.ready[DRAFTER].pass_s[1]
    if not slowest:
        raise ConfigError("no DSI target server could be measured")
    return make_plan(slowest, draft_s, len(workers.servers), lookahead)
