"""Turns prompts and conversations into tokens of the target."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from specexec_cli.errors import ConfigError
from specexec_cli.models.channels import CLOSE, OPEN, has_channels, without_thinking
from specexec_cli.models.template_worker import SPELLED
from specexec_cli.models.templates import Template, Templates, shared

# variables of templates of thinking models (Qwen3's and others', gpt-oss's) for as little as can be
NO_THINKING: Mapping[str, Any] = {"enable_thinking": False, "reasoning_effort": "low"}


class PromptEncoder:
    """Turns prompts and conversations into tokens.

    Attributes:
        think: whether templates are asked for thinking, where `render_chat` is not told; None
            leaves it to the template.

    Args:
        tokenizer: the target's tokenizer.
        model: the target's name, for errors.
        templates: the process that renders the chat template; the shared process if not given.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: str, templates: Templates | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.think: bool | None = None
        self._model = model
        self._templates = templates
        self._template: Template | None = None  # the template that was used last
        self._spelled: dict[str, list[int]] = {}  # special token -> tokens of its letters

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
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that never merge with the text around them, by spelling."""
        return dict(self.tokenizer.get_added_vocab())

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of a text that `render_chat` has written.

        Special tokens that the template wrote become their ids. Special tokens that a message
        spells are text: they become the tokens of their letters.
        """
        first, *rest = SPELLED.split(text)
        tokens = list(self.tokenizer.encode(first, add_special_tokens=False))
        if not rest:
            return tokens
        # encoded with a line break in front, as some tokenizers put a blank before any text
        before = self.tokenizer.encode("\n", add_special_tokens=False)
        texts, spelled = rest[1::2], rest[::2]  # spelled: None if a template left a single mark
        behind = self.tokenizer([f"\n{text}" for text in texts], add_special_tokens=False)
        for token, text, found in zip(spelled, texts, behind["input_ids"], strict=True):
            if token:
                tokens += self._letters(token)
            if found[: len(before)] == before:
                tokens += found[len(before) :]
            else:
                tokens += self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _letters(self, token: str) -> list[int]:
        """Tokens of a special token's spelling, encoded as plain text."""
        if token not in self._spelled:
            marked = mark_control_tokens(token, re.compile(re.escape(token)))
            try:
                self._spelled[token] = encode_marked_chat(self.tokenizer, marked)
            except ValueError:  # encoded together, the letters always become the special token
                apart = self.tokenizer(list(token), add_special_tokens=False)["input_ids"]
                self._spelled[token] = [one for letter in apart for one in letter]
        return self._spelled[token]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation in the model's own chat template, as text, ready for the reply.

        Args:
            messages: role and content of each message, and other fields that the template reads,
                such as tool_calls.
            tools: JSON schemas of functions that the model may call, as in OpenAI's API.
            thinking: variables of templates of thinking models: enable_thinking (Qwen3) and
                reasoning_effort (gpt-oss); None: as `think` says.
        Returns:
            text for `encode_rendered`; special tokens that a message spells are marked in it.
        Raises:
            ConfigError: the model has no chat template, or the template refuses these messages.
            CheckpointError: the template takes too long, or too much memory.
        """
        if not self.has_template:
            raise ConfigError(
                f"{self._model} has no chat template: it is a base model. Use a chat "
                "or instruct model, or continue text: generate with `raw`"
            )
        if not messages:
            raise ConfigError("a conversation has at least one message")
        if has_channels(self.tokenizer):
            messages = [
                {**each, "content": without_thinking(each["content"])}
                if each["role"] == "assistant"
                else each
                for each in messages
            ]
        # left out, since many templates would write the word None
        told = [{name: each[name] for name in each if each[name] is not None} for each in messages]
        own = {None: {}, True: {"enable_thinking": True}, False: NO_THINKING}[self.think]
        variables = {
            **self.tokenizer.special_tokens_map, **(own if thinking is None else thinking)
        }  # fmt: skip
        text = (self._templates or shared()).render(
            self._chosen(with_tools=tools is not None), told, tools, variables
        )
        return answering_at_once(text) if thinking is None and self.think is False else text

    def _chosen(self, *, with_tools: bool) -> Template:
        """The template for a conversation; a model may have another one for use with tools."""
        try:
            source = self.tokenizer.get_chat_template(None, [] if with_tools else None)
        except ValueError as error:
            raise ConfigError(f"{self._model} cannot chat: {error}") from error
        if not isinstance(source, str):
            raise ConfigError(
                f"{self._model} cannot chat: its chat template is not a text: "
                "name a folder with the original model's tokenizer with `tokenizer`"
            )
        if self._template is None or self._template.source != source:
            added = self.tokenizer.added_tokens_decoder.values()
            self._template = Template(
                model=self._model,
                source=source,
                special=[one.content for one in added if one.special],
                # tokens of white space are left out: templates contain them as plain white space
                named=[one.content for one in added if one.content.strip() in source
                       and one.content.strip() and not one.special],
            )  # fmt: skip
        return self._template


def answering_at_once(text: str) -> str:
    """A rendered prompt whose thinking part, if the template has opened one, is closed."""
    if not text.rstrip().endswith(OPEN):
        return text
    return f"{text.rstrip()}\n\n{CLOSE}\n\n"  # as in Qwen3's template
