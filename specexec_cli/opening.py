"""From names to opened models: what a session needs before it can generate.

`find` resolves names, fetches and checks files, and decides device, dtype and placement without
loading a weight; `open_target` and `open_draft` load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from specexec_kernels import dispatch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specexec_cli.choice import ModelChoice, choose_models
from specexec_cli.config import DtypeName, Method, OffloadMode, TreeConfig
from specexec_cli.device import cpu_info, format_bytes, free_ram_bytes
from specexec_cli.errors import ConfigError
from specexec_cli.hub import fetch
from specexec_cli.models.checkpoint_info import eos_token_ids
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import check_same_tokenizer, load_tokenizer
from specexec_cli.offload.demand import Work
from specexec_cli.offload.placement import Placement, place_on_cpu, place_on_gpu
from specexec_cli.offload.probe import probe_link
from specexec_cli.offload.store import Checkpoint, read_checkpoint
from specexec_cli.registry import load_registry

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]
# How many tokens of prompt and text to plan memory for, once there is a tokenizer to count with.
ContextTokens = Callable[[PreTrainedTokenizerBase], int]
# The tree to use, and to plan memory for, from the one that is recommended for the pair.
Resized = Callable[[TreeConfig], TreeConfig]

# Below this a model computes in float32 whatever the CPU: nothing is gained by rounding.
_SMALL_MODEL_BYTES = 1_000_000_000
_LINK_PROBE_BYTES = 64 << 20
# Without a better count: tokens that the caches are planned for.
_PLANNED_CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Files and decisions, no weights yet."""

    choice: ModelChoice
    target: Checkpoint
    draft: Checkpoint | None
    config: PretrainedConfig  # the target's
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    placement: Placement

    @property
    def settings(self) -> dict[str, str]:
        """What "auto" became."""
        return {
            "offload": self.placement.label,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def open_target(self, notice: Notice, progress: Progress) -> StreamedModel:
        """Loads what stays of the target and begins to stream the rest."""
        obstacle = dispatch.triton_obstacle(self.device) if self.device.type == "cuda" else None
        if obstacle is not None:
            notice(f"PyTorch stands in for the GPU kernels, which is slower: {obstacle}")
        return StreamedModel.open(
            self.target.folder,
            device=self.device,
            dtype=self.dtype,
            tiers=self.placement.tiers,
            slots=self.placement.slots,
            device_slots=self.placement.device_slots,
            notice=notice,
            progress=progress,
        )

    def open_draft(self, notice: Notice) -> StreamedModel | None:
        """Loads the draft model to stay.

        Raises:
            TokenizerMismatchError: its tokens are not the target's.
        """
        if self.draft is None:
            return None
        self.check_tokenizers()
        sizes = self.draft.total_bytes, self.target.total_bytes
        if sizes[0] > sizes[1]:
            notice(
                f"the draft model ({format_bytes(sizes[0])}) is larger than the target "
                f"({format_bytes(sizes[1])}): drafting will cost more than it saves. "
                "Were --target and --draft swapped?"
            )
        return StreamedModel.open(
            self.draft.folder, device=self.device, dtype=self.dtype, tiers=None, notice=notice
        )

    def check_tokenizers(self) -> None:
        """Makes sure that target and draft model speak of the same tokens.

        Raises:
            TokenizerMismatchError: they do not; says how they differ.
        """
        if self.draft is not None:
            folder = self.draft.folder
            vocab_size = int(load_config(folder).vocab_size)
            check_same_tokenizer(self.tokenizer, load_tokenizer(folder), vocab_size)


def find(
    *,
    pair: str | None,
    target: str | None,
    draft: str | None,
    method: Method,
    models_file: Path | None,
    revision: str | None,
    offline: bool,
    offload: OffloadMode,
    device: str,
    dtype: DtypeName,
    tokenizer: Path | None,
    context: ContextTokens | None,
    tree: Resized | None,
    copies: int,
    devices: Sequence[str],
    download_progress: bool,
) -> Found:
    """Resolves names, fetches files, and decides where and how to compute.

    Args:
        copies: of the target, which share this machine's RAM, in turns on each of `devices`.
    Raises:
        SpecexecError: whatever is wrong, in one line.
    """
    registry = load_registry(models_file)
    choice = choose_models(registry, pair=pair, target=target, draft=draft, method=method)
    if tree is not None:
        choice = replace(choice, tree=tree(choice.tree))
    folder = fetch(choice.target, revision=revision, offline=offline, progress=download_progress)
    checkpoint, draft_checkpoint = read_checkpoint(folder), None
    config = load_config(folder)
    if choice.draft is not None:
        draft_checkpoint = read_checkpoint(
            fetch(choice.draft, revision=None, offline=offline, progress=download_progress)
        )
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device, checkpoint.total_bytes, config.dtype)
    words = load_tokenizer(tokenizer or folder)
    tokens = _PLANNED_CONTEXT if context is None else context(words)
    work = Work(
        context_tokens=min(int(config.max_position_embeddings), tokens),
        budget=choice.tree.budget if draft_checkpoint is not None else 0,
        item_bytes=torch_dtype.itemsize,
    )
    return Found(
        choice=choice,
        target=checkpoint,
        draft=draft_checkpoint,
        config=config,
        tokenizer=words,
        eos_ids=eos_token_ids(folder, config, words),
        device=torch_device,
        dtype=torch_dtype,
        placement=_place(
            offload,
            checkpoint,
            draft_checkpoint,
            work,
            copies,
            [pick_device(name) for name in devices],
        ),
    )


def _place(
    mode: OffloadMode,
    target: Checkpoint,
    draft: Checkpoint | None,
    work: Work,
    copies: int,
    devices: Sequence[torch.device],
) -> Placement:
    """One placement for every copy: what the fullest device has room for."""
    ram_bytes, device = free_ram_bytes() // copies, devices[0]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier session left
        free = [torch.cuda.mem_get_info(each)[0] for each in devices]
        vram_bytes = min(free) // -(-copies // len(devices))
        probe = partial(probe_link, device, _LINK_PROBE_BYTES)
        return place_on_gpu(mode, target, draft, work, ram_bytes, vram_bytes, probe)
    return place_on_cpu(mode, target, draft, work, ram_bytes)


def pick_device(name: str) -> torch.device:
    """The device of a --device option; "auto" is the first GPU, or the CPU.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: not a device. Try cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no CUDA device here. Try --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cpu":
        return device
    number, count = device.index or 0, torch.cuda.device_count()
    if number >= count:
        raise ConfigError(f"--device {name}: the last CUDA device here is cuda:{count - 1}")
    return torch.device("cuda", number)


def pick_dtype(
    name: DtypeName, device: torch.device, checkpoint_bytes: int, stored: torch.dtype | None
) -> torch.dtype:
    """The compute dtype. "auto": the checkpoint's own on a GPU; on a CPU bfloat16 where it has
    matrix instructions for it, float32 elsewhere and for small models."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda":
        return stored if stored in (torch.float16, torch.bfloat16) else torch.float32
    fast_bf16 = {"avx512_bf16", "amx_bf16"} & set(cpu_info().flags)
    if fast_bf16 and checkpoint_bytes >= _SMALL_MODEL_BYTES:
        return torch.bfloat16
    return torch.float32
