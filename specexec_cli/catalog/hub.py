"""Finds a checkpoint's folder: a local one as it is, that of a hub id in the hub's cache.

Only configuration, tokenizer, safetensors and GGUF files are fetched, and where a repository has
no weights in these, a single file of torch.save, whose pickle is not run: never code.
huggingface_hub is imported where it is used, so that other commands need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from os.path import isdir, join
from pathlib import Path
from typing import Any

from specexec_cli.catalog.hub_answers import watch_answers
from specexec_cli.catalog.models_file import TORCH_FILE, ModelEntry, weight_files
from specexec_cli.errors import CheckpointError, NotFetchedError, SpecexecError, UnknownModelError
from specexec_cli.gguf.container import part_names
from specexec_cli.guarded import read_json

WANTED_FILES = [
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
# '*' crosses folders in these patterns; consolidated files are a second copy of all the weights
UNWANTED_FILES = ["*/*", "consolidated*", "adapter_*"]

# huggingface_hub's name of the progress bar for bytes that reach the disk
_DISK_BAR = "huggingface_hub.snapshot_download"


def fetch(
    entry: ModelEntry,
    *,
    offline: bool = False,
    stored: Callable[[int], None] = lambda n_bytes: None,
) -> Path:
    """The folder that holds the entry's checkpoint, downloaded into the hub's cache if need be.

    Args:
        entry: a local folder is returned as it is.
        offline: use only what is in the cache; HF_HUB_OFFLINE has the same effect.
        stored: called with the number of bytes that have reached the disk since its last call.
    Raises:
        UnknownModelError: the folder or repository is missing, gated, or not reachable.
        CheckpointError: the repository has no safetensors weights.
    """
    folder = entry.folder
    if folder is not None and folder.is_file():
        return folder
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise UnknownModelError(f"model '{entry.name}': folder {folder} has no config.json")
        return folder
    folder = _download(entry, offline, stored)
    if entry.file is not None:
        if not (folder / entry.file).is_file():
            raise UnknownModelError(
                f"{entry.repo} has no file '{entry.file}' at revision '{entry.revision or 'main'}'"
            )
        return folder / entry.file
    if not any(folder.glob("*.safetensors")):
        folder = _download(entry, offline, stored, [TORCH_FILE])
    if not weight_files(folder):
        raise CheckpointError(
            f"{entry.repo} holds no safetensors weights at revision '{entry.revision or 'main'}', "
            f"and only those, GGUF files and a single {TORCH_FILE} are read: pick a repository or "
            "revision that has them (many have a converted one as org/name@refs/pr/N)"
        )
    return folder


def fetch_config(entry: ModelEntry, *, offline: bool = False) -> dict[str, Any]:
    """The entry's config.json alone: a few kilobytes that tell how big the model is.

    Raises:
        UnknownModelError: the folder or repository is missing, gated, or not reachable.
        CheckpointError: config.json is not a JSON object.
    """
    from huggingface_hub import constants, hf_hub_download

    if entry.folder is not None:
        path = entry.folder / "config.json"
    else:
        offline = offline or constants.is_offline_mode()
        watch_answers()
        try:
            path = Path(
                hf_hub_download(
                    entry.repo,
                    "config.json",
                    revision=entry.revision,
                    local_files_only=offline,
                    tqdm_class=_silent_bar(),
                )
            )
        except Exception as error:  # whatever the hub, the network or the disk did: one line
            raise explain(error, entry, offline) from error
    try:
        config = read_json(path)
    except OSError as error:
        raise UnknownModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return config


def cached_snapshot(entry: ModelEntry) -> Path | None:
    """The entry's folder, or GGUF file, in the hub's cache; None if any weights are missing.

    Opens no connection.
    """
    snapshot = snapshot_folder(entry)
    if snapshot is None:
        return None
    if entry.file is not None:
        parts = [snapshot / name for name in gguf_parts(entry.file)]
        return parts[0] if all(part.is_file() for part in parts) else None
    names = {path.name for path in weight_files(snapshot)}
    try:
        with suppress(FileNotFoundError):  # a model in one file has no index
            index = read_json(snapshot / "model.safetensors.index.json")
            names = set(index["weight_map"].values())
        complete = bool(names) and all((snapshot / name).is_file() for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: fetching it again mends it
    return snapshot if complete else None


def snapshot_folder(entry: ModelEntry) -> Path | None:
    """The folder of the entry's revision in the hub's cache, whole or not; None if there is none.

    Opens no connection.
    """
    from huggingface_hub import constants

    place = join(constants.HF_HUB_CACHE, "models--" + entry.repo.replace("/", "--"))
    if not isdir(place):  # of a hundred models mostly so; a Path is made more slowly
        return None
    cache = Path(place)
    revision = entry.revision or "main"
    ref = cache / "refs" / revision
    try:
        commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
        snapshot = cache / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None
    except (OSError, ValueError):  # the ref is damaged, or the revision is an impossible file name
        return None


def gguf_parts(file: str) -> list[str]:
    """All parts of a GGUF file of a repository; the file may be in a folder there."""
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(name)]


def wanted_files(entry: ModelEntry) -> list[str]:
    """Patterns of the files to fetch; of a repository of GGUF files, all parts of the one file."""
    return gguf_parts(entry.file) if entry.file is not None else WANTED_FILES


def _download(
    entry: ModelEntry,
    offline: bool,
    stored: Callable[[int], None],
    patterns: Sequence[str] | None = None,
) -> Path:
    from huggingface_hub import constants, snapshot_download

    offline = offline or constants.is_offline_mode()
    watch_answers()
    try:
        return Path(
            snapshot_download(
                entry.repo,
                revision=entry.revision,
                allow_patterns=list(patterns or wanted_files(entry)),
                ignore_patterns=None if entry.file else UNWANTED_FILES,
                local_files_only=offline,
                max_workers=2,  # a broken file is begun anew: with few at once less is lost
                tqdm_class=_silent_bar(stored),
            )
        )
    except Exception as error:  # whatever the hub, the network or the disk did: one line
        raise explain(error, entry, offline) from error


def _silent_bar(stored: Callable[[int], None] = lambda n_bytes: None) -> type[Any]:
    """A progress bar class that never shows.

    Args:
        stored: called with the number of bytes that have reached the disk since its last call.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("name") == _DISK_BAR
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                stored(int(n))
            return None

    return Silent


def gate(repo: str) -> str:
    """The sentence that tells how to get into a repository that needs an accepted licence."""
    from huggingface_hub import constants

    return (
        f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, "
        "then log in with `hf auth login`"
    )


def explain(error: Exception, entry: ModelEntry, offline: bool) -> SpecexecError:
    """The error for an exception of huggingface_hub, in one line: what happened, and the mend."""
    from huggingface_hub import constants, errors

    if isinstance(error, SpecexecError):
        return error
    repo = entry.repo
    # the cache lookup that follows a failed request hides the failure behind its own error
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    status = getattr(getattr(cause or error, "response", None), "status_code", None)
    if isinstance(cause or error, errors.GatedRepoError) or (status == 403 and entry.gated):
        return UnknownModelError(gate(repo))
    if isinstance(error, errors.RevisionNotFoundError):
        named = entry.revision or "main"
        return UnknownModelError(f"{repo} has no revision '{named}': check `revision`")
    if isinstance(error, errors.RepositoryNotFoundError):
        typed = entry.name.partition("@")[0] == repo  # the user may have meant a folder
        return UnknownModelError(
            f"no repository '{repo}' on {constants.ENDPOINT}{' and no such folder here' * typed}, "
            "or it is private: check the name, or log in with `hf auth login`"
        )
    if isinstance(error, errors.HFValidationError):
        return UnknownModelError(f"'{repo}' is not a hub id: it should look like org/name")
    if isinstance(error, errors.LocalEntryNotFoundError) and offline:
        return UnknownModelError(
            f"{repo} is not (completely) in the cache at {constants.HF_HUB_CACHE}, and this run is "
            "offline: fetch it once without `offline` and HF_HUB_OFFLINE, or give a local folder"
        )
    if status is not None:
        return UnknownModelError(
            f"{constants.ENDPOINT} answered {status} for {repo}: try again later"
        )
    if isinstance(cause or error, OSError) and getattr(error, "errno", None):
        return NotFetchedError(f"cannot store {repo} in {constants.HF_HUB_CACHE}: {error}")
    reason = str(cause or error).strip().splitlines() or [""]
    return UnknownModelError(
        f"cannot fetch {repo} from {constants.ENDPOINT} ({type(cause or error).__name__}: "
        f"{reason[0]}): check the network, or give a local folder"
    )
