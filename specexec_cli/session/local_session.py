"""A session with its models in this process, for every method except dsi.

The KV caches live as long as the session: if a prompt begins like the last text, only its new
tokens are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import date

import torch
from torch import Tensor

from specexec_cli.config import (
    DSI_REJECTION,
    SUFFIX,
    BenchMethod,
    GenerationConfig,
    Method,
    SamplingConfig,
    TreeConfig,
)
from specexec_cli.core import DraftTree, PassProgress, StepResult, common_prefix
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.batch import Seat
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.calibration import Reliability
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import ForestDrafter
from specexec_cli.drafting.iteration_cost import CostModel
from specexec_cli.drafting.policies import POLICIES
from specexec_cli.drafting.protocols import DrawingDrafter, SessionDrafter
from specexec_cli.drafting.sources import SOURCES, DraftSetup, policies_for
from specexec_cli.errors import ConfigError
from specexec_cli.loading import Notice, Prepared
from specexec_cli.models.pass_rows import PassRows, embeddable
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.planning.expected_speed import Run, runs_file
from specexec_cli.prefixes.folder import Bound
from specexec_cli.prefixes.kept_pair import KeptPair
from specexec_cli.prefixes.kept_texts import KeptTexts
from specexec_cli.quiet import QuietCheck
from specexec_cli.sampling import Sampler
from specexec_cli.session.cost_prior import measured_prior
from specexec_cli.session.expert_counts import ExpertCounts
from specexec_cli.session.identity import kept_as
from specexec_cli.session.learned_file import LearnedFile
from specexec_cli.session.text_session import GenerationRequest, Steps, TextSession
from specexec_cli.verify.verifier import LocalTarget


class LocalSession(TextSession):
    """Decodes with a target and, if there is one, a draft model in the same process.

    Attributes:
        target: the target, with its caches.
        draft: the draft model's weights; None without one.
        drafter: what grew the last text's trees; None before the first text.
        decision: what was decided about memory, places and rows when the session was opened.
    """

    def __init__(self, found: Prepared, target: LocalTarget, draft: StreamedModel | None) -> None:
        super().__init__(found, target.model.context_length, found.settings)
        self.link_bytes_per_s = found.decision.link_bytes_per_s
        self.target = target
        self.target.state.planned_slots = found.decision.work.slots
        self.draft = draft
        self.decision = found.decision
        self._measured_cost: CostModel | None = None
        self.drafter: SessionDrafter | None = None
        self._drafter_method: Method | BenchMethod | None = None  # the method of self.drafter
        self._learned_file: LearnedFile | None = None
        self.quiet = QuietCheck()  # open while texts are written
        self._expert_counts: ExpertCounts | None = None
        self._pass_began = (0.0, 0)  # time, and bytes streamed, at the pass's first layer
        self._experts_before = (0, 0)  # experts_counted() when the generation began
        self.kept: KeptPair | None = None  # rows of texts on disk
        self._preparing: Future[None] | None = None  # rows that are being brought back, see prepare

    def keep_texts(self, bound: Bound, notice: Notice) -> None:
        """Begins texts with rows that earlier sessions kept on disk, and keeps those of new ones.

        Args:
            bound: what the files of all models may take together.
            notice: told, in one line, if nothing can be written.
        """

        told: list[str] = []

        def once(line: str) -> None:  # what stops the target's writer stops the draft model's too
            if not told:
                told.append(line)
                notice(line)

        names, others = kept_as(self._found), None
        if self._found.hosts is not None:
            others = self._found.hosts.keep_texts(*names)
            if others is None:
                return
        target, draft = KeptTexts(*names, bound, once, others), None
        on_cpu = self.target.model.device.type == "cpu"  # see KeptPair
        shares = self.decision.work.shares_cache or self.decision.work.reads_target
        if self.draft is not None and on_cpu and not shares:
            draft = KeptTexts(*kept_as(self._found, of_draft=True), bound, once)
        self.kept = KeptPair(target, draft)

    def keep_beginnings_alone(self) -> None:
        """See TextSession."""
        if self.kept is not None:
            self.kept.keep_beginnings_alone()

    def prepare(self, prompt: Sequence[int], max_tokens: int) -> None:
        """See TextSession."""
        self._end_generation()
        self._end_preparing()
        if self.kept is None or not 0 < len(prompt) < self.context_length:
            return
        # no tree is grown yet: what a policy needs, such as timed passes, waits for the text
        asked = self.checked(
            prompt, GenerationConfig(max_tokens=max_tokens), sampling=SamplingConfig(),
            tree=replace(self.pair.tree, policy="fixed"), method=self.method, constraint=None,
            top_logprobs=None,
        )  # fmt: skip
        drafter = self._begun(asked, Sampler(asked.sampling))
        thread = ThreadPoolExecutor(1, "specexec-prepare")
        self._preparing = thread.submit(self.kept.bring_back, self.target, drafter, prompt)
        thread.shutdown(wait=False)

    def _end_preparing(self) -> None:
        """Has `prepare` go no further, so that nothing else uses the caches."""
        if self._preparing is not None and self.kept is not None:
            self.kept.stop_reading(self._preparing)
            self._preparing = None

    def remember(self, notice: Notice) -> None:
        """Starts from what earlier sessions learned about the pair, and keeps what this one learns.

        This changes how many passes a text takes and which experts are in memory, never the text.
        """
        experts = self.target.model.experts
        if experts is not None:
            self._expert_counts = ExpertCounts(self.pair.target.weights, notice)
            self._expert_counts.load(experts)
        if self.draft is not None:
            assert self.pair.draft is not None
            runs = runs_file(self.pair.target.weights, self.pair.draft.weights)
            self._learned_file = LearnedFile(self.pair_folder, runs, self.settings, notice)
            self._learned_file.load(self.learned)

    def seats(self, count: int) -> list[Seat]:
        """Seats (caches and a drafter each) for `count` texts at once; the first uses our caches.

        From then on only the owner of the seats may use the session.
        """
        self.forget()
        targets = [self.target, *(LocalTarget(self.target.model) for _ in range(count - 1))]
        return [Seat(target, self._seat_drafter(target)) for target in targets]

    def _seat_drafter(self, target: LocalTarget) -> ForestDrafter | None:
        if self.method == "autoregressive":
            return None
        sampler, read = (
            Sampler(SamplingConfig()),
            target if self.decision.work.reads_target else None,
        )
        drafter = self._made_drafter(self.method, sampler, self.pair.tree, read)
        assert isinstance(drafter, ForestDrafter)
        return drafter

    @property
    def method(self) -> BenchMethod:
        """specexec with a draft model, else drafts from the text if chosen, else autoregressive."""
        if self.draft is not None:
            return "specexec"
        return SUFFIX if self.pair.suffix else "autoregressive"

    def cost_prior(self) -> CostModel:
        """The cost model that the policy cost begins with; measured at the first call."""
        if self._measured_cost is None:
            self._measured_cost = measured_prior(self.decision, self.target, self.draft)
        return self._measured_cost

    @property
    def reliability(self) -> Reliability:
        """How well the last generation's predicted acceptance probabilities came true."""
        if isinstance(self.drafter, ModelDrafter):
            return self.drafter.calibration.reliability
        return Reliability()

    def on_layer(self, callback: Callable[[PassProgress], None]) -> None:
        """Calls back after each target layer; see TextSession.on_layer."""
        self.target.model.on_layer = lambda index: callback(self._progress(index))

    def _progress(self, index: int) -> PassProgress:
        now, streamed = time.perf_counter(), self.target.bytes_streamed
        if index == 0:
            self._pass_began = now, streamed
        began_s, began_bytes = self._pass_began
        return PassProgress(
            number=self.stats.target_passes + 1,
            layer=index + 1,
            layers=self.layers,
            bytes_per_s=(streamed - began_bytes) / (now - began_s) if index else 0.0,
            draft_nodes=self.target.tree_nodes,
        )

    def _check_method(self, method: Method | BenchMethod, tree: TreeConfig) -> None:
        if method == "autoregressive":
            return
        if method in ("dsi", DSI_REJECTION):
            raise ConfigError(
                f"this session runs on one device, which `method='{method}'` does not"
            )
        if method not in SOURCES:
            raise ConfigError(
                f"`method='{method}'` is not among those known here, which are autoregressive, "
                f"{', '.join(SOURCES)}: for what SpecExec is measured against, `import "
                "specexec_cli.lab.baselines` first, as `specexec bench` does"
            )
        if self.draft is None and SOURCES[method].needs_model:
            raise ConfigError("this session was opened without a draft model: `draft`")
        able = policies_for(method)
        if tree.policy not in able:
            raise ConfigError(
                f"`policy='{tree.policy}'` cannot size the trees of method {method}: use "
                f"{' or '.join(able)}"
            )
        if POLICIES[tree.policy].needs == "classifier":
            self.classifier()  # raises before the text begins if there is none

    def _steps(self, request: GenerationRequest) -> Steps:
        if self._preparing is not None:
            # Ctrl-C ends the wait, and not the reading; what that failed at, is tried again below
            wait([self._preparing])
            self._preparing = None
        sampler = Sampler(request.sampling, request.constraint, request.top_logprobs)
        drafter = self._begun(request, sampler)
        self._experts_before = self.experts_counted()
        if self.kept is not None:
            self.kept.bring_back(self.target, drafter, request.prompt)
        position = len(request.prompt)
        try:
            with self.quiet:
                for step in self._decoded(request, sampler, drafter):
                    if self.kept is not None:
                        self.kept.offer(self.target, drafter)
                    yield replace(step, logprobs=sampler.recorded(position, len(step.tokens)))
                    position += len(step.tokens)
        finally:
            if self.kept is not None:
                self.kept.offer(self.target, drafter, ended=True)

    def _begun(self, request: GenerationRequest, sampler: Sampler) -> SessionDrafter | None:
        """Keeps the cached tokens that the prompt begins with, except the prompt's last token,
        which must be run again; returns the method's drafter."""
        common = common_prefix(self.target.tokens, request.prompt[:-1])
        self.target.crop(common)
        self.target.recover()
        self.target.reserve(len(request.prompt) + request.max_tokens + request.tree.budget)
        self.target.keep_at(common)  # a third text may part from the first two where they part
        if request.method == "autoregressive":
            return None
        return self._drafter_for(request, sampler)

    def _decoded(
        self, request: GenerationRequest, sampler: Sampler, drafter: SessionDrafter | None
    ) -> Iterator[StepResult]:
        """The steps of the requested method, with tokens drawn by the sampler."""
        ends = request.prompt, request.max_tokens, self.eos_ids
        if drafter is None:
            yield from autoregressive(self.target, sampler, *ends)
        else:
            if SOURCES[request.method].drawn:
                if request.constraint is not None or request.top_logprobs is not None:
                    raise ConfigError(
                        f"method {request.method} knows no grammar and tells no log-probabilities: "
                        "use specexec or autoregressive"
                    )
                assert isinstance(drafter, DrawingDrafter), "it remembers what it drew from"
                yield from specexec(self.target, drafter, sampler, *ends, drafter.walk)
            else:
                yield from specexec(self.target, drafter, sampler, *ends)

    def _drafter_for(self, request: GenerationRequest, sampler: Sampler) -> SessionDrafter:
        """The requested method's drafter, set up for a generation."""
        if self.drafter is None or self._drafter_method != request.method:
            shares = self.decision.work.shares_cache or self.decision.work.reads_target
            shared = self.target if shares else None
            self.drafter = self._made_drafter(request.method, sampler, request.tree, shared)
            self._drafter_method = request.method
        self.drafter.configure(sampler, request.tree, self.learned)
        return self.drafter

    def _made_drafter(
        self,
        method: BenchMethod,
        sampler: Sampler,
        tree: TreeConfig,
        shared: LocalTarget | None = None,
    ) -> SessionDrafter:
        return SOURCES[method].make(
            DraftSetup(
                model=self.draft,
                sampler=sampler,
                tree=tree,
                target_vocab_size=self.vocab_size,
                learned=self.learned,
                shared=shared,
                slots=self.decision.work.draft_slots,
                window=self.decision.work.draft_window,
            )
        )

    def _count(self, step: StepResult, elapsed_s: float) -> None:
        super()._count(step, elapsed_s)
        if self.drafter is not None and self.drafter.paused and not step.tree_nodes:
            self.stats.add_pause(step)
        asked, held = self.experts_counted()
        self.stats.experts_asked = asked - self._experts_before[0]
        self.stats.experts_held = held - self._experts_before[1]
        self.stats.peak_vram_bytes = self.peak_vram_bytes()

    def experts_counted(self) -> tuple[int, int]:
        """Experts requested so far, and those of them that were in memory; 0 unless one by one."""
        experts = self.target.model.experts
        return (experts.touched, experts.hits) if experts is not None else (0, 0)

    def peak_vram_bytes(self) -> int:
        """Most bytes that PyTorch has held on the GPU since the process began; 0 without a GPU."""
        device = self.target.model.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0

    def draft_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """The draft model's logits for `score`; its cache is not used."""
        if self.draft is None:
            raise ConfigError("this session was opened without a draft model: `draft`")
        if self.decision.work.reads_target:
            raise ConfigError(
                f"`draft='{self.pair.draft_name}'` predicts nothing without the target's rows: "
                "give a draft model"
            )
        self._end_generation()
        rows = PassRows.chain(embeddable(tokens[:-1], self.draft.vocab_size), 0)
        wanted = range(first - 1, len(tokens) - 1)
        return self.draft.forward(rows, self.draft.new_state(), wanted)

    def _target_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        self.forget()
        logits = self.target.verify(tokens[:first], DraftTree.chain(tokens[first:-1]))
        self.target.commit([])
        return logits

    def forget(self) -> None:
        """Empties the caches: the next prompt is run from its first token."""
        self._end_preparing()
        self.target.crop(0)
        if self.drafter is not None:
            self.drafter.forget()

    def _run(self) -> Run:
        """A summary of the session's drafted generations, without each one's first pass."""
        drafted = [stats for stats in self.history if stats.draft_s]
        return Run(
            date=f"{date.today()}",
            offload=self.settings["offload"],
            device=self.settings["device"],
            tokens=sum(stats.generated_tokens - stats.first_tokens for stats in drafted),
            passes=sum(stats.target_passes - 1 for stats in drafted),
            seconds=sum(stats.total_s - stats.ttft_s for stats in drafted),
            busy=bool(self.quiet.disturbance),
            activations=self.settings.get("activations", "full"),
            hosts=self.settings.get("hosts", ""),
        )

    def _close(self) -> None:
        try:
            self._end_preparing()
            if self.kept is not None:
                self.kept.close()  # waits for rows that are not written yet
        finally:
            self._release()

    def _release(self) -> None:
        if self._learned_file is not None:
            self._learned_file.save(self.learned, self._run())
        if self._expert_counts is not None and self.target.model.experts is not None:
            self._expert_counts.save(self.target.model.experts)
        self.target.close()
        if self.draft is not None:
            self.draft.close()
        # whoever still has this session, as a chat that opens another one, has no models by it
        self.draft = self.drafter = self.kept = None
        del self.target
