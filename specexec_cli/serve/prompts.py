"""Prompts of requests, made in threads of their own so that none waits for a longer one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from specexec_cli.chat.thinking import CLOSE, OPEN
from specexec_cli.models.templates import Templates
from specexec_cli.serve.api_errors import ApiError
from specexec_cli.session.encoding import PromptEncoder

_T = TypeVar("_T")
_SLICE = 64 << 10  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a text continues."""

    text: str  # empty where tokens were given
    tokens: tuple[int, ...]


class PromptMaker:
    """One thread that makes prompts, with a tokenizer and a process for templates of its own.

    Tokenizers are not made for several threads.

    Args:
        tokenizer: the target's; a copy of it is used.
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
        """Runs what uses the tokenizer in the one thread that may."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        thinking: Mapping[str, Any] | None = None,
        *,
        answer_at_once: bool = False,
    ) -> Prompt:
        """The conversation in the model's template; in the maker's thread.

        Args:
            answer_at_once: end the thinking part where the template opens it.
        """
        text = self._encoder.render_chat(messages, tools, thinking)
        if answer_at_once and text.rstrip().endswith(OPEN):
            text = f"{text.rstrip()}\n\n{CLOSE}\n\n"  # as Qwen3's template does
        self._check_length(text)
        return self._fitting(Prompt(text=text, tokens=tuple(self._encoder.encode_rendered(text))))

    def raw(self, prompt: str | Sequence[int]) -> Prompt:
        """Text or tokens to continue; in the maker's thread."""
        if isinstance(prompt, str):
            self._check_length(prompt)
            return self._fitting(Prompt(text=prompt, tokens=tuple(self._encoder.encode(prompt))))
        return self._fitting(Prompt(text="", tokens=tuple(prompt)))

    def _check_length(self, text: str) -> None:
        """Counts a long text's tokens slice by slice, and leaves one that cannot fit unread.

        All at once, megabytes take seconds and gigabytes. A slice's ends are tokens of their own,
        so that slices have more tokens together than the text, but never twice as many.

        Raises:
            ApiError: it has more tokens than the context window holds.
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
        """Ends the thread and the process; a template under way ends with it."""
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
