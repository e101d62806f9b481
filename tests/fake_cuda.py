"""A stand-in for a CUDA device: its tensors lie in RAM, and report that they are on the device.

Every operation on them is done on the CPU, after a check that a GPU would have made: no operand in
ordinary memory, no synchronization while a graph is being captured. A captured graph is the list of
operations between begin and end, and a replay does them again on the same memory, so that whatever
Python decided during the capture stays decided. It counts the bytes that live on each device, and a
call of CUDA that it refuses is reported once more by the next launch, as CUDA does.

There may be two devices. Every thread begins with the first of them as its own, as in CUDA.
PyTorch's operations find the device of their operands, but kernels, streams, events and graphs of
the other device are refused until the thread has called torch.cuda.set_device: Triton and graphs
would launch in the wrong place, and CUDA would make a context of 0.4 GB on the first device for
nothing. `Runtime.contexts` has the devices on which there is one.

What it cannot show: the order of work on streams (tests/virtual_time.py), compiled kernels
(tests/kernels), and speed.

FAKE_CUDA_PINS=0 in the environment refuses to pin memory, another number is how many bytes may be.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import interpret_quickly
from matrix_units import sum_in_order
from specexec_kernels import (
    dispatch,
    triton_compact_kv,
    triton_experts,
    triton_gumbel,
    triton_norm,
    triton_pinned,
    triton_recurrence,
    triton_rotary,
    triton_rows,
    triton_topk,
    triton_tree_attention,
)
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.split_rows import FrontRows, SplitRows
from specexec_kernels.tree_attention import TreeMask
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from uncounted import uncounted

from specexec_cli import loading
from specexec_cli.offload import link
from specexec_cli.planning import memory as planning_memory
from specexec_cli.planning import placement

CUDA = torch.device("cuda", 0)
MOST_DEVICES = 2
VRAM_BYTES = 8_000_000_000
aten = torch.ops.aten

KERNELS = (
    (triton_rows, "quantized_matmul"), (triton_rows, "unpack"),
    (triton_tree_attention, "tree_attention"), (triton_topk, "log_softmax_topk"),
    (triton_compact_kv, "compact_kv"), (triton_gumbel, "gumbel_noise"),
    (triton_pinned, "read_pinned"), (triton_recurrence, "recurrence"),
    (triton_experts, "routes"), (triton_experts, "products"), (triton_experts, "row_sums"),
    (triton_norm, "rms_norm"), (triton_rotary, "rotary"),
)  # fmt: skip
# Results that the host must see: each waits for the device.
_SYNCHRONIZING = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select}
# Operands in ordinary memory that CUDA's own implementations take.
_CROSSING = {aten.copy_, aten._to_copy}
_CPU_INDICES = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


def _mm_wide(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """torch.mm(out_dtype=) and bmm, for operands of two bytes; no other device has it."""
    if {left.dtype, right.dtype} - {torch.float16, torch.bfloat16} or dtype != torch.float32:
        raise RuntimeError(f"mm of {left.dtype} and {right.dtype} into {dtype} on CUDA")
    return left.float() @ right.float()


def _softmax(rows: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """A GPU widens two bytes on the way; a CPU must be given float32."""
    return (rows.float() if half_to_float else rows).softmax(dim)


_NO_LAUNCH = {aten.empty.memory_format, aten.detach.default, aten._to_copy.default}
_NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._unsafe_view,
              aten.lift_fresh, aten.detach}  # fmt: skip
_CUDA_ALONE = {
    aten.mm.dtype: _mm_wide, aten.bmm.dtype: _mm_wide, aten._softmax.default: _softmax,
}  # fmt: skip


class Memory:
    """The most bytes that the tensors on a device have taken at once.

    Not of those made inside a capture: they lie in a pool of their own that steps share, while here
    a recorded operation keeps its results for good.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._live = 0  # bytes of all that is held, whether or not it is gone meanwhile

    def hold(self, tensor: Tensor) -> None:
        """Counts what the tensor lies in, once, for as long as that lives."""
        if is_captured():
            return
        storage = tensor.untyped_storage()
        known = self._held.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        if known is not None:
            self._drop([storage._cdata])
        self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live += storage.nbytes()
        if self._live > self.peak:  # unless some of it is gone
            self._drop([key for key, (held, _) in list(self._held.items()) if held.expired()])
            self.peak = max(self.peak, self._live)

    def _drop(self, gone: list[int]) -> None:
        for key in gone:
            self._live -= self._held.pop(key)[1]


_memories = [Memory() for _ in range(MOST_DEVICES)]
_refused: list[str] = []  # calls of CUDA that the next launch reports
_pinned: set[int] = set()  # addresses of tensors that torch has pinned
_contexts: set[int] = set()  # devices that the process has a context on


class _Current(threading.local):
    """The device of each thread, and its stream on each device; that of all threads at first."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = list(_FIRST_STREAMS)


def _index(device: Any) -> int:
    """The number of a device; the thread's own where none is named."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return _current.device if index is None else index


def _here(index: int, what: object) -> None:
    """Refuses what belongs to another device than the thread's own."""
    if index != _current.device:
        raise RuntimeError(
            f"{what} of cuda:{index} in a thread whose device is cuda:{_current.device}: "
            "torch.cuda.set_device comes first"
        )
    _contexts.add(index)


class CudaTensor(torch.Tensor):
    """Says it is on the device; `inner` has the numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=torch.device("cuda", index),
        )  # fmt: skip
        made.inner = inner
        _memories[index].hold(inner)
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"CudaTensor({self.inner!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _perform(func, args, kwargs or {})


class _Graph:
    """torch.cuda.CUDAGraph."""

    pool: object = None

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []
        self.index = _current.device

    def __del__(self) -> None:
        _pools[self.pool] = _pools.get(self.pool, 0) - 1

    def replay(self) -> None:
        _here(self.index, "a graph")
        for operation in self.operations:
            operation()


_pools: dict[object, int] = {}  # how many graphs of each pool are left
# never twice: graphs of an earlier stand-in may be collected while a later one is in use
_pool_numbers = count()
_capturing: _Graph | None = None
_capturing_thread = 0  # what other threads do meanwhile is no part of the graph


def is_captured() -> bool:
    """Whether what this thread does becomes part of a graph."""
    return _capturing is not None and threading.get_ident() == _capturing_thread


def _leaves(value: Any) -> list[Any]:
    """What lies in lists and tuples; PyTorch's own walk takes longer than most operations here."""
    if type(value) in (list, tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists and tuples of changed leaves."""
    if type(value) in (list, tuple):
        return type(value)([_mapped(change, each) for each in value])
    return change(value)


def _inner(value: Any) -> Any:
    if isinstance(value, PackedWeight):
        return replace(value, tensors={leaf: _inner(t) for leaf, t in value.tensors.items()})
    if isinstance(value, TreeMask):
        return replace(value, table=_inner(value.table))
    if isinstance(value, triton_experts.ExpertTable):
        return replace(value, addresses=_inner(value.addresses))
    if isinstance(value, SplitRows):
        return SplitRows(FrontRows(_mapped(_inner, value.front.blocks)), _inner(value.own))
    return value.inner if isinstance(value, CudaTensor) else value


def _on_device(value: Any, index: int) -> Any:
    return CudaTensor(value, index) if type(value) is Tensor else value


_watching: list[Callable[[Any, tuple[Any, ...], Any], None]] = []


@contextmanager
def watched(note: Callable[[Any, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Tells of each operation inside the `with`: which of PyTorch's, its arguments, its result."""
    _watching.append(note)
    try:
        yield
    finally:
        _watching.remove(note)


@dataclass
class Counts:
    """What a thread asks of the device: what a launch and a wait cost, a pass pays as often."""

    operations: int = 0  # of PyTorch that start a kernel or a copy; some of them start several
    kernels: int = 0  # of ours that are started
    waits: int = 0  # for the device: results that the host reads, and copies of pageable memory
    thread: int = 0


_counting: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what this thread starts inside the `with`; a captured graph starts as a whole."""
    counts = Counts(thread=threading.get_ident())
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def _count(operations: int = 0, kernels: int = 0, waits: int = 0) -> None:
    for counts in _counting:
        if counts.thread == threading.get_ident():
            counts.operations += operations
            counts.kernels += kernels
            counts.waits += waits


def _count_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
    """Counts one of PyTorch's operations, where the device has a part in it."""
    packet = func.overloadpacket
    tensors = [each for each in _leaves([*args, *kwargs.values()]) if isinstance(each, Tensor)]
    there = [isinstance(each, CudaTensor) for each in [*tensors, *_leaves(found)]
             if isinstance(each, Tensor)]  # fmt: skip
    if not any(there) or func.is_view or packet in _NO_KERNEL:
        return
    crosses = packet in _CROSSING and not all(there)
    if crosses:
        given = dict(zip([each.name for each in func._schema.arguments], args, strict=False))
        waits = not (given | kwargs).get("non_blocking", False)
    else:
        indices = [each for each in tensors if each.dim() and not isinstance(each, CudaTensor)]
        waits = packet in _SYNCHRONIZING or bool(indices)
    _count(operations=1, waits=int(waits))


@uncounted
def _perform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One of PyTorch's operations."""
    result = _performed(func, args, kwargs)
    if _counting:
        _count_operation(func, args, kwargs, result)
    for note in _watching:
        note(func.overloadpacket, args, result)
    return result


def _performed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packet, device = func.overloadpacket, kwargs.get("device")
    given = _leaves([*args, *kwargs.values()])
    tensors = [value for value in given if isinstance(value, Tensor)]
    there = [value for value in tensors if isinstance(value, CudaTensor)]
    # a number in ordinary memory travels with the launch, unless it is to be copied
    here = [value for value in tensors if not isinstance(value, CudaTensor)]
    here = [value for value in here if value.dim() or packet in _CROSSING]
    if device is not None:
        to_device = torch.device(device).type == "cuda"
        kwargs = kwargs | {"device": "cpu"}
    elif packet is aten.copy_:
        to_device = isinstance(args[0], CudaTensor)
    else:
        to_device = bool(there)
    if not there and not to_device:
        return func(*args, **kwargs)
    [index, *further] = {int(value.device.index) for value in there} or {_index(device)}
    _contexts.add(index)
    if further or (there and here and packet not in _CROSSING | _CPU_INDICES):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    if is_captured() and (packet in _SYNCHRONIZING or here or not to_device):
        raise RuntimeError(f"{func}: operation not permitted when stream is capturing")

    if _refused and func not in _NO_LAUNCH:
        raise RuntimeError(f"CUDA error: {_refused.pop()}")
    run = _CUDA_ALONE.get(func, func)
    args = _mapped(_inner, args)
    kwargs = {name: _mapped(_inner, value) for name, value in kwargs.items()}
    found = _launch(lambda: run(*args, **kwargs))
    if func._schema.is_mutable:  # in place, or out=: what comes back is what was given
        owners = {id(value.inner): value for value in there}
        return _mapped(lambda value: owners.get(id(value), value), found)
    return _mapped(lambda value: _on_device(value, index), found) if to_device else found


def _launch(run: Callable[[], Any]) -> Any:
    """Does it; during a capture, notes how to do it again into the same memory."""
    found = run()

    def again() -> None:
        for old, new in zip(_leaves(found), _leaves(run()), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    if is_captured():
        assert _capturing is not None
        _capturing.operations.append(again)
    return found


def _kernel(interpreted: Callable[..., Any]) -> Callable[..., Any]:
    """A Triton kernel in the interpreter, launched on tensors of the device."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            _inner(value) is not value or value.data_ptr() in _pinned
            for value in args
            if hasattr(value, "to")
        ]
        assert all(tensors), "a kernel was given a tensor in ordinary memory"
        for value in args:
            if isinstance(value, CudaTensor):
                _here(value.device.index, "a kernel's operand")
        _count(kernels=1)
        found = _launch(lambda: interpreted(*_mapped(_inner, list(args)), **kwargs))
        return _mapped(lambda value: _on_device(value, _current.device), found)

    return launch


def _addresses(table_of: Callable[..., Any]) -> Callable[..., Any]:
    """What is written down of tensors of the device, on the host, and starts nothing."""
    return lambda *given: table_of(*_mapped(_inner, list(given)))


class _Mode(TorchDispatchMode):
    """Sees what makes tensors on the device from none that are there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and PyTorch's guard takes as long as many an operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not types and not (kwargs and "device" in kwargs):  # in ordinary memory, and stays there
            return func(*args, **(kwargs or {}))
        return _perform(func, args, kwargs or {})


_NAMES_OF_DEVICES = (str, torch.device)


def _numbered(value: Any) -> Any:
    if type(value) in _NAMES_OF_DEVICES and str(value) == "cuda":
        return torch.device("cuda", _current.device)
    return value


class _NumberedDevices(TorchFunctionMode):
    """ "cuda" is the thread's own device: the guard borrowed below knows of no current one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.device:
            if kwargs:
                kwargs = {name: _numbered(value) for name, value in kwargs.items()}
            for value in args:
                if type(value) in _NAMES_OF_DEVICES:
                    args = tuple(map(_numbered, args))
                    break
        return func(*args, **(kwargs or {}))


class _Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.index = _index(device)

    def wait_stream(self, other: _Stream) -> None:
        _here(self.index, "a stream")

    def wait_event(self, event: _Event) -> None:
        _here(self.index, "a stream")
        assert event.recorded

    def synchronize(self) -> None:
        _here(self.index, "a stream")
        _count(waits=1)


_FIRST_STREAMS = [_Stream(torch.device("cuda", index)) for index in range(MOST_DEVICES)]
_current = _Current()


def _current_stream(device: Any = None) -> _Stream:
    return _current.streams[_index(device)]


def _set_stream(stream: _Stream) -> None:
    _here(stream.index, "a stream")
    _current.streams[stream.index] = stream


@contextmanager
def _on_stream(stream: _Stream) -> Iterator[None]:
    """torch.cuda.stream, which ends by making a context on the device that the thread had."""
    before = _current_stream()
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)


_recorded_to: set[object] = set()  # pools


class _Capture:
    """torch.cuda.graph, which does not recover from a failure inside.

    Ending a failed capture is an error, raised before the former stream is made current again. In
    some versions the allocator then takes the pool for one that is still recorded to
    (pytorch/pytorch#180395). It refuses a pool whose graphs are all gone.
    """

    def __init__(
        self, graph: _Graph, pool: object, stream: _Stream, capture_error_mode: str
    ) -> None:
        self._graph, self._pool, self._stream = graph, pool, stream

    def __enter__(self) -> None:
        global _capturing, _capturing_thread
        self._before = _current_stream()
        _set_stream(self._stream)
        if self._pool in _recorded_to:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if _pools.get(self._pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        _pools[self._pool] = _pools.get(self._pool, 0) + 1
        self._graph.pool = self._pool
        _recorded_to.add(self._pool)
        _capturing, _capturing_thread = self._graph, threading.get_ident()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        global _capturing
        _capturing = None
        if kind is not None:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        _recorded_to.remove(self._pool)
        _set_stream(self._before)


class _Event:
    """torch.cuda.Event, of the device of the stream that it was recorded on."""

    recorded = False

    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self, stream: _Stream) -> None:
        _here(stream.index, "a stream")
        self.recorded, self.index = True, stream.index

    def query(self) -> bool:
        _here(self.index, "an event")
        return self.recorded

    def synchronize(self) -> None:
        _here(self.index, "an event")
        _count(waits=1)
        assert self.recorded


class Runtime:
    """torch.cuda.cudart()."""

    most_pinned_bytes = 10**12  # that the driver lets a process register

    class cudaError:
        success = 0

    def __init__(self, pins_bytes: int) -> None:
        self.registered: dict[int, int] = {}  # address -> bytes
        self.refused = 0
        self._pins_bytes = pins_bytes
        self.free_bytes = VRAM_BYTES  # of each device, as torch tells
        self.memories = [Memory() for _ in range(MOST_DEVICES)]
        self.contexts = _contexts  # by number of the device

    @property
    def memory(self) -> Memory:
        """That of the first device."""
        return self.memories[0]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """torch.cuda.mem_get_info."""
        _contexts.add(_index(device))
        return self.free_bytes, VRAM_BYTES + 1

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        _contexts.add(_current.device)
        assert address % 4096 == 0
        assert n_bytes > 0
        if sum(self.registered.values()) + n_bytes > self._pins_bytes:
            self.refused += 1
            _refused.append("out of memory")
            return 2  # cudaErrorMemoryAllocation
        self.registered[address] = n_bytes
        return self.cudaError.success

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return self.cudaError.success


def _set_device(device: torch.device) -> None:
    if device.index is None:
        raise ValueError(f"expected a device with an index, not {device}")
    _current.device = device.index
    _contexts.add(device.index)


def _pin_memory(tensor: Tensor) -> Tensor:
    """torch.Tensor.pin_memory, which copies. Tests that let memory end do not see the copy: whoever
    pins goes on without where the driver refuses."""
    with _disable_current_modes():
        pinned = tensor.clone()
    _pinned.add(pinned.data_ptr())
    return pinned


def _register_device_guard() -> None:
    """Where there is no GPU, the CPU's way of switching devices, a no-op, serves for CUDA too.

    Indexing (x[ids], x[:, 1:2] = 0) switches devices in C++. A build of torch without CUDA has no
    way to; that of a build with CUDA asks the driver, which is not there.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not torch.cuda.is_available():
        guards[1] = guards[0]


@contextmanager
def seen() -> Iterator[None]:
    """The devices are seen by this thread; a thread that a test starts itself says so as well."""
    # torch.tensor(..., device=) makes its numbers on the CPU, where _Mode sees them leave
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    try:
        with _NumberedDevices(), _Mode(), torch.no_grad():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]


@contextmanager
def fake_cuda(
    *,
    triton: bool = False,
    pins_bytes: int | None = None,
    devices: int = 1,
    bare: bool = False,
    replays: bool = False,
) -> Iterator[Runtime]:
    """torch sees devices of 8 GB inside the `with`; what lives on them is counted.

    Args:
        triton: whether our kernels run there, in Triton's interpreter.
        pins_bytes: of memory that may be pinned; as the environment says unless told.
        devices: how many there are, up to MOST_DEVICES.
        bare: plans set nothing aside for libraries, of which the stand-in has none, and no link to
            it is measured.
        replays: whether sessions record a target's passes; the interpreter takes minutes for it.
    """
    global _memories
    _register_device_guard()
    if pins_bytes is None:
        pins_bytes = int(os.environ.get("FAKE_CUDA_PINS", 1 << 62))
    runtime = Runtime(pins_bytes)
    _memories = runtime.memories
    _contexts.clear()
    with pytest.MonkeyPatch.context() as patch, seen():
        replaced: list[tuple[object, str, object]] = [
            (torch.Tensor, "pin_memory", _pin_memory),
            (torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in _pinned),
            (link, "free_vram", lambda devices: [VRAM_BYTES for _ in devices]),
            (dispatch, "triton_obstacle", lambda device: None if triton else "not wanted"),
            *((module, name, _kernel(getattr(module, name))) for module, name in KERNELS),
            (triton_experts, "table_of", _addresses(triton_experts.table_of)),
        ]
        for name, value in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: devices,
            "current_device": lambda: _current.device,
            "set_device": _set_device,
            "get_device_capability": lambda device=None: (8, 6),
            "get_device_name": lambda device=None: "stand-in",
            "mem_get_info": runtime.mem_get_info,
            "max_memory_allocated": lambda device=None: runtime.memories[_index(device)].peak,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device=None: None,
            "cudart": lambda: runtime,
            "current_stream": _current_stream,
            "set_stream": _set_stream,
            "stream": _on_stream,
            "Stream": _Stream,
            "Event": _Event,
            "CUDAGraph": _Graph,
            "graph": _Capture,
            "graph_pool_handle": lambda: (0, next(_pool_numbers)),
        }.items():
            replaced.append((torch.cuda, name, value))
        if not replays:
            replaced.append((placement, "replay_bytes", lambda *sizes: 1 << 62))
        if bare:
            replaced += [
                (planning_memory, "SCRATCH_BYTES", 0),
                (loading, "GPU_LIBRARY_BYTES", 0),
                (loading, "measured_links", lambda *args: {}),
            ]
        for owner, name, answer in replaced:
            patch.setattr(owner, name, answer)
        if triton:
            interpret_quickly()
            sum_in_order(patch)
        try:
            yield runtime
        finally:
            _recorded_to.clear()
            _refused.clear()
            _pinned.clear()
            _current.device = 0
    assert _current.streams == _FIRST_STREAMS, "another stream was left current"
    assert not runtime.registered, "host memory was freed while it was registered with CUDA"
