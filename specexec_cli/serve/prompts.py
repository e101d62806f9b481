"""Makes the prompts of requests in threads of their own."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from specexec_cli.models.templates import Templates
from specexec_cli.serve.api_errors import ApiError
from specexec_cli.session.encoding import PromptEncoder, answering_at_once

_T = TypeVar("_T")
_SLICE = 64 << 10  # characters in a slice of a long text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt to continue."""

    text: str  # empty if the request gave tokens
    tokens: tuple[int, ...]


class PromptMaker:
    """A thread that makes prompts, with its own tokenizer and its own process for templates.

    It has its own tokenizer because a tokenizer must not be used by several threads at once.

    Args:
        tokenizer: the target's tokenizer, which is copied.
        model: the target's name, for errors.
        context_length: most tokens of prompt and text together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, context_length: int) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self.templates = Templates()
        self._encoder = PromptEncoder(self.tokenizer, model, self.templates)
        self._context_length = context_length
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specexec-encoder")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in the maker's thread, the only one that may use the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        thinking: Mapping[str, Any] | None = None,
        *,
        answer_at_once: bool = False,
    ) -> Prompt:
        """Renders a conversation in the model's template; to be called in the maker's thread.

        Args:
            answer_at_once: if the template opens a thinking part, close it.
        """
        text = self._encoder.render_chat(messages, tools, thinking)
        if answer_at_once:
            text = answering_at_once(text)
        self._check_length(text)
        return self._fitting(Prompt(text=text, tokens=tuple(self._encoder.encode_rendered(text))))

    def raw(self, prompt: str | Sequence[int]) -> Prompt:
        """A prompt of raw text or tokens; to be called in the maker's thread."""
        if isinstance(prompt, str):
            self._check_length(prompt)
            return self._fitting(Prompt(text=prompt, tokens=tuple(self._encoder.encode(prompt))))
        return self._fitting(Prompt(text="", tokens=tuple(prompt)))

    def _check_length(self, text: str) -> None:
        """Counts a long text's tokens slice by slice, and stops if the text cannot fit.

        Tokenizing megabytes at once would take seconds and gigabytes. Tokens do not cross the ends
        of slices, so the slices together have more tokens than the text, but never twice as many.

        Raises:
            ApiError: the text has more tokens than the context window holds.
        """
        count = 0
        for at in range(0, len(text), _SLICE) if len(text) > _SLICE else ():
            found = self.tokenizer(text[at : at + _SLICE], add_special_tokens=False)
            count += len(found["input_ids"])
            if count > 2 * self._context_length:
                raise _too_long(f"more than {self._context_length}", self._context_length)

    def _fitting(self, prompt: Prompt) -> Prompt:
        if len(prompt.tokens) >= self._context_length:
            raise _too_long(str(len(prompt.tokens)), self._context_length)
        return prompt

    def close(self) -> None:
        """Ends the thread and the process, also while a template is being rendered."""
        self.templates.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.templates.close()


def _too_long(tokens: str, context_length: int) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {tokens} tokens, the context window holds {context_length} and one must "
        "be left for the text: shorten the prompt",
        code="context_length_exceeded",
    )
