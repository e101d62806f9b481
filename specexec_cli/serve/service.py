"""The state that all routes share: the served model, and the way from a request to texts."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from llguidance import LLMatcher

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.text import Engine, Running, TextRequest
from specexec_cli.errors import ConfigError, SpecexecError
from specexec_cli.models.channels import has_channels
from specexec_cli.serve.answers import Spelling
from specexec_cli.serve.api_errors import ApiError, api_error
from specexec_cli.serve.bodies import ChatBody, CompletionBody
from specexec_cli.serve.grammar import GrammarMaker
from specexec_cli.serve.prompts import Prompt, PromptMaker
from specexec_cli.serve.reading import SMALL_BYTES, Window
from specexec_cli.session.text_session import TextSession

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Settings for requests that do not say otherwise."""

    sampling: SamplingConfig
    max_tokens: int


class Service:
    """One open session behind an engine.

    Large requests are parsed, and their prompts made, in a thread of their own, so that small
    requests do not wait for them. Grammars, which may take seconds each, have further threads.

    Attributes:
        window: the largest prompt that can fit.
        spelling: writes tokens as text, only for the event loop's thread; None until a request
            needs it.
    """

    def __init__(self, session: TextSession, engine: Engine, defaults: Defaults) -> None:
        self.session = session
        self.engine = engine
        self.defaults = defaults
        self.closing = False
        self.context_length = session.context_length
        self.facts = dict(session.settings)
        self.layers = session.layers
        pair = session.pair
        # without its folder: a target may be named by its path, which is private
        self.model = Path(pair.name).name
        self.draft = Path(pair.draft_name).name if pair.draft_name is not None else None
        makers = [PromptMaker(session.tokenizer, self.model, self.context_length) for _ in range(2)]
        self._small, self._large = makers
        self._small.templates.start()
        self.tokenizer = self._small.tokenizer
        longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        self.window = Window(context_tokens=self.context_length, token_characters=longest)
        self._vocab_size, self._eos_ids = session.vocab_size, session.eos_ids
        self._grammar_threads = ThreadPoolExecutor(
            max_workers=2, thread_name_prefix="specexec-grammar"
        )
        self.spelling: Spelling | None = None

    async def encoding(self, work: Callable[[PromptMaker], _T], body_bytes: int = 0) -> _T:
        """Runs work that uses a tokenizer in that tokenizer's thread.

        Args:
            body_bytes: size of the request's body; large requests have another thread.
        Raises:
            ApiError: the work has raised a SpecexecError.
        """
        maker = self._small if body_bytes <= SMALL_BYTES else self._large
        try:
            return await maker.run(lambda: work(maker))
        except SpecexecError as error:
            raise api_error(error) from error

    async def grammar(self, work: Callable[[GrammarMaker], LLMatcher]) -> LLMatcher:
        """Compiles a grammar in a thread of its own, so that other requests do not wait.

        Raises:
            ApiError: the grammar cannot be used, or this model supports no grammars.
        """
        maker = await self.encoding(lambda _: self.grammars)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._grammar_threads, lambda: work(maker))
        except SpecexecError as error:
            raise api_error(error) from error

    @cached_property
    def grammars(self) -> GrammarMaker:
        """Makes constraints; to be read in a PromptMaker's thread.

        Raises:
            ConfigError: this model supports no grammars.
        """
        if has_channels(self.tokenizer):
            raise ConfigError(
                f"{self.model} writes in channels, which JSON mode does not know: leave "
                "response_format and tool_choice out"
            )
        return GrammarMaker(self.tokenizer, self._vocab_size, self._eos_ids)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has exactly one."""
        template = getattr(self.tokenizer, "chat_template", None)
        return template if isinstance(template, str) else None

    def texts(
        self,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        max_tokens: int | None,
        top_logprobs: int | None,
        grammar: LLMatcher | None,
    ) -> list[TextRequest]:
        """The texts of a request: `n` for each prompt, with consecutive seeds.

        To be called in a PromptMaker's thread.

        Raises:
            ConfigError: a value is out of range.
        """
        several = len(body.stops) > 1  # an answer may have to say which of them ended the text
        if (several or top_logprobs is not None) and self.spelling is None:
            self.spelling = Spelling(copy.deepcopy(self.tokenizer))
        sampling = sampling_of(body, self.defaults.sampling)
        generation = GenerationConfig(
            max_tokens=max_tokens or self.defaults.max_tokens, stop=body.stops
        )
        return [
            TextRequest(
                prompt=prompt.tokens,
                sampling=replace(sampling, seed=(sampling.seed + choice) % 2**64),
                generation=generation,
                constraint=(
                    None
                    if grammar is None
                    else self.grammars.constraint(grammar, len(prompt.tokens))
                ),
                top_logprobs=top_logprobs,
            )
            for prompt in prompts
            for choice in range(body.n or 1)
        ]

    def submit(self, requests: Sequence[TextRequest]) -> list[Running]:
        """Gives all texts to the engine, or none of them.

        Raises:
            ApiError: the engine has no room for all, or refuses one.
        """
        if self.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        # Texts enter the engine only here, in the event loop's thread, so the room that is seen now
        # is still free below.
        now, count = self.engine.figures(), len(requests)
        most = now.slots + now.most_waiting
        if count > most:
            raise ApiError(
                400, f"the request asks for {count} texts (prompts times n), this server takes "
                f"{most} at once: ask for fewer, or start it with a larger `queue`",
            )  # fmt: skip
        if count > 1 and count > most - now.running - now.waiting:
            raise ApiError(
                429, f"{now.waiting} texts are waiting, and {count} more are too many: try again "
                "later", code="queue_full",
            )  # fmt: skip
        begun: list[Running] = []
        try:
            for request in requests:
                begun.append(self.engine.submit(request))
        except Exception as error:
            for running in begun:
                running.cancel()
            raise api_error(error) from error
        return begun

    def stop(self) -> None:
        """Ends every text; their requests get an error. May be called in any thread."""
        self.closing = True
        self.engine.close()

    def close(self) -> None:
        """Ends the engine and the threads, without waiting for grammars; idempotent."""
        self.stop()
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        for maker in (self._small, self._large):
            maker.close()


def sampling_of(body: ChatBody | CompletionBody, defaults: SamplingConfig) -> SamplingConfig:
    """The sampling of a request's texts; without a seed in the request, a random one is chosen.

    Raises:
        ConfigError: a value is out of range.
    """
    names = {field.name for field in fields(SamplingConfig)}
    asked = body.model_dump(include=names, exclude_none=True)
    if asked.get("top_k") == -1:  # some clients write this to keep every token
        asked["top_k"] = 0
    asked.setdefault("seed", secrets.randbits(31))
    return replace(defaults, **asked)
