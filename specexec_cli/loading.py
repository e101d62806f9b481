"""From a Request to opened models: what a session needs before it can generate.

`prepare` looks at this machine, has the planning room decide, and reads tokenizer and config. Then
`Prepared.open_target` and `Prepared.open_draft` load weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from specexec_kernels import dispatch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specexec_cli.device import format_bytes, free_ram_bytes, gpu_obstacle, gpus
from specexec_cli.dsi.layout import Layout
from specexec_cli.errors import ConfigError
from specexec_cli.gguf.container import read_once
from specexec_cli.hosts.files import digest_of
from specexec_cli.hosts.joined import SpanOrder
from specexec_cli.hosts.pool import HostPool
from specexec_cli.hosts.wire import token_of_environment
from specexec_cli.models.arithmetic_probe import probe_arithmetic, probe_layer
from specexec_cli.models.calibration_text import standard_pieces
from specexec_cli.models.checkpoint_info import eos_token_ids
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.own_copy import copy_obstacle, own_copy
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import check_same_tokenizer, load_tokenizer
from specexec_cli.offload import link
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.disk_probe import probe_ssd
from specexec_cli.offload.link import prepare_cuda
from specexec_cli.offload.link_probe import probe_link
from specexec_cli.planning.alternatives import check_own_copy, with_best_draft
from specexec_cli.planning.chosen_models import ChosenPair, choose_pair, registry_of
from specexec_cli.planning.hosts import WaveTimes, read_hosts
from specexec_cli.planning.machine import (
    Setting,
    Site,
    gpu_rates,
    host_rate,
    known_rates,
    link_rate,
)
from specexec_cli.planning.machine_rates import (
    FlopsByRows,
    LayerCost,
    arithmetic_name,
    load_rates,
    new_rates,
    rates_file,
    save_rates,
)
from specexec_cli.planning.memory import GPU_CONTEXT_BYTES, GPU_LIBRARY_BYTES
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import Decision, resolve, told_of_assumed
from specexec_cli.quiet import QuietCheck
from specexec_cli.triton_check import triton_lack

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]

_ROCM = "torch {} is built for ROCm, and AMD's GPUs are not supported"
_LINK_PROBE_BYTES = 64 << 20
_SSD_PROBE_S = 0.3
_SMALL_SSD_PROBE_S = 0.05  # for checkpoints below _SMALL_BYTES, which a long probe would hold up
_SMALL_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that is decided and read before weights are loaded."""

    decision: Decision
    target: Checkpoint
    draft: Checkpoint | None
    config: PretrainedConfig  # the target's
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    hosts: HostPool | None = None  # other machines that have layers

    @property
    def pair(self) -> ChosenPair:
        """The models, and the tree that memory is planned for."""
        return self.decision.pair

    @property
    def device(self) -> torch.device:
        """The device that computes; the first where there are several."""
        return torch.device(self.decision.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in."""
        dtype = getattr(torch, self.decision.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def settings(self) -> dict[str, str]:
        """The offload tiers, device and dtype of this session, chosen where the user left them to
        us, and how it rounds rows, or keys and values, where it does, and which layers are on other
        machines, where some are."""
        decision = self.decision
        away = [
            f"{each.host.name} {each.layers.start}-{each.layers.stop - 1}"
            for each in decision.plan.others
        ]
        rounds, eight_bit = decision.activations != "full", decision.work.eight_bit_kv
        return {
            "offload": decision.plan.label,
            "device": decision.device,
            "dtype": decision.dtype,
            **({"activations": decision.activations} if rounds else {}),
            **({"kv": "8bit"} if eight_bit else {}),
            **({"hosts": ", ".join(away)} if away else {}),
        }

    @property
    def target_spec(self) -> ModelSpec:
        """How the target is opened on the device that computes."""
        plan = self.decision.plan
        return ModelSpec(
            device=self.device,
            dtype=self.dtype,
            tiers=self.decision.tiers,
            span=range(len(plan.tiers)) if plan.others else None,
            buffers=max(2, plan.ssd_buffers),
            device_buffers=max(2, plan.device_buffers),
            expert_bytes=plan.expert_bytes,
            device_expert_bytes=plan.device_expert_bytes,
            copy_rows=plan.copy_rows,
            chunk_rows=self.decision.prompt_rows,
            eight_bit_rows=self.decision.activations == "8bit",
            eight_bit_kv=self.decision.work.eight_bit_kv,
            kv_layers=plan.kv_layers,
        )

    @property
    def draft_spec(self) -> ModelSpec:
        """How a draft model is opened: resident on that device, and without `own_rows`, since its
        bits decide no token."""
        return ModelSpec(
            device=self.device,
            dtype=self.dtype,
            tiers=None,
            own_rows=False,
            eight_bit_rows=self.decision.activations != "full",
        )

    def open_target(self, notice: Notice, progress: Progress) -> StreamedModel:
        """Loads the resident part of the target and begins to stream the rest.

        Args:
            notice: called with each line that the user should read.
            progress: called with the bytes loaded so far and in all.
        """
        obstacle = dispatch.triton_obstacle(self.device) if self.device.type == "cuda" else None
        if obstacle is not None:
            notice(f"PyTorch stands in for the GPU kernels, which is slower: {obstacle}")
        if self.hosts is None:
            return self.target_spec.open(self.target, notice=notice, progress=progress)
        return self._open_on_hosts(self.hosts, notice, progress)

    def _open_on_hosts(self, hosts: HostPool, notice: Notice, progress: Progress) -> StreamedModel:
        """As `open_target`, while other machines open their layers."""
        decision, spec = self.decision, self.target_spec
        features = tuple(sorted(set(decision.work.features or ())))
        order = SpanOrder(
            dtype=decision.dtype,
            eight_bit_rows=spec.eight_bit_rows,
            # what drafts stays here
            work=asdict(replace(decision.work, features=features or None, draft_window=None)),
            digest=digest_of(self.target, notice),
        )
        hosts.begin_to_open(decision.plan.others, order)
        model = spec.open(self.target, notice=notice, progress=progress)
        try:
            hosts.opened(dispatch.rounding(self.device))
        except BaseException:
            model.close()
            raise
        model.pass_on(hosts, WaveTimes(decision.plan).fastest)
        return model

    def close(self) -> None:
        """Lets other machines go, if the target that has them was not opened."""
        if self.hosts is not None:
            self.hosts.close()

    @property
    def draft_shares(self) -> bool:
        """Whether the draft model takes weights from the target, of which it is part or copy."""
        return self.decision.work.shares_tables or self.decision.work.reads_target

    def open_draft(
        self, notice: Notice, target: StreamedModel | None = None
    ) -> StreamedModel | None:
        """Loads the draft model, all of it resident; None if there is none.

        Args:
            notice: called with each line that the user should read.
            target: the opened target, if the draft model shares parts with it.
        Raises:
            TokenizerMismatchError: its tokens are not the target's.
        """
        if self.draft is None:
            return None
        if self.draft.head is not None:
            assert target is not None, "a trained head reads its rows"
            target.kept_features = self.draft.head.features
            return self.draft_spec.open(self.draft, shared=target.ends, notice=notice)
        self.check_tokenizers()
        sizes = self.draft.total_bytes, self.target.total_bytes
        if sizes[0] > sizes[1]:
            notice(
                f"the draft model ({format_bytes(sizes[0])}) is larger than the target "
                f"({format_bytes(sizes[1])}): drafting will cost more than it saves. "
                "Were the two swapped?"
            )
        shared = None
        if target is not None:
            exact = self.target if self.decision.work.shares_layers else None
            shared = target.shared_parts(exact)
        return self.draft_spec.open(self.draft, shared=shared, notice=notice)

    def check_tokenizers(self) -> None:
        """Checks that target and draft model have the same tokens.

        Raises:
            TokenizerMismatchError: they have not; says how they differ.
        """
        if self.draft is not None:
            vocab_size = int(load_config(self.draft).vocab_size)
            check_same_tokenizer(self.tokenizer, load_tokenizer(self.draft.folder), vocab_size)


@read_once()
def prepare(
    request: Request,
    *,
    workers: Layout | None = None,
    notice: Notice = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Prepared:
    """Resolves names, fetches files, and decides where and how to compute.

    If the target is to draft with a low-bit copy of itself, the copy is made here, last of all.

    Args:
        request: what the user asks for.
        workers: the DSI workers that compute in place of this process; the plan is then that of
            one target server.
        notice: called with each line that the user should read.
        progress: called while the copy is made, with the target's bytes done so far and in all.
    Raises:
        SpecexecError: says in one line what is wrong.
    """
    if workers is not None:
        site = site_of_workers(workers, notice)
    else:
        site = this_site(pick_device(request.device), notice)
    if request.hosts is None:
        return _prepared(request, site, notice, progress)
    hosts = HostPool(read_hosts(request.hosts), token_of_environment(), notice)
    try:
        site = replace(site, hosts=hosts.gather())
        prepared = replace(_prepared(request, site, notice, progress), hosts=hosts)
        if assumed := told_of_assumed(prepared.decision, site.hosts):
            notice(assumed)
        return prepared
    except BaseException:
        hosts.close()
        raise


def _prepared(request: Request, site: Site, notice: Notice, progress: Progress) -> Prepared:
    """As `prepare`, on the machines of a site."""
    tokenizers: dict[Path, PreTrainedTokenizerBase] = {}

    def words_of(folder: Path) -> PreTrainedTokenizerBase:
        if folder not in tokenizers:
            tokenizers[folder] = load_tokenizer(folder)
        return tokenizers[folder]

    request = with_best_draft(request, site, notice, copy_obstacle)
    _check_before_download(request, site)
    decision = resolve(
        request,
        site,
        fetch_weights=True,
        check=load_config,
        count_tokens=lambda folder, text: len(words_of(folder).encode(text)),
    )
    check_own_copy(decision, notice, request.models_file, copy_obstacle)
    target = decision.target.checkpoint
    assert target is not None, "its weights have been fetched"
    config = load_config(target)
    tokenizer = words_of(request.tokenizer or target.folder)
    draft = decision.draft.checkpoint if decision.draft is not None else None
    if decision.left_out:
        notice(decision.left_out)
    if decision.pair.own_bits is not None:
        draft = own_copy(
            target, decision.pair.own_bits, notice, progress, lambda: standard_pieces(tokenizer)
        )
    return Prepared(
        decision=decision,
        target=target,
        draft=draft,
        config=config,
        tokenizer=tokenizer,
        eos_ids=eos_token_ids(target.folder, config, tokenizer),
    )


def _check_before_download(request: Request, site: Site) -> None:
    """Refuses drafting with a copy of the target that cannot pay, before the target is fetched.

    Raises:
        ConfigError: the copy cannot pay, as far as is known without the target's files.
    """
    if choose_pair(registry_of(request), request).own_bits is None:
        return
    known = resolve(request.with_estimated_prompt(), replace(site, measure=None))
    if known.target.checkpoint is None:
        check_own_copy(known, models_file=request.models_file)


def this_site(device: torch.device, notice: Notice = lambda text: None) -> Site:
    """The Site of this process computing on one of this machine's devices.

    Args:
        device: the device.
        notice: called if other programs disturbed a measurement, which is then not kept.
    """
    vram_bytes, card = 0, None
    if device.type == "cuda":
        prepare_cuda()
        card = torch.cuda.get_device_name(device)
        torch.cuda.empty_cache()  # gives back what an earlier session left
        # This creates the CUDA context, so what it reports is free beside the context. Free RAM is
        # read after this, for the same reason.
        vram_bytes = torch.cuda.mem_get_info(device)[0]
    return replace(
        _site(device, vram_bytes, card, notice),
        program_bytes=0,  # this process runs already, so free memory does not include its own
        context_bytes=GPU_LIBRARY_BYTES,  # nor the context's
        measure=partial(measured_links, device),
        triton_obstacle=dispatch.triton_obstacle(device) if device.type == "cuda" else None,
    )


def site_of_workers(workers: Layout, notice: Notice = lambda text: None) -> Site:
    """The Site that one of DSI's target servers plans for: its share of the fullest device.

    This process creates no context on any GPU, so it does not measure the links to GPUs, nor start
    Triton.

    Args:
        workers: the workers of this machine.
        notice: as for `this_site`.
    Raises:
        WorkerError: a GPU does not report its free memory.
    """
    devices, vram_bytes = [torch.device(name) for name in workers.devices], 0
    card, lack = None, None
    if devices[0].type == "cuda":
        # the process that asked had a context, which is gone
        vram_bytes = min(link.free_vram(devices)) + GPU_CONTEXT_BYTES - GPU_LIBRARY_BYTES
        card, lack = next((each.name for each in gpus()), None), triton_lack()
    site = _site(devices[0], vram_bytes, card, notice)
    measure, obstacle = partial(measured_links, None), lack.what if lack else None
    return workers.share(replace(site, measure=measure, triton_obstacle=obstacle))


def _site(device: torch.device, vram_bytes: int, card: str | None, notice: Notice) -> Site:
    """The Site of a process that is yet to be started, on a device with `vram_bytes` free.

    Args:
        card: the GPU's name, as the driver tells it.
    """
    rates = load_rates(rates_file())
    gpu, source = gpu_rates(rates, vram_bytes, card)
    return Site(
        device=str(device),
        settings={
            "ram": Setting(free_ram_bytes(), "free here"),
            "vram": Setting(vram_bytes, "free here"),
            **known_rates(rates),
            "link": link_rate(rates),
            **({"memory": Setting(gpu.memory_bytes_per_s, source)} if vram_bytes else {}),
        },
        gpu=gpu,
        flops=(rates and rates.flops) or {},
        layers=(rates and rates.layers) or {},
        host_bytes_per_s=host_rate(rates),
        calibrate=partial(_calibrate, notice) if device.type == "cpu" else None,
    )


def _calibrate(
    notice: Notice, dtype: str, packed_bits: int, eight_bit_rows: bool
) -> tuple[FlopsByRows, LayerCost]:
    """Measures one kind of arithmetic on this CPU, and keeps the result for later runs.

    The result is not kept if other programs used the CPU meanwhile: this session runs beside them
    too, but a later one may not.
    """
    name = arithmetic_name(dtype, packed_bits, eight_bit_rows=eight_bit_rows)
    with QuietCheck(computes=True) as of_products:
        points = probe_arithmetic(dtype, packed_bits, eight_bit_rows)
    with QuietCheck() as of_layers:
        cost = probe_layer(dtype)
    disturbance = of_products.disturbance or of_layers.disturbance
    if disturbance:
        notice(
            f"{disturbance} while arithmetic in {name} was measured: what was found is used "
            "for this run and not kept"
        )
        return points, cost
    with suppress(OSError):  # this is a cache: what cannot be written is measured again
        found = replace(new_rates(), flops={name: points}, layers={dtype: cost})
        save_rates(found, rates_file())
    return points, cost


def measured_links(
    device: torch.device | None, target: Checkpoint, ssd_bytes: int, link_bytes: int
) -> Mapping[str, Setting]:
    """Probes the links that a pass will use, for a fraction of a second each.

    The SSD is probed on the target's own files, since the figure of `doctor` may be of another disk
    and is older.

    Args:
        device: the GPU with the link to probe; None if this process must create no context on it.
        target: with the files to read.
        ssd_bytes: bytes that a pass reads from the SSD; 0 skips its probe.
        link_bytes: bytes that a pass moves over the link; 0 skips its probe.
    """
    found = {}
    if link_bytes and device is not None:
        in_ram = max(link_bytes - ssd_bytes, 0)
        rate = probe_link(device, _LINK_PROBE_BYTES, in_ram)
        found["link"] = Setting(rate, "measured")
    if ssd_bytes:
        small = target.total_bytes < _SMALL_BYTES
        probe = probe_ssd(target.files, _SMALL_SSD_PROBE_S if small else _SSD_PROBE_S)
        found["ssd"] = Setting(probe.bytes_per_s, "measured")
    return found


def sees_cuda() -> bool:
    """Whether torch can compute on an NVIDIA GPU.

    In torch's builds for AMD's GPUs torch.cuda.is_available() is true as well.
    """
    return torch.cuda.is_available() and torch.version.hip is None


def unused_gpu() -> str | None:
    """Why the CPU computes though there is a GPU; None if there is none, or the user hid it."""
    if torch.version.hip is not None:
        return f"the CPU computes: {_ROCM.format(torch.__version__)}"
    if torch.cuda.is_available() or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    found = gpus()
    if not found:
        return None
    reason = gpu_obstacle(torch.__version__, torch.version.cuda, found[0].driver)
    return f"the CPU computes, not the {found[0].name}: {reason}"


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is the first GPU, or the CPU without one.

    Raises:
        ConfigError: there is no such device here, or it is not supported.
    """
    if name == "auto":
        return torch.device("cuda", 0) if sees_cuda() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"`device='{name}'`: not a device. Try cpu, cuda or cuda:1") from error
    if device.type == "cuda" and torch.version.hip is not None:
        reason = _ROCM.format(torch.__version__)
        raise ConfigError(f"`device='{name}'`: {reason}. Try `device='cpu'`")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"`device='{name}'`: torch sees no CUDA device here. Try `device='cpu'`")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device='{name}'`: only cpu and cuda are supported")
    if device.type == "cpu":
        return device
    number, count = device.index or 0, torch.cuda.device_count()
    if number >= count:
        raise ConfigError(f"`device='{name}'`: the last CUDA device here is cuda:{count - 1}")
    return torch.device("cuda", number)
