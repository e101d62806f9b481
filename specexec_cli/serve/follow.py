"""Texts of the engine's thread, seen from the server's event loop."""

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
    """Something of one text."""

    index: int
    steps: list[StepResult]
    ended: bool


async def follow(
    request: Request, texts: Sequence[Running], tick_s: float
) -> AsyncIterator[Change | None]:
    """What comes of the texts, as it comes; None each `tick_s` in which nothing does.

    It ends with the last text, or when the client goes away. However it ends, the texts that are
    still under way are cancelled.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def heard() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
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
                ended = texts[index].done  # before its steps are taken, or the last are missed
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
    """Ends when the client has gone away, and has its texts ended too."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for text in texts:
        text.cancel()
    changed.set()
