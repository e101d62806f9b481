"""Follows texts of the engine's thread from the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from specexec_cli.core import StepResult
from specexec_cli.engine.text import Running


@dataclass(frozen=True, slots=True)
class Change:
    """New steps or the end of one text."""

    index: int
    steps: list[StepResult]
    ended: bool


async def follow(
    request: Request, texts: Sequence[Running], tick_s: float
) -> AsyncIterator[Change | None]:
    """Yields changes of the texts as they come, and None after each `tick_s` without a change.

    Ends with the last text, or when the client has gone away. In any case, texts that are still
    running are cancelled.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def heard() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(changed.set)

    gone = asyncio.create_task(_gone(request, texts, changed))
    try:
        for text in texts:
            text.listen(heard)
        open_ = set(range(len(texts)))
        while open_ and not gone.done():
            try:
                async with asyncio.timeout(tick_s):
                    await changed.wait()
            except TimeoutError:
                yield None
                continue
            changed.clear()
            for index in sorted(open_):
                ended = texts[index].done  # read before the steps, so as not to miss the last ones
                steps = texts[index].take()
                if ended:
                    open_.discard(index)
                if steps or ended:
                    yield Change(index, steps, ended)
    finally:
        for text in texts:
            text.cancel()
        gone.cancel()


async def _gone(request: Request, texts: Sequence[Running], changed: asyncio.Event) -> None:
    """Waits until the client has gone away, then cancels its texts."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for text in texts:
        text.cancel()
    changed.set()
