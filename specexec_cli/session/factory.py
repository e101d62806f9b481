"""Opens the kind of session that a user's request needs."""

from __future__ import annotations

import sys
from typing import Any

from specexec_cli.loading import Notice, Progress, prepare, unused_gpu
from specexec_cli.planning.chosen_models import fetch_line, to_fetch
from specexec_cli.planning.request import Request
from specexec_cli.prefixes.folder import Bound
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import TextSession
from specexec_cli.verify.verifier import LocalTarget


def open_session(
    request: Request,
    *,
    notice: Notice = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> TextSession:
    """Plans for the request and opens its models.

    Args:
        notice: told, in one line each, what is slower than it could be and what will be fetched.
        progress: told (done, total) bytes while resident weights are loaded.
    Raises:
        SpecexecError: any problem, in one line.
    """
    downloads = to_fetch(request)
    if downloads:
        notice(fetch_line(downloads))
    passed_over = unused_gpu() if request.device == "auto" else None
    if passed_over is not None:
        notice(passed_over)
    if request.method == "dsi":
        from specexec_cli.session.dsi_session import open_dsi

        distributed = open_dsi(request, notice, progress)
        if distributed is not None:
            return distributed
    found = prepare(request, notice=notice, progress=progress)
    try:
        draft = None if found.draft_shares else found.open_draft(notice)
        target = found.open_target(notice, progress)
    except BaseException:
        found.close()
        raise
    if found.draft_shares:
        try:
            draft = found.open_draft(notice, target)
        except BaseException:
            target.close()
            raise
    replays = found.decision.plan.replays
    session = LocalSession(found, LocalTarget(target, replays=replays, notice=notice), draft)
    if request.remember:
        session.remember(notice)
        if request.cache:
            try:
                session.keep_texts(Bound(request.cache_bytes), notice)
            except BaseException:
                session.close()
                raise
    return session


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


class Session:
    """The Python API for sessions: `Session.open(model="demo")`."""

    @staticmethod
    def open(
        *,
        notice: Notice = _on_stderr,
        progress: Progress = lambda done, total: None,
        **request: Any,
    ) -> TextSession:
        """Opens a session; takes the fields of planning.request.Request, such as offload="ssd".

        Missing models are downloaded; `notice` is told beforehand how large the download is.
        """
        return open_session(Request(**request), notice=notice, progress=progress)
