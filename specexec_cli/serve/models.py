"""The models that a server may open, of which one is in memory at a time."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from specexec_cli.engine.text import EngineFigures
from specexec_cli.errors import SpecexecError
from specexec_cli.serve.api_errors import GONE, ApiError, api_error
from specexec_cli.serve.service import Service

_ASKED_EACH_S = 0.05  # time between two looks at whether the running texts have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A model that requests may name."""

    names: tuple[str, ...]  # by which it may be named, its own first
    open: Callable[[], Service]  # takes minutes; raises SpecexecError


class Models:
    """Exchanges the model in memory when a request names another one.

    Requests are served in the order in which they come: one that names another model waits until
    the texts under way have ended, and those behind it wait for the model that it has opened.

    Args:
        offered: the models, the one that is open now first.
        service: that model, opened.
        unload_s: seconds without a text after which the model leaves memory; None for never.
    """

    def __init__(
        self, offered: Sequence[Offered], service: Service, unload_s: float | None = None
    ) -> None:
        self.offered = tuple(offered)
        self.closing = False
        self._open: Offered | None = offered[0]
        self._service: Service | None = service
        self._unload_s = unload_s
        now = service.engine.figures()
        # of the models that were open before; sums go on with them
        self._before = replace(now, passes=0, generated_tokens=0, bytes_streamed=0, texts={})
        self._turn = asyncio.Lock()  # held by the request that looks for its model
        self._waiting = 0  # requests that wait for their turn
        self._users = 0  # requests that have a model, and have not submitted their texts
        self._used_s = time.monotonic()  # when the model was last seen at work
        self._exchanging = threading.Lock()

    @property
    def service(self) -> Service | None:
        """The open model; None while no model is in memory."""
        return self._service

    def is_open(self, offered: Offered) -> bool:
        """Whether this model is the one in memory."""
        return self._service is not None and self._open is offered

    def named(self, name: str | None) -> Offered:
        """The model that a request names; without a name, the one that was open last.

        Raises:
            ApiError: this server has no such model.
        """
        if name is None:
            return self._open or self.offered[0]
        for offered in self.offered:
            if name in offered.names:
                return offered
        known = ", ".join(f"'{offered.names[0]}'" for offered in self.offered)
        raise ApiError(
            404, f"no model '{name[:100]}' is open here: this server has {known}",
            param="model", code="model_not_found",
        )  # fmt: skip

    @asynccontextmanager
    async def use(
        self, name: str | None, gone: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[Service]:
        """The model that a request names, opened; it stays until the context is left.

        Texts that were submitted by then keep it in memory until they have ended.

        Args:
            gone: whether the client has gone away.
        Raises:
            ApiError: this server has no such model, cannot open it, is shutting down, or too many
                requests wait for a model.
        """
        offered, now = self.named(name), self.figures()
        if self._waiting > now.slots + now.most_waiting:
            raise ApiError(429, "too many requests wait for a model: try again later",
                           code="queue_full")  # fmt: skip
        self._waiting += 1
        try:
            async with self._turn:
                if not self.is_open(offered):
                    await self._idle(gone)
                    await asyncio.to_thread(self._exchange, offered)
                if self._service is None:
                    raise _shutting_down()
                service = self._service
                self._users += 1
        except SpecexecError as error:
            raise api_error(error) from error
        finally:
            self._waiting -= 1
        try:
            yield service
        finally:
            self._users -= 1
            self._used_s = time.monotonic()

    async def _idle(self, gone: Callable[[], Awaitable[bool]]) -> None:
        """Waits until no text is under way.

        Raises:
            ApiError: the server is shutting down, or the client has gone away.
        """
        while True:
            if self.closing:
                raise _shutting_down()
            if await gone():
                raise ApiError(GONE, "the client has gone away", code="cancelled")
            if not self._busy():
                return
            await asyncio.sleep(_ASKED_EACH_S)

    def _busy(self) -> bool:
        now = self._service and self._service.engine.figures()
        return self._users > 0 or bool(now and (now.running or now.waiting))

    def _exchange(self, offered: Offered | None) -> None:
        """Takes the open model out of memory, and opens another one unless it is None.

        Raises:
            SpecexecError: it cannot be opened; no model is in memory then.
        """
        with self._exchanging:
            self._drop()
            if offered is None or self.closing:
                return
            service = offered.open()
            self._open, self._service = offered, service
            gc.freeze()  # see Server.startup
        if self.closing:  # meanwhile
            self._service.stop()

    def _drop(self) -> None:
        service, self._service = self._service, None
        if service is None:
            return
        service.close()
        ended = replace(service.engine.figures(), failed=False, failing=None)
        self._before = _sums(self._before, ended)
        service.session.close()
        del service
        gc.unfreeze()
        gc.collect()  # modules of a model refer to each other

    async def tick(self) -> None:
        """Takes a model that has been idle for long out of memory; called each second."""
        now_s = time.monotonic()
        if self._unload_s is None or self._service is None:
            return
        if self._busy() or self._waiting:
            self._used_s = now_s
        elif now_s - self._used_s >= self._unload_s:
            async with self._turn:
                if not self._busy() and not self._waiting:
                    await asyncio.to_thread(self._exchange, None)

    def figures(self) -> EngineFigures:
        """What the open model's engine is doing, and the sums of all engines since the start."""
        service = self._service
        if service is None:
            return self._before
        return _sums(self._before, service.engine.figures())

    def stop(self) -> None:
        """Ends every text; their requests get an error. May be called in any thread."""
        self.closing = True
        if (service := self._service) is not None:
            service.stop()

    def close(self) -> None:
        """Ends the open model's engine and closes its session, once it is opened."""
        self.closing = True
        self._exchange(None)


def _sums(before: EngineFigures, now: EngineFigures) -> EngineFigures:
    """The figures of `now`, with sums that begin with those of `before`."""
    return replace(
        now,
        passes=before.passes + now.passes,
        generated_tokens=before.generated_tokens + now.generated_tokens,
        bytes_streamed=before.bytes_streamed + now.bytes_streamed,
        texts=Counter(before.texts) + Counter(now.texts),
    )


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
