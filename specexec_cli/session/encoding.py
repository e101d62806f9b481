"""Prompts and conversations as tokens of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specexec_cli.errors import ConfigError
from specexec_cli.models.channels import has_channels, without_thinking


class PromptEncoder:
    """Turns prompts and conversations into tokens.

    Args:
        tokenizer: the target's.
        model: the target's name, for errors.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self.tokenizer = tokenizer
        self._model = model

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

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation in the model's own chat template, as text, ready for the reply.

        Args:
            messages: role and content, and what else the template reads, such as tool_calls.
            tools: JSON schemas of functions that the model may call, as OpenAI's API has them.
            thinking: what templates of models that think read besides: enable_thinking (Qwen3)
                and reasoning_effort (gpt-oss).
        Raises:
            ConfigError: the model has no chat template, or it refuses these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                f"{self._model} has no chat template: it is a base model. Use a chat "
                "or instruct model, or continue raw text: generate without `chat`"
            )
        if has_channels(self.tokenizer):
            messages = [
                {**each, "content": without_thinking(each["content"])}
                if each["role"] == "assistant"
                else each
                for each in messages
            ]
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools is not None else None,
                **(thinking or {}),
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:  # a template raises what it likes (jinja2.TemplateError)
            raise ConfigError(
                f"the chat template of {self._model} refuses this conversation: {error}"
            ) from error
        assert isinstance(text, str)
        return text
