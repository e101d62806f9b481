"""Runs a decoder layer of the usual form for few rows as one call into compiled code, on a CPU.

The form is that of Llama: norm, queries, keys and values, rotary positions, attention, output, norm
and a gated MLP. Gemma 3 has two norms more, behind attention and behind the MLP. In a pass of one
row, Python and PyTorch take longer between a small model's products than the products do. Here the
arguments of all kernels are written once. A call replaces those that change from pass to pass, and
one compiled function runs kernel after kernel. The bits are those of the kernels one by one, with
PyTorch's operations in between (cpu_layer_ir).
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_attention, cpu_attention_ir, cpu_jit
from specexec_kernels.cpu_activation import Activation
from specexec_kernels.cpu_calls import Calls, bits, has_threads, kernel
from specexec_kernels.cpu_grouped import Group
from specexec_kernels.cpu_ir_emit import ScaleType
from specexec_kernels.cpu_layer_ir import (
    AddSpec,
    ClearArg,
    ClearSpec,
    GateSpec,
    HeadArg,
    HeadSpec,
    JoinSpec,
    NormArg,
    NormSpec,
    RowArg,
)
from specexec_kernels.cpu_matmul import stored
from specexec_kernels.cpu_matmul_plan import Plan, plan_for
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.split_rows import NO_FRONT, FrontRows

Front = tuple[FrontRows, FrontRows]  # keys and values

_TABLE = 2048  # numbers
MOST_ROWS = 16  # that are run so: one thread does all that lies between products and attention
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
DTYPES: Mapping[torch.dtype, ScaleType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MOST_KINDS = 4  # of layers of a model, such as those with a window and those without
_PROBES = 64  # rows by which PyTorch's order of sums is told


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What layers must have in common to be run by one kind of program.

    Attributes:
        intermediate: outputs of the MLP's first linears; 0 where the MLP is no part of the program,
            such as that of routed experts.
        dtype: that the layer computes in, one of DTYPES.
        activation: of the MLP; None where it is no part of the program.
        epsilons: of the first and the second norm.
        head_epsilons: of the norms of queries and keys; None where there are none.
        behind_epsilons: of the norms behind attention and behind the MLP; None where there are
            none.
        rounds_once: whether norms of heads round as HeadSpec.rounds_once says.
        scale: multiplies the attention's scores.
        softcap: caps the scores (cpu_attention.attend); None where they are not capped.
        rotary: numbers of a head that rotary positions are applied to.
        sinks: whether the heads have sinks (cpu_attention.attend).
        biased: those of q, k, v and o that have a bias.
        rounds_first: whether sums are rounded to `dtype` before a bias is added.
        pairs: those of q and k whose outputs are in GGUF's order (HeadSpec.pairs).
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    activation: Activation | None
    epsilons: tuple[float, float]
    head_epsilons: tuple[float, float] | None
    behind_epsilons: tuple[float, float] | None
    rounds_once: bool
    scale: float
    softcap: float | None
    rotary: int
    sinks: bool
    biased: frozenset[str]
    rounds_first: bool
    pairs: frozenset[str]

    @property
    def group(self) -> int:
        """Heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def linears(self) -> Sequence[str]:
        """Those of LINEARS that the program multiplies by."""
        return LINEARS if self.intermediate else LINEARS[:4]

    def outputs(self, name: str) -> int:
        """Outputs of one of LINEARS."""
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        if name in heads:
            return heads[name] * self.head_dim
        return self.intermediate if name in ("gate", "up") else self.hidden

    @property
    def fits(self) -> bool:
        """Whether the kernels' vectors divide the layer's sizes, and PyTorch sums in a known order.

        PyTorch's order is that of one of its releases for one kind of CPU, so it is compared.
        """
        lanes = cpu_jit.lanes()
        whole = (
            self.hidden, self.intermediate, self.head_dim, self.head_dim // 2, self.rotary // 2,
        )  # fmt: skip
        normed = [self.hidden, *([self.head_dim] if self.head_epsilons else [])]
        return (
            self.dtype in DTYPES
            and self.head_dim % 2 == self.rotary % 2 == 0
            and self.heads % self.kv_heads == 0
            and all(size % lanes == 0 for size in whole)
            and all(map(sum_lanes, normed))
        )


@cache
def sum_lanes(width: int) -> int:
    """Lanes of the registers in which PyTorch sums a row of `width` float32 on this CPU; 0 if it
    sums in another order than the norm's kernel does in any of them."""
    rows = torch.randn(_PROBES, width, generator=torch.Generator().manual_seed(width))
    ones, found = torch.ones(width), torch.empty(_PROBES, width)
    expected = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)
    for lanes in (8, 16, 4):
        norm = kernel(NormSpec(width, "float32", lanes, cpu_jit.lanes()))
        table = array("q", (_PROBES, rows.data_ptr(), ones.data_ptr(), found.data_ptr(),
                            bits(1e-5)))  # fmt: skip
        norm(table.buffer_info()[0])
        if torch.equal(found, expected):
            return lanes
    return 0


class Workspace:
    """Memory that the programs of a model share, since its layers run one after another.

    It also keeps what layers of a pass have in common: they are given the same tensors.

    Attributes:
        cos, sin: addresses of the rows' cosines and sines, as `use` laid them out.
        seen: address of the mask, as `use` padded it.
        slots: of that mask.
        padded: the slots rounded up to whole vectors.
        experts: what cpu_experts made for the model's experts, by their kind.
    """

    def __init__(self) -> None:
        self.experts: dict[Hashable, Any] = {}
        self.cos = self.sin = self.seen = self.slots = self.padded = 0
        self._kept: dict[tuple[str, int, torch.dtype], Tensor] = {}
        # cos, sin and mask, and what was made of them, of the kinds of layers that were new last
        self._made: dict[tuple[int, ...], tuple[Sequence[Tensor], Sequence[Tensor]]] = {}
        self._used: tuple[int, ...] = ()

    def get(self, name: str, numbers: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory of this name and size, zeros at first."""
        key = name, numbers, dtype
        if key not in self._kept:
            self._kept[key] = torch.zeros(numbers, dtype=dtype)
        return self._kept[key]

    def use(self, cos: Tensor, sin: Tensor, mask: Tensor, dtype: torch.dtype, rotary: int) -> None:
        """Sets the attributes for a layer's arguments, which layers of a kind have in common.

        Args:
            cos, sin: (..., rows, rotary), or the half of it that both halves of a head share; they
                are rounded to `dtype`.
            mask: (..., rows, slots) bool, True = attend.
        """
        used = id(cos), id(sin), id(mask)
        if used == self._used:
            return
        if used not in self._made:
            if len(self._made) == _MOST_KINDS:
                del self._made[next(iter(self._made))]
            angles = (
                torch.cat([each.to(dtype).float()] * (rotary // each.shape[-1]), dim=-1)
                for each in (cos, sin)
            )
            seen = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % cpu_jit.lanes()))
            laid_out = [each.contiguous() for each in (*angles, seen)]
            self._made[used] = (cos, sin, mask), laid_out  # kept, so that no other has their id
        made, self._used = self._made[used][1], used
        self.slots, self.padded = mask.shape[-1], made[2].shape[-1]
        self.cos, self.sin, self.seen = (each.data_ptr() for each in made)


class Program:
    """The kernels of a layer for a number of rows, with their arguments.

    Attributes:
        shape: of the layer.
        rows: their number.
    """

    def __init__(
        self, shape: LayerShape, rows: int, plans: Mapping[str, Plan], space: Workspace
    ) -> None:
        """Writes all arguments but those that `place` and `run` write.

        Args:
            plans: of each of the shape's linears, for `rows` rows.
        """
        self.shape, self.rows, self._plans, self._space = shape, rows, plans, space
        self._calls = Calls(_TABLE)
        self._table = self._calls.table
        self._product: dict[str, int] = {}  # linear -> place of its arguments
        self._norms: dict[str, int] = {}  # norm of whole rows -> place of its arguments
        self._tile, self._tiles = cpu_attention.tiles(shape.group * rows)
        self._cache: tuple[int, ...] = ()  # addresses and strides of keys and values, last run
        self._front = weakref.ref(NO_FRONT)  # shared keys of the last run
        self._blocks = cpu_attention.blocks_table(NO_FRONT, NO_FRONT)
        self._placed: list[Mapping[Any, Tensor]] = []
        self._appended: list[tuple[int, int, int]] = []  # of keys and values: where a run writes
        self._score_slots = 0
        self._write_attention()
        if shape.intermediate:
            self._write_mlp()
        else:
            self._norm("second", shape.epsilons[1])
        self._calls.finish()
        self._look_up_places()

    def _look_up_places(self) -> None:
        """Looks up where in the table `run` writes: sums of enumerations take Python a while."""
        arg, first = cpu_attention_ir.Arg, self._attention
        self._of_hidden = self._norms["first"] + NormArg.X, self._middle + RowArg.LEFT
        self._of_angles = [
            (self._heads[name] + HeadArg.COS, self._heads[name] + HeadArg.SIN) for name in "qk"
        ]
        self._of_mask = first + arg.MASK, first + arg.MASK_STRIDE, first + arg.SLOTS
        self._of_out = [int(self._last + RowArg.OUT)]
        self._of_normed = -1
        if not self.shape.intermediate:
            second = self._norms["second"]
            self._of_out.append(second + NormArg.X)
            self._of_normed = second + NormArg.OUT

    def place(
        self,
        weights: Mapping[str, PackedWeight],
        norms: Mapping[str, Tensor],
        biases: Mapping[str, Tensor],
        sinks: Tensor | None,
    ) -> None:
        """Writes the addresses of a layer's parameters, which are kept until `let_go`.

        Args:
            weights: of each of the shape's linears, of the plans' formats.
            norms: float32: "first" and "second" (hidden,); "behind attention" and "behind MLP"
                (hidden,) if the shape has `behind_epsilons`; and "q" and "k" (head_dim,) if it has
                `head_epsilons`.
            biases: float32 of the shape's `biased`.
            sinks: (heads,), if the shape has them.
        """
        table = self._table
        self._placed = [norms, biases]
        for name, weight in weights.items():
            first = self._product[name]
            tensors = stored(weight)
            self._placed.append(tensors)
            for at, tensor in tensors.items():
                table[first + at] = tensor.data_ptr()
        if "o" in biases:
            table[self._middle + RowArg.BIAS] = biases["o"].data_ptr()
        if sinks is not None:
            cpu_attention.lay_sinks(self._sinks, sinks, self.rows)
        for name, first in self._norms.items():
            table[first + NormArg.WEIGHT] = norms[name].data_ptr()
        for name, first in self._heads.items():
            if name in biases:
                table[first + HeadArg.BIAS] = biases[name].data_ptr()
            if self.shape.head_epsilons is not None and name != "v":
                table[first + HeadArg.WEIGHT] = norms[name].data_ptr()

    def let_go(self) -> None:
        """Keeps the parameters no longer; `run` needs others to be placed before."""
        self._placed = []

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int,
        mask: Tensor, front: Front = (NO_FRONT, NO_FRONT),
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Runs the layer, and writes the rows' keys and values to the slots from `start` on.

        Args:
            hidden: (..., rows, hidden) float32, contiguous.
            cos, sin: (..., rows, the shape's rotary), or half of that (Workspace.use).
            keys, values: (1, kv_heads, slots, head_dim) of the shape's dtype, each slot contiguous,
                with room for the rows.
            mask: (..., rows, slots) bool, True = attend; slots are those up to the last new row,
                behind those of `front`.
            front: the keys and values of slots in front of those, that texts share.
        Returns:
            the layer's result, (..., rows, hidden) float32, and None; or, of a shape without MLP,
            the sum behind attention, and what the second norm makes of it, of the shape's dtype.
        """
        table, space = self._table, self._space
        out, normed = torch.empty_like(hidden), None
        space.use(cos, sin, mask, self.shape.dtype, self.shape.rotary)
        cache = keys.data_ptr(), keys.stride(1), values.data_ptr(), values.stride(1)
        if cache != self._cache or front[0] is not self._front():
            self._cache = ()  # the table is of no run while it is written: Ctrl-C may end that
            self._place_cache(keys, values, front)
            self._cache, self._front = cache, weakref.ref(front[0])
        given, made = hidden.data_ptr(), out.data_ptr()
        for at in self._of_hidden:
            table[at] = given
        for at in self._of_out:
            table[at] = made
        if self._of_normed >= 0:
            normed = torch.empty_like(hidden, dtype=self.shape.dtype)
            table[self._of_normed] = normed.data_ptr()
        for cosines, sines in self._of_angles:
            table[cosines], table[sines] = space.cos, space.sin
        for at, address, slot_bytes in self._appended:
            table[at] = address + start * slot_bytes
        mask_at, stride_at, slots_at = self._of_mask
        table[mask_at], table[stride_at] = space.seen, space.padded
        table[slots_at] = space.slots
        if space.padded > self._score_slots:
            self._grow_scores(space.padded)
        self._calls.go()
        return out, normed

    def _place_cache(self, keys: Tensor, values: Tensor, front: Front) -> None:
        """Writes where keys and values lie."""
        arg, table, first = cpu_attention_ir.Arg, self._table, self._attention
        self._appended = []
        for name, rows, at in (("k", keys, arg.KEYS), ("v", values, arg.VALUES)):
            head, slot = rows.stride(1), rows.stride(2)
            own = self._heads[name]
            table[own + HeadArg.OUT_KV_STRIDE], table[own + HeadArg.OUT_ROW_STRIDE] = head, slot
            item = own + HeadArg.OUT, rows.data_ptr(), slot * rows.element_size()
            self._appended.append(item)
            before = front[0].slots * slot * rows.element_size()
            table[first + at] = rows.data_ptr() - before
        table[first + arg.KEY_HEAD_STRIDE], table[first + arg.KEY_SLOT_STRIDE] = keys.stride()[1:3]
        table[first + arg.VALUE_HEAD_STRIDE] = values.stride(1)
        table[first + arg.VALUE_SLOT_STRIDE] = values.stride(2)
        self._blocks = cpu_attention.blocks_table(*front)
        table[first + arg.BLOCKS] = self._blocks.buffer_info()[0]
        table[first + arg.BLOCK_COUNT] = len(front[0].blocks)
        table[first + arg.FIRST] = front[0].slots

    def _grow_scores(self, slots: int) -> None:
        """Makes room for the attention's scores, so that a growing text seldom needs more."""
        room = 1 << (slots - 1).bit_length()
        scores = self._space.get("scores", self._threads * self._tile * room)
        self._table[self._attention + cpu_attention_ir.Arg.SCORES] = scores.data_ptr()
        self._score_slots = room  # only now that it is there

    def _write_attention(self) -> None:
        """Writes the calls from the layer's begin to the sum behind its attention."""
        shape, rows, dtype = self.shape, self.rows, DTYPES[self.shape.dtype]
        calls = self._calls
        normed = self._norm("first", shape.epsilons[0])
        sums = self._products(("q", "k", "v"), normed)
        padded, dim = self._tiles * self._tile, shape.head_dim
        queries = self._space.get("queries", shape.kv_heads * padded * dim)
        attended = self._space.get("attended", shape.kv_heads * padded * dim)
        by_tile: dict[int, int] = {
            HeadArg.OUT_KV_STRIDE: padded * dim,
            HeadArg.OUT_HEAD_STRIDE: rows * dim,
            HeadArg.OUT_ROW_STRIDE: dim,
        }
        self._heads = {name: self._head(name, source) for name, source in sums.items()}
        for at, value in {**by_tile, HeadArg.OUT: calls.address(queries)}.items():
            self._table[self._heads["q"] + at] = value
        self._write_launch(queries, attended)
        joined = self._space.get("joined", rows * shape.heads * dim, shape.dtype)
        calls.serial(JoinSpec(dim, dtype, cpu_jit.lanes()), {
            HeadArg.ROWS: rows, HeadArg.KV_HEADS: shape.kv_heads, HeadArg.GROUP: shape.group,
            HeadArg.SOURCE: calls.address(joined), HeadArg.SOURCE_STRIDE: shape.heads * dim,
            HeadArg.OUT: calls.address(attended), **by_tile,
        }, HeadArg)  # fmt: skip
        output = self._products(("o",), joined)["o"]
        if shape.behind_epsilons is not None:
            output = self._norm("behind attention", shape.behind_epsilons[0], output)
        self._middle = self._last = self._add(output, "o")

    def _write_mlp(self) -> None:
        """Writes the calls from the second norm to the layer's end."""
        shape, rows, calls = self.shape, self.rows, self._calls
        middle = self._space.get("middle", rows * shape.hidden)
        self._table[self._middle + RowArg.OUT] = calls.address(middle)
        normed = self._norm("second", shape.epsilons[1], middle)
        sums = self._products(("gate", "up"), normed)
        gated = self._space.get("gated", rows * shape.intermediate, shape.dtype)
        assert shape.activation is not None, "an MLP has one"
        calls.serial(GateSpec(shape.activation, DTYPES[shape.dtype], cpu_jit.lanes()), {
            RowArg.ROWS: rows, RowArg.WIDTH: shape.intermediate,
            RowArg.LEFT: calls.address(sums["gate"]), RowArg.LEFT_STRIDE: shape.intermediate,
            RowArg.RIGHT: calls.address(sums["up"]), RowArg.RIGHT_STRIDE: shape.intermediate,
            RowArg.OUT: calls.address(gated),
        }, RowArg)  # fmt: skip
        output = self._products(("down",), gated)["down"]
        if shape.behind_epsilons is not None:
            output = self._norm("behind MLP", shape.behind_epsilons[1], output)
        self._last = self._add(output, "down")
        self._table[self._last + RowArg.LEFT] = calls.address(middle)

    def _norm(self, name: str, epsilon: float, x: Tensor | None = None) -> Tensor:
        """Writes the call of a norm over `x`, or over what `run` is given; its results' memory."""
        shape, address = self.shape, self._calls.address
        behind, dtype = name.startswith("behind"), DTYPES[shape.dtype]
        kind = torch.float32 if behind else shape.dtype
        out = self._space.get(f"{name} norm", self.rows * shape.hidden, kind)
        spec = NormSpec(shape.hidden, dtype, sum_lanes(shape.hidden), cpu_jit.lanes(), behind)
        self._norms[name] = self._calls.serial(spec, {
            NormArg.ROWS: self.rows, NormArg.OUT: address(out),
            NormArg.X: 0 if x is None else address(x), NormArg.EPSILON: bits(epsilon),
        }, NormArg)  # fmt: skip
        return out

    def _head(self, name: str, source: Tensor) -> int:
        """Writes the call that lays out the heads of q, k or v; returns its arguments' place."""
        shape, kind = self.shape, DTYPES[self.shape.dtype]
        epsilons = dict(zip(("q", "k"), shape.head_epsilons or (), strict=False))
        spec = HeadSpec(
            shape.head_dim, kind, "float32" if name == "q" else kind,
            0 if name == "v" else shape.rotary,
            name in shape.biased, shape.rounds_first, name in shape.pairs,
            sum_lanes(shape.head_dim) if name in epsilons else 0, shape.rounds_once,
            cpu_jit.lanes(),
        )  # fmt: skip
        return self._calls.serial(spec, {
            HeadArg.ROWS: self.rows, HeadArg.KV_HEADS: shape.kv_heads,
            HeadArg.GROUP: shape.group if name == "q" else 1,
            HeadArg.SOURCE: self._calls.address(source),
            HeadArg.SOURCE_STRIDE: shape.outputs(name),
            HeadArg.EPSILON: bits(epsilons.get(name, 0.0)),
        }, HeadArg)  # fmt: skip

    def _add(self, sums: Tensor, name: str) -> int:
        """Writes the addition of a linear's sums to the residual stream; LEFT and OUT are open."""
        width = self.shape.outputs(name)
        spec = AddSpec(
            DTYPES[self.shape.dtype], cpu_jit.lanes(), name in self.shape.biased,
            self.shape.rounds_first,
        )  # fmt: skip
        return self._calls.serial(spec, {
            RowArg.ROWS: self.rows, RowArg.WIDTH: width, RowArg.LEFT_STRIDE: width,
            RowArg.RIGHT: self._calls.address(sums), RowArg.RIGHT_STRIDE: width,
        }, RowArg)  # fmt: skip

    def _products(self, names: Sequence[str], x: Tensor) -> dict[str, Tensor]:
        """Writes the products of the same rows with several weights, in one launch.

        Returns:
            the sums of each, (rows of all chunks, outputs) float32.
        """
        calls, arranged = self._calls, dict[tuple[int, ...], tuple[int, int]]()
        found, launches, claims = {}, [], 0
        for name in names:
            plan = self._plans[name]
            chunks = -(-self.rows // plan.rows)
            n_items, n_totals = (each.numel() for each in plan.arranged(chunks))
            key = plan.arrange_kernel.address, n_items, n_totals
            if key not in arranged:
                items = self._space.get(f"{name} rows items", n_items, torch.int32)
                totals = self._space.get(f"{name} rows totals", max(n_totals, 1))
                calls.arranged(plan, x, self.rows, items, totals)
                arranged[key] = items.data_ptr(), totals.data_ptr()
            sums = self._space.get(f"{name} sums", chunks * plan.rows * plan.outputs)
            if plan.adds:
                calls.serial(ClearSpec(cpu_jit.lanes()), {
                    ClearArg.COUNT: sums.numel(), ClearArg.OUT: calls.address(sums),
                }, ClearArg)  # fmt: skip
            place = calls.product(plan, *arranged[key], calls.address(sums), chunks)
            self._product[name] = place
            launches.append((plan.kernel, place))
            claims += plan.claims
            found[name] = sums
        calls.parallel(launches, claims)
        return found

    def _write_launch(self, queries: Tensor, attended: Tensor) -> None:
        """Writes the attention's call."""
        shape, arg, calls = self.shape, cpu_attention_ir.Arg, self._calls
        capped = shape.softcap is not None
        attend = cpu_attention.kernel(
            shape.dtype, self._tile, shape.head_dim, capped=capped, sinks=shape.sinks
        )
        self._sinks = torch.zeros(shape.kv_heads, self._tiles * self._tile)  # of the placed layer
        scale = shape.scale if shape.softcap is None else shape.scale / shape.softcap
        self._attention = place = calls.block(len(arg))
        claims = shape.kv_heads * self._tiles
        self._threads = max(1, min(torch.get_num_threads(), claims))
        given = {
            arg.SINKS: calls.address(self._sinks),
            arg.QUERIES: calls.address(queries), arg.OUT: calls.address(attended),
            arg.KV_HEADS: shape.kv_heads, arg.TILES: self._tiles, arg.PASS_ROWS: self.rows,
            arg.SCALE: bits(scale), arg.SOFTCAP: bits(shape.softcap or 0.0),
        }  # fmt: skip
        for at, value in given.items():
            self._table[place + at] = value
        calls.zeroed(place + arg.COUNTER, place + arg.THREADS)
        calls.parallel([(attend, place)], claims)


def program(
    shape: LayerShape, rows: int, weights: Mapping[str, PackedWeight], space: Workspace
) -> Program | None:
    """The program of layers of these weights' formats; None where some kernel does not fit.

    Args:
        weights: of each of the shape's linears.
        space: of the model.
    """
    if not 1 <= rows <= MOST_ROWS or not has_threads() or not shape.fits:
        return None
    if not Group([weights[name] for name in shape.linears]).takes(shape.dtype):
        return None
    plans = {name: plan_for(shape.dtype, rows, weights[name]) for name in shape.linears}
    fitting = {
        name: plan for name, plan in plans.items()
        if plan is not None and plan.has_plain_sums
        and plan.dtype == shape.dtype and plan.outputs == shape.outputs(name)
    }  # fmt: skip
    return Program(shape, rows, fitting, space) if len(fitting) == len(plans) else None
