"""The conversations of earlier responses, which a request may continue by the response's id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specexec_cli.serve.api_errors import ApiError
from specexec_cli.serve.bodies import ChatMessage

_MOST_CHARACTERS = 32 << 20  # most characters of all conversations that are kept
_MOST = 10_000  # most conversations that are kept


class Conversations:
    """Keeps the newest conversations in memory, until the server ends."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, tuple[ChatMessage, ...]]] = OrderedDict()
        self._characters = 0  # of all; those that conversations have in common count in each

    def keep(self, own_id: str, messages: Sequence[ChatMessage]) -> None:
        """Keeps a conversation under its last response's id, in place of the oldest ones."""
        count = sum(len(message.text) + len(str(message.tool_calls)) for message in messages)
        self._kept[own_id] = count, tuple(messages)
        self._characters += count
        while self._characters > _MOST_CHARACTERS or len(self._kept) > _MOST:
            _, (gone, _) = self._kept.popitem(last=False)
            self._characters -= gone

    def messages(self, own_id: str | None) -> Sequence[ChatMessage]:
        """The messages up to a response; none for None.

        Raises:
            ApiError: there is no such response, or it is no longer kept.
        """
        if own_id is None:
            return ()
        found = self._kept.get(own_id)  # at once: another thread may drop it
        if found is None:
            raise ApiError(
                404, f"no response '{own_id[:100]}' is kept here: this server keeps the newest "
                "ones that asked for it, until it ends. Send the whole conversation as input",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        return found[1]
