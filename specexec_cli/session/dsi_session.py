"""A session of the method dsi, which runs the target on several devices at once.

The models are in worker processes. This process has the tokenizer, the orchestrator and the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specexec_cli.catalog.hub import fetch
from specexec_cli.config import DSI_REJECTION, BenchMethod, DsiOptions, Method, TreeConfig
from specexec_cli.core import PassProgress, StepResult
from specexec_cli.device import usable_cores
from specexec_cli.dsi.decoding import dsi
from specexec_cli.dsi.engine import (
    MOST_READING_S,
    KeptAs,
    ModelDrafter,
    ModelTarget,
    load_drafter,
    load_target,
)
from specexec_cli.dsi.layout import Layout, target_servers
from specexec_cli.dsi.messages import DRAFTER, Score
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.dsi.plan import DsiPlan, make_plan
from specexec_cli.dsi.processes import ProcessWorkers
from specexec_cli.errors import ConfigError, WorkerError
from specexec_cli.loading import Notice, Prepared, Progress, pick_device, prepare
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.tokenizer import check_same_tokenizer, load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.chosen_models import choose_pair, registry_of
from specexec_cli.planning.request import Request
from specexec_cli.session.identity import kept_as
from specexec_cli.session.text_session import GenerationRequest, Steps, TextSession

_PATIENCE = 20.0  # a worker this many times slower than measured counts as hung


class DsiSession(TextSession):
    """Decodes through a pool of workers, which hold the models and their caches."""

    def __init__(
        self,
        found: Prepared,
        workers: ProcessWorkers,
        plan: DsiPlan,
        settings: Mapping[str, str],
        notice: Notice,
    ) -> None:
        # the draft model's window may be shorter: beyond it the text goes on without drafts
        window = min(workers.ready[server].context_length for server in workers.servers)
        super().__init__(found, window, {**found.settings, **settings})
        self._workers = workers
        # in front of its pass a worker may read rows from disk
        self._timeout_s = _PATIENCE * plan.long_pass_s + 60.0 + MOST_READING_S
        config = DsiConfig(lookahead=plan.lookahead, timeout_s=self._timeout_s)
        self._orchestrator = Orchestrator(workers, config, notice)
        self._passes_before = self._bytes_before = 0

    @property
    def method(self) -> Method:
        """dsi: drafting and verification overlapped over all devices."""
        return "dsi"

    def on_layer(self, callback: Callable[[PassProgress], None]) -> None:
        """Never calls back, because no pass runs in this process."""

    def _check_method(self, method: Method | BenchMethod, tree: TreeConfig) -> None:
        if method not in ("dsi", DSI_REJECTION, "autoregressive"):
            raise ConfigError(
                f"this session runs on several devices at once, which `method='{method}'` does "
                "not: use dsi or autoregressive, or open another session for it"
            )

    def _steps(self, request: GenerationRequest) -> Steps:
        if request.constraint is not None or request.top_logprobs is not None:
            raise ConfigError(
                "`method='dsi'` draws its tokens in workers, which know no grammar and tell no "
                "log-probabilities: use `method='specexec'` for those"
            )
        self._passes_before = self._orchestrator.passes
        self._bytes_before = self._orchestrator.bytes_streamed
        yield from dsi(
            self._workers,
            self._orchestrator,
            request.sampling,
            request.prompt,
            request.max_tokens,
            self.eos_ids,
            drafts=request.method != "autoregressive",
            rejection=request.method == DSI_REJECTION,
        )

    def _count(self, step: StepResult, elapsed_s: float) -> None:
        """Counts every pass that was begun, prefills and stale passes included."""
        super()._count(step, elapsed_s)
        self.stats.target_passes = self._orchestrator.passes - self._passes_before
        self.stats.bytes_streamed = self._orchestrator.bytes_streamed - self._bytes_before

    def draft_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """The draft model's half of `score`."""
        self._end_generation()
        return self._logits(DRAFTER, tokens, first)

    def _target_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        if not self._workers.servers:
            raise WorkerError("every DSI target server is lost: open another session")
        return self._logits(self._workers.servers[0], tokens, first)

    def _logits(self, worker: int, tokens: Sequence[int], first: int) -> Tensor:
        scored = self._workers.score(worker, Score(tuple(tokens), first), self._timeout_s)
        return torch.from_numpy(scored)

    def forget(self) -> None:
        """Empties the caches: the next prompt is run from its first token."""
        self._workers.forget()

    def _close(self) -> None:
        self._workers.close()


def choose_devices(options: DsiOptions, device: str) -> list[str]:
    """The devices for workers: those named, else the session's, else every GPU, else the CPU.

    Raises:
        ConfigError: this machine does not have a named device.
    """
    named = options.devices or (() if device == "auto" else (device,))
    if named:
        return [str(pick_device(name)) for name in named]
    count = torch.cuda.device_count() if torch.version.hip is None else 0
    return [f"cuda:{n}" for n in range(count)] or ["cpu"]


def open_dsi(request: Request, notice: Notice, progress: Progress) -> DsiSession | None:
    """Starts the workers and measures them; None, with a notice, if DSI would not pay.

    An SP degree or lookahead that the user gives is used whatever the measurement says.

    Raises:
        WorkerError: a worker did not start.
        TokenizerMismatchError: a draft model's tokens are not the target's.
        UnknownModelError: a draft model is not on this machine.
    """
    if choose_pair(registry_of(request), request).draft is None:
        return None
    options = request.dsi
    devices = choose_devices(options, request.device)
    if len(devices) >= 2 or _is_forced(options):
        return _open(request, devices, notice, progress)
    notice("DSI needs two devices or more and there is one: using `method='specexec'`")
    return None


def _open(
    request: Request, devices: Sequence[str], notice: Notice, progress: Progress
) -> DsiSession | None:
    """Plans for these devices, starts the workers there and measures them; see `open_dsi`."""
    further, sp = _further_drafts(request), target_servers(request.dsi, devices)
    layout = Layout(
        devices=devices,
        servers=sp,
        drafters=1 + len(further),
        further_draft_bytes=sum(read_checkpoint(each).total_bytes for each in further),
    )
    found = prepare(request, workers=layout, notice=notice, progress=progress)
    assert found.draft is not None, "the pair has one"
    found.check_tokenizers()
    for folder in further:
        vocab_size = int(load_config(read_checkpoint(folder)).vocab_size)
        check_same_tokenizer(found.tokenizer, load_tokenizer(folder), vocab_size)
    keeping = request if request.remember and request.cache else None
    loaders = worker_loaders(found, [found.draft.folder, *further], layout, keeping)
    workers = ProcessWorkers(*loaders)
    try:
        session = _worthwhile(found, workers, layout, request.dsi, notice)
    except BaseException:
        workers.close()
        raise
    if session is None:
        workers.close()
    return session


def _worthwhile(
    found: Prepared, workers: ProcessWorkers, layout: Layout, options: DsiOptions, notice: Notice
) -> DsiSession | None:
    """A session over workers that have been measured; None, with a notice, where it would not pay.

    Numbers given by the user are obeyed whatever the plan says.
    """
    plan = _plan(workers, options.lookahead)
    if not plan.worthwhile and not _is_forced(options):
        notice(f"{plan.describe()}: not worth it, using `method='specexec'`")
        return None
    notice(plan.describe())
    settings = {
        "offload": found.decision.plan.label,
        "device": ",".join(layout.devices),
        "sp": str(layout.servers),
        "lookahead": str(plan.lookahead),
    }
    return DsiSession(found, workers, plan, settings, notice)


def _is_forced(options: DsiOptions) -> bool:
    """Whether the user gave numbers of DSI's own, which are obeyed whatever they lead to."""
    return options.sp is not None or options.lookahead is not None


def _further_drafts(request: Request) -> list[Path]:
    """Folders of the draft models besides the pair's own."""
    registry = registry_of(request)
    return [
        fetch(registry.resolve(name), offline=request.offline) for name in request.dsi.more_drafts
    ]


def worker_loaders(
    found: Prepared, drafts: Sequence[Path], layout: Layout, keeping: Request | None = None
) -> tuple[Sequence[Callable[[], ModelTarget]], Sequence[Callable[[], ModelDrafter]]]:
    """Functions that load each target server, opened as the plan says, and each draft model.

    Args:
        drafts: folders of the draft models, the pair's own first.
        keeping: says how much rows of texts may take on disk; None keeps none. Those of draft
            models other than the pair's are not kept, nor a draft model's on a GPU (see KeptPair).
    Returns:
        one function for each target server and one for each drafter; each is called in its worker.
    """
    threads = max(1, usable_cores() // (layout.servers + len(drafts)))
    targets = []
    for number in range(layout.servers):
        device = torch.device(layout.server_device(number))
        spec = replace(found.target_spec, device=device)
        kept = _kept(found, keeping, device, writes=number == 0)
        targets.append(partial(load_target, found.target.folder, spec, threads, kept))
    spec = replace(found.draft_spec, device=torch.device(layout.drafter_device))
    vocab_size, drafters = int(found.config.vocab_size), []
    for number, folder in enumerate(drafts):
        own = number == 0 and spec.device.type == "cpu"
        kept = _kept(found, keeping if own else None, spec.device, of_draft=True)
        drafters.append(partial(load_drafter, folder, spec, threads, vocab_size, kept))
    return targets, drafters


def _kept(
    found: Prepared,
    keeping: Request | None,
    device: torch.device,
    *,
    of_draft: bool = False,
    writes: bool = True,
) -> KeptAs | None:
    if keeping is None:
        return None
    name, identity = kept_as(found, of_draft=of_draft, device=device)
    return KeptAs(name, identity, keeping.cache_bytes, writes)


def _plan(workers: ProcessWorkers, lookahead: int | None) -> DsiPlan:
    """Plans by the workers' measurements: the slowest server, and the drafter's single rows."""
    slowest: dict[int, float] = {}
    for server in workers.servers:
        for rows, seconds in workers.ready[server].pass_s.items():
            slowest[rows] = max(slowest.get(rows, 0.0), seconds)
    draft_s = workers.ready[DRAFTER].pass_s[1]
    if not slowest:
        raise ConfigError("no DSI target server could be measured")
    return make_plan(slowest, draft_s, len(workers.servers), lookahead)
