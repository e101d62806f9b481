"""The models of a chat: one is open at a time, and /model opens another one in its place."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from specexec_cli.cli.opening import opened
from specexec_cli.cli.sampling import settled_sampling
from specexec_cli.config import DRAFT_WORDS, SamplingChoice, SamplingConfig
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.session import TextSession


class ChatModels:
    """Opens a chat's model, and others by name, with the same options. Leave it as a context.

    Args:
        request: the model that the chat begins with.
        choice: the user's options for sampling; what they leave open is as the makers sample.
        think: whether chat templates are asked for thinking; None leaves it to them.
        yes: fetch models that are not here without asking.
        quiet: print no notices, and show no bar.
    """

    def __init__(
        self,
        request: Request,
        choice: SamplingChoice,
        *,
        think: bool | None,
        yes: bool,
        quiet: bool,
    ) -> None:
        self.request = request
        self._choice, self._think, self._yes, self._quiet = choice, think, yes, quiet
        self._session: TextSession | None = None

    def named(self, name: str) -> Request:
        """The request for another model: options that are for the first one alone are left out.

        Its files are fetched if they are not here.

        Raises:
            SpecexecError: there is no such model, it cannot be fetched, or it does not fit.
        """
        from specexec_cli.cli.fetching import fetch_first

        draft = self.request.draft if self.request.draft in DRAFT_WORDS else None
        found = replace(self.request, model=name, draft=draft, revision=None, tokenizer=None)
        fetch_first(found, yes=self._yes, quiet=self._quiet)
        return found

    def open(self, request: Request) -> tuple[TextSession, SamplingConfig]:
        """Closes the open model and opens another; returns its session and its sampling.

        Raises:
            SpecexecError: it cannot be opened; no model is open then.
        """
        self.close()
        self._session = session = opened(request, quiet=self._quiet)
        session.context_limit, session.think = request.context_tokens, self._think
        self.request = request
        return session, settled_sampling(session, self._choice, self._quiet)

    def close(self) -> None:
        """Closes the open model."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            del session
            gc.collect()  # modules of a model refer to each other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
