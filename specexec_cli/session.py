"""A session: models opened once, generations one after another.

    with Session.open(pair="demo") as session:
        for step in session.generate("def fibonacci(n):"):
            print(step.text, end="")

The KV caches live as long as the session: a prompt that begins like the text before it costs only
its new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specexec_cli.config import (
    POLICIES,
    BenchMethod,
    DsiOptions,
    DtypeName,
    GenerationConfig,
    Method,
    OffloadMode,
    SamplingConfig,
    TreeConfig,
)
from specexec_cli.core import DraftTree, GenerationStats, PassProgress, StepResult
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.methods import SPECULATIVE
from specexec_cli.device import peak_ram_bytes
from specexec_cli.drafting.calibration import Reliability
from specexec_cli.drafting.disco import Classifier, load_classifier
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.learned import Learned, pair_folder
from specexec_cli.errors import ConfigError
from specexec_cli.models.rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.text import TextStream
from specexec_cli.opening import ContextTokens, Found, Notice, Progress, Resized, find
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

_LEARNED = "learned.json"


class Session:
    """Target, draft model, tokenizer and caches, ready to generate."""

    distributed = False  # over several devices, where it always drafts
    context_limit: int | None = None  # below the model's own window
    ssd_share = 1.0  # of the bytes that a pass streams, what comes from the SSD

    def __init__(
        self,
        found: Found,
        target: LocalTarget,
        draft: StreamedModel | None,
    ) -> None:
        self.choice = found.choice
        self.tokenizer = found.tokenizer
        self.eos_ids = found.eos_ids
        self.settings: Mapping[str, str] = found.settings  # what "auto" became
        self.stats = GenerationStats()
        self.learned = Learned(self.classifier)  # about the pair, from one generation to the next
        self._keep: Notice | None = None  # at the end for later sessions; told of failures
        self._link_bytes_per_s = found.placement.link_bytes_per_s
        self.ssd_share = found.placement.ssd_share
        self.context: list[int] = []  # prompt and committed tokens of the last generation
        self._target = target
        self._draft = draft
        self._drafter: ModelDrafter | None = None
        self._drafter_method: Method | BenchMethod | None = None  # the one it was made for
        self._pass_began = (0.0, 0)  # time and bytes streamed at the pass's first layer

    @classmethod
    def open(
        cls,
        *,
        pair: str | None = None,
        target: str | None = None,
        draft: str | None = None,
        method: Method = "specexec",
        models_file: Path | None = None,
        revision: str | None = None,
        offline: bool = False,
        offload: OffloadMode = "auto",
        device: str = "auto",
        dtype: DtypeName = "auto",
        tokenizer: Path | None = None,
        context: ContextTokens | None = None,
        tree: Resized | None = None,
        remember: bool = False,
        dsi: DsiOptions | None = None,
        notice: Notice = lambda text: None,
        progress: Progress = lambda done, total: None,
        download_progress: bool = False,
    ) -> Session:
        """Opens the models; see `specexec generate --help` for what the options mean.

        Args:
            context: given the tokenizer, how many tokens of prompt and text to plan memory for;
                4096 unless told. Longer ones are not refused, they take memory beyond the plan.
            tree: the largest tree that will be asked for, given the pair's recommended one, which
                it is unless told; memory is planned for it, and `choice.tree` becomes it.
            remember: begin with what earlier sessions learned about the pair, and keep what this
                one learns; it changes how many passes a text takes, never the text.
        Raises:
            SpecexecError: whatever is wrong, in one line.
        """
        options, copies, devices = dsi or DsiOptions(), 1, [device]
        if method == "dsi":
            from specexec_cli.dsi_session import choose_devices, open_dsi, target_servers

            if options.ray is None:  # in a cluster every machine has memory of its own
                devices = choose_devices(options, device)
                copies = target_servers(options, devices)
        found = find(
            pair=pair, target=target, draft=draft, method=method, models_file=models_file,
            revision=revision, offline=offline, offload=offload, device=device, dtype=dtype,
            tokenizer=tokenizer, context=context, tree=tree, copies=copies, devices=devices,
            download_progress=download_progress,
        )  # fmt: skip
        if method == "dsi":
            distributed = open_dsi(found, options, device, notice)
            if distributed is not None:
                return distributed
        draft_model = found.open_draft(notice)
        session = cls(found, LocalTarget(found.open_target(notice, progress)), draft_model)
        if remember and draft_model is not None:
            session.learned.load(session.pair_folder / _LEARNED, session._machine)
            session._keep = notice
        return session

    @property
    def pair_folder(self) -> Path:
        """Where what is learned about this target and draft model is kept."""
        assert self.choice.draft is not None
        return pair_folder(self.choice.target.repo, self.choice.draft.repo)

    @property
    def _machine(self) -> str:
        """What the cost of an iteration depends on, besides the pair."""
        return " ".join(self.settings[name] for name in ("offload", "device", "dtype"))

    def classifier(self) -> Classifier:
        """The pair's, of --policy disco.

        Raises:
            CheckpointError: there is none, or none that can be used; says how to train one.
        """
        assert self.choice.draft is not None
        return load_classifier(self.pair_folder, self.choice.target.repo, self.choice.draft.repo)

    @property
    def reliability(self) -> Reliability:
        """How right the acceptance probabilities of the last generation were."""
        return self._drafter.calibration.reliability if self._drafter else Reliability()

    @property
    def method(self) -> Method:
        """How it decodes unless told otherwise."""
        return "specexec" if self._draft is not None else "autoregressive"

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and text together."""
        return min(self._window, self.context_limit or self._window)

    @property
    def _window(self) -> int:
        """The model's own limit."""
        return self._target.model.context_length

    @property
    def vocab_size(self) -> int:
        """Tokens that the target knows."""
        return self._target.model.vocab_size

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""
        return len(self._target.model.skeleton.layers)

    def on_layer(self, callback: Callable[[PassProgress], None]) -> None:
        """Calls back after each target layer, for live status.

        An exception from the callback ends the pass and comes out of generate(); the caches stay
        right.
        """
        self._target.model.on_layer = lambda index: callback(self._progress(index))

    def _progress(self, index: int) -> PassProgress:
        now, streamed = time.perf_counter(), self._target.bytes_streamed
        if index == 0:
            self._pass_began = now, streamed
        began_s, began_bytes = self._pass_began
        return PassProgress(
            number=self.stats.target_passes + 1,
            layer=index + 1,
            layers=self.layers,
            bytes_per_s=(streamed - began_bytes) / (now - began_s) if index else 0.0,
            draft_nodes=self._target.tree_nodes,
        )

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a raw completion prompt, with the tokenizer's own beginning-of-text token."""
        return list(self.tokenizer.encode(prompt))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation in the model's own chat template, ready for the reply.

        Raises:
            ConfigError: the model has no chat template, or it refuses these messages.
        """
        return self.encode_rendered(self.render_chat(messages))

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that text around them never merges with, by their spelling."""
        return dict(self.tokenizer.get_added_vocab())

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of text that spells out its special tokens, as a chat template writes it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation in the model's own chat template, as text, ready for the reply.

        Raises:
            ConfigError: the model has no chat template, or it refuses these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                f"{self.choice.target.name} has no chat template: it is a base model. Use a chat "
                "or instruct model, or continue raw text: specexec generate, without --chat"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template raises what it likes (jinja2.TemplateError)
            raise ConfigError(
                f"the chat template of {self.choice.target.name} refuses this conversation: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingConfig | None = None,
        tree: TreeConfig | None = None,
        generation: GenerationConfig | None = None,
        method: Method | BenchMethod | None = None,
        continuation: Sequence[int] = (),
    ) -> Iterator[StepResult]:
        """Yields one step per target pass; `step.text` is what may be shown.

        Closing the generator early (Ctrl-C) keeps the caches right: the next call reuses them.

        Args:
            prompt: text, or tokens.
            method: "specexec" where there is a draft model, unless told otherwise.
            continuation: the tokens that will come, which --policy oracle must be told.
        Raises:
            ConfigError: an empty prompt, or one that does not fit the context window.
            StreamError, NonFiniteLogitsError: a pass failed.
        """
        sampling, generation = sampling or SamplingConfig(), generation or GenerationConfig()
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        room = self._room(tokens)
        limit = min(generation.max_tokens, room)
        self._prepare(tokens, limit, tree or self.choice.tree)
        steps = self._steps(tokens, limit, sampling, tree or self.choice.tree, method, continuation)
        return self._with_text(steps, tokens, generation.stop)

    def _room(self, tokens: Sequence[int]) -> int:
        if not tokens:
            raise ConfigError("the prompt is empty: give at least one token to continue from")
        rows = self.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < rows:
            raise ConfigError(
                f"the prompt has token {max(tokens)} but the target knows only {rows}: "
                "its tokenizer belongs to another model"
            )
        room = self.context_length - len(tokens)
        if room < 1:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, the context window holds "
                f"{self.context_length} and one must be left for the text: shorten the prompt"
            )
        return room

    def _prepare(self, tokens: Sequence[int], limit: int, tree: TreeConfig) -> None:
        """Keeps what the caches share with the prompt; its last token must be run again."""
        common = 0
        for cached, wanted in zip(self._target.tokens, tokens[:-1], strict=False):
            if cached != wanted:
                break
            common += 1
        self._target.crop(common)
        self._target.reserve(len(tokens) + limit + tree.budget)
        self.context = list(tokens)
        self.stats = GenerationStats(
            prompt_tokens=len(tokens), link_bytes_per_s=self._link_bytes_per_s
        )

    def _steps(
        self,
        tokens: Sequence[int],
        limit: int,
        sampling: SamplingConfig,
        tree: TreeConfig,
        method: Method | BenchMethod | None,
        continuation: Sequence[int],
    ) -> Iterator[StepResult]:
        sampler = Sampler(sampling)
        method = method or self.method
        if method == "autoregressive":
            return autoregressive(self._target, sampler, tokens, limit, self.eos_ids)
        if self._draft is None:
            raise ConfigError("this session was opened without a draft model: --draft MODEL")
        if (speculative := SPECULATIVE.get(method)) is None:
            raise ConfigError(f"this session runs on one device, which --method {method} does not")
        if tree.policy not in POLICIES[method]:
            raise ConfigError(
                f"--policy {tree.policy} cannot size the trees of method {method}: use "
                f"{' or '.join(POLICIES[method])}"
            )
        if self._drafter is None or self._drafter_method != method:
            self._drafter = speculative.new_drafter(
                self._draft, sampler, tree, self.vocab_size, self.learned
            )
            self._drafter_method = method
        self._drafter.learned = self.learned
        self._drafter.configure(sampler, tree, continuation)
        return speculative.decode(self._target, self._drafter, sampler, tokens, limit, self.eos_ids)

    def _with_text(
        self, steps: Iterator[StepResult], prompt: Sequence[int], stop: Sequence[str]
    ) -> Iterator[StepResult]:
        """Adds text, ends at a stop string, keeps the statistics."""
        stream = TextStream(self.tokenizer, prompt, stop)
        started = time.perf_counter()
        for step in steps:
            pieces = []
            for token in step.tokens:
                pieces.append(stream.push(token))
                if stream.stopped:
                    break
            if stream.stopped:
                count = len(pieces)
                step = replace(step, tokens=step.tokens[:count], drafted=step.drafted[:count],
                               finish_reason="stop")  # fmt: skip
            elif step.finish_reason:
                pieces[-1] += stream.finish()
                if stream.stopped:
                    step = replace(step, finish_reason="stop")
            self.context += step.tokens
            self._count(step, time.perf_counter() - started)
            yield replace(step, text="".join(pieces), pieces=tuple(pieces))
            if step.finish_reason:
                return

    def _count(self, step: StepResult, elapsed_s: float) -> None:
        stats = self.stats
        if stats.target_passes == 0:
            stats.ttft_s = elapsed_s
            stats.first_tokens = len(step.tokens)
            stats.prompt_rows = step.pending_rows
        stats.add(step)
        stats.total_s = elapsed_s
        stats.peak_ram_bytes = peak_ram_bytes()
        if self._target.model.device.type == "cuda":
            stats.peak_vram_bytes = torch.cuda.max_memory_allocated(self._target.model.device)

    def score(self, tokens: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
        """What target and draft model predict at each position of a text from `first` on.

        Args:
            first: at least 1 and below len(tokens).
        Returns:
            Logits, (len(tokens) - first, vocab) each; the vocabularies may differ in padding.
        Raises:
            ConfigError: there is no draft model.
        """
        draft_logits = self.draft_logits(tokens, first)
        self.forget()
        chain = DraftTree.chain(tokens[first:-1])
        target_logits = self._target.verify(tokens[:first], chain)
        self._target.commit([])
        return target_logits, draft_logits

    def draft_logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """The draft model's half of `score`."""
        if self._draft is None:
            raise ConfigError("this session was opened without a draft model: --draft MODEL")
        rows = range(first - 1, len(tokens) - 1)
        return self._draft.forward(PassRows.chain(tokens[:-1], 0), self._draft.new_cache(), rows)

    def forget(self) -> None:
        """Empties the caches: the next prompt is run from its first token."""
        self._target.crop(0)
        if self._drafter is not None:
            self._drafter.forget()

    def close(self) -> None:
        """Gives threads, files and memory back; idempotent."""
        if self._keep is not None:
            path, tell, self._keep = self.pair_folder / _LEARNED, self._keep, None
            try:
                self.learned.save(path, self._machine)
            except OSError as error:
                tell(f"what was learned about the pair cannot be kept in {path}: {error.strerror}")
        self._target.close()
        if self._draft is not None:
            self._draft.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
