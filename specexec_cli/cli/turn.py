"""How `generate` makes a prompt of the user's text: a turn of a chat, or text to continue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from specexec_cli.cli.options import System, Think
from specexec_cli.errors import ConfigError

if TYPE_CHECKING:
    from specexec_cli.session import TextSession


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """Options of a prompt. A model with a chat template gets the text as a user's message."""

    raw: Annotated[bool, typer.Option("--raw", help="Continue the text: no chat template.")] = False
    system: System = None
    think: Think = None

    def __post_init__(self) -> None:
        if self.raw and self._says_how:
            raise ConfigError("`raw` continues text: it has no place for `system` and `think`")

    @property
    def _says_how(self) -> bool:
        return self.system is not None or self.think is not None

    def planned(self, text: str) -> str:
        """All text of the prompt, for which memory is planned."""
        return text if self.system is None else f"{self.system}\n{text}"

    def messages(self, session: TextSession, text: str) -> list[dict[str, str]] | None:
        """The conversation that the text begins; None if the model is to continue the text.

        A base model continues it, unless options ask for what only a chat template can do.
        """
        if self.raw or not (session.has_template or self._says_how):
            return None
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": text}]

    def prompt(self, session: TextSession, text: str) -> tuple[str | None, list[int]]:
        """The prompt in the model's chat template, None if the text is continued; its tokens."""
        session.think = self.think
        messages = self.messages(session, text)
        if messages is None:
            return None, session.encode(text)
        rendered = session.render_chat(messages)
        return rendered, session.encode_rendered(rendered)
