"""Checks a hub's answers before huggingface_hub makes paths from them.

huggingface_hub's cache has files under hashes, commits and names that were sent by the hub, a
mirror, or whoever answers in their place. huggingface_hub checks some of the names and none of the
hashes. So all of them are checked where they arrive, for its own code as for ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit

from specexec_cli.errors import UnknownModelError
from specexec_cli.guarded import parse_json

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's SHA-1, and the SHA-256 of a large file
# servers other than the hub have ETags of other kinds
_ETAG = re.compile(r"\w[\w.+=-]{0,199}", re.ASCII)
_NO_HASH = "0" * 40  # stands for a header that is not there
_FIRST_PATH = "specexec_first_path"


@cache
def watch_answers() -> None:
    """Makes sure that every answer that huggingface_hub gets in this process is checked."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def watched() -> Any:
        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", ()), _note_path],
            "response": [*hooks.get("response", ()), _check],
        }
        return client

    set_client_factory(watched)


def _note_path(request: Any) -> None:
    """Remembers the path of the first request, since a redirect may lead to any other path."""
    request.extensions.setdefault(_FIRST_PATH, request.url.path)


def _check(response: Any) -> None:
    """Checks the hashes and the names of files in one answer.

    Raises:
        UnknownModelError: a hash is not a hash, or a name leads out of its folder.
    """
    from huggingface_hub import constants

    wrong = [
        value
        for name in ("x-repo-commit", "x-xet-hash")
        if not _HASH.fullmatch(value := response.headers.get(name, _NO_HASH))
    ]
    if response.request.method == "HEAD":  # its ETag, without W/ and quotes, names a blob
        wrong += [
            value
            for name in ("etag", "x-linked-etag")
            if not _ETAG.fullmatch(
                (value := response.headers.get(name, _NO_HASH)).lstrip("W/").strip('"')
            )
        ]
    api = urlsplit(constants.ENDPOINT).path.rstrip("/") + "/api/"
    if response.is_success and response.request.extensions[_FIRST_PATH].startswith(api):
        wrong += _wrong(response.read())
    if wrong:
        raise UnknownModelError(
            f"{constants.ENDPOINT} answered with a file name or hash that is none, "
            f"{wrong[0][:60]!r}: check the network, or set HF_ENDPOINT to another hub"
        )


def _wrong(content: bytes) -> Iterator[str]:
    """The wrong hashes and file names in the hub's answer about a model or a model's tree."""
    try:
        answer = parse_json(content.decode(json.detect_encoding(content), "surrogatepass"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return  # huggingface_hub decodes it in the same way, and so makes nothing of it either
    except ValueError as error:
        yield str(error)
        return
    told = answer if isinstance(answer, list) else [answer]
    for one in [each for each in told if isinstance(each, dict)]:
        files = one.get("siblings")
        for entry in [one, *(files if isinstance(files, list) else ())]:
            if isinstance(entry, dict):
                yield from _wrong_in(entry)


def _wrong_in(entry: Mapping[str, Any]) -> Iterator[str]:
    large = entry.get("lfs")
    large = large if isinstance(large, dict) else {}
    hashes = [entry.get(key) for key in ("sha", "oid", "blobId", "xetHash")]
    for value in [*hashes, large.get("sha256"), large.get("oid")]:
        if value is not None and not (isinstance(value, str) and _HASH.fullmatch(value)):
            yield str(value)
    for name in (entry.get("rfilename"), entry.get("path")):
        if name is not None and not (isinstance(name, str) and is_inside(name)):
            yield str(name)


def is_inside(name: str) -> bool:
    """Whether a file of this name lies inside any folder it is joined to, on every system."""
    parts = [*PurePosixPath(name).parts, *PureWindowsPath(name).parts]
    absolute = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    return bool(parts) and not absolute and ".." not in parts and "\0" not in name
