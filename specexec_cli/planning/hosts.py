"""Which layers of a target go to which of several machines, and in which waves a pass goes.

Reads the file that names the machines. Layers are given out one after another, each to the machine
with which the pass then takes least; then some are moved from one machine to another at a time, for
as long as that makes it shorter: the way to a machine pays with several layers where it would not
with one. Machines have their turns one after another, so that their times add up, and so do the
ways of the rows there and back.

While a machine computes one wave, the next machine computes the wave before (models/waves.py). So a
machine's turn with a wave begins when the machine before it is done with that wave, and itself with
the wave before. Where all waves have as many rows,

    seconds = every machine's turn with the rows of one wave + (waves - 1) * the longest turn

Every machine reads all its weights for each wave. So few rows are fastest in one: a machine that
waits for memory takes as long for a part of them as for all, and the machines would be busy for
longer, not done sooner. Where arithmetic decides, or a prompt has hundreds of rows, all machines
computing at once pays. A tree is in one wave whatever its size, so only waves that can be made are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from specexec_cli.core import Piece
from specexec_cli.errors import ConfigError
from specexec_cli.guarded import read_toml
from specexec_cli.planning.machine import ASSUMED, PROGRAM_BYTES, Host, Machine
from specexec_cli.planning.machine_rates import card_of_memory, steady_flops
from specexec_cli.planning.memory import DoesNotFitError, Work
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan, SpanPlan, make_plan

LOOPBACK = "127.0.0.1"
PORT = 7420  # where workers join unless told
_WAIT_S = 300.0
# of a cable of 1 Gb/s, where nothing is told or measured
_LINK_BYTES_PER_S, _DELAY_S = 117e6, 0.3e-3
# Rows of the passes by which placements are weighed: those of a tree that a CPU multiplies in
# little more time than it reads the weights. A budget is room for more nodes, where they pay.
_WEIGHED_ROWS = 32
_NUMBERS = (
    "ram_gb", "vram_gb", "ssd_gb_s", "memory_gb_s", "tflops", "link_gbit_s", "delay_ms", "layers",
)  # fmt: skip

Place = Callable[[ModelBytes, Work, Machine], Plan]

# More waves than this for each machine shorten a pass little: with four, a machine computes in 4 of
# at most 5 turns.
FOR_EACH_MACHINE = 4

# A text's rows of a pass, and how many of them are pending: the rest are nodes of its tree.
TextRows = tuple[int, int]
# The waves of a pass, with the rows of each text in them.
InWaves = list[list[Piece]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEntry:
    """A machine as the file describes it; None is not told."""

    name: str
    ram_gb: float | None = None
    vram_gb: float | None = None
    ssd_gb_s: float | None = None
    memory_gb_s: float | None = None
    tflops: float | None = None  # of its CPU's products, in passes of many rows
    link_gbit_s: float | None = None
    delay_ms: float | None = None  # of a row's way there or back, besides its bytes
    layers: int | None = None  # that it is to have, whatever is fastest

    def host(self, found: Machine, link_bytes_per_s: float, delay_s: float) -> Host:
        """The machine to plan for.

        Args:
            found: what is known of it otherwise, as are the link's figures.
        """
        told: dict[str, Any] = {}
        if self.ram_gb is not None:
            told["ram_bytes"] = int(self.ram_gb * 1e9)
        if self.vram_gb is not None:
            told["vram_bytes"] = int(self.vram_gb * 1e9)
        if self.vram_gb:
            card = card_of_memory(self.vram_gb * 1e9)
            told["gpu"], told["memory_bytes_per_s"] = card.rates, card.rates.memory_bytes_per_s
        if self.ssd_gb_s is not None:
            told["ssd_bytes_per_s"] = self.ssd_gb_s * 1e9
        if self.memory_gb_s is not None:
            told["memory_bytes_per_s"] = self.memory_gb_s * 1e9
        if self.tflops is not None:
            told["flops"] = steady_flops(self.tflops * 1e12)
        link = self.link_gbit_s
        return Host(
            name=self.name,
            machine=replace(found, **told),
            link_bytes_per_s=link_bytes_per_s if link is None else link * 1e9 / 8,
            delay_s=delay_s if self.delay_ms is None else self.delay_ms / 1e3,
            layers=self.layers,
        )

    def described(self) -> Host:
        """The machine by the file alone.

        Raises:
            ConfigError: its memory is not told.
        """
        if self.ram_gb is None:
            raise ConfigError(
                f"the memory of '{self.name}' is not told: give it 'ram_gb' in the file of hosts"
            )
        found = Machine(
            ram_bytes=0,
            ssd_bytes_per_s=ASSUMED["ssd"],
            link_bytes_per_s=ASSUMED["link"],
            memory_bytes_per_s=ASSUMED["CPU memory"],
            base_bytes=PROGRAM_BYTES,
        )
        return self.host(found, _LINK_BYTES_PER_S, _DELAY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsFile:
    """The machines that take part, and where they join."""

    listen: str  # address of this machine
    wait_s: float  # for machines to join, and to join again
    hosts: tuple[HostEntry, ...]


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST`, `HOST:PORT`, or `[IPv6]:PORT`.

    Raises:
        ConfigError: it is no address.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    try:
        host.encode("idna")  # the resolver does so, and raises no OSError where it cannot
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
    except UnicodeError:
        number = -1
    if not host or not 0 <= number <= 65535:
        raise ConfigError(f"'{text}' is no address: write it as 10.0.0.2 or 10.0.0.2:{PORT}")
    return host, number


def read_hosts(path: Path) -> HostsFile:
    """The machines of a file:

        listen = "192.168.1.10"

        [[host]]
        name = "attic"
        ram_gb = 32

    Raises:
        ConfigError: the file cannot be read, or says what no machine can be.
    """
    try:
        table = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a file of hosts: {error}") from error
    if unknown := sorted(table.keys() - {"listen", "wait_s", "host"}):
        raise ConfigError(
            f"{path}: unknown key '{unknown[0]}'; known are listen, wait_s and [[host]]"
        )
    listen, entries = table.get("listen", LOOPBACK), table.get("host")
    if not isinstance(listen, str) or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: 'listen' must be an address, and at least one [[host]] follow")
    try:
        address_of(listen)
    except ConfigError as error:
        raise ConfigError(f"{path}: 'listen': {error}") from error
    wait_s = table.get("wait_s", _WAIT_S)
    if type(wait_s) not in (int, float) or not 0 < wait_s < 1e6:
        raise ConfigError(f"{path}: 'wait_s' must be seconds above 0, not {wait_s!r}")
    hosts = tuple(_entry(path, each) for each in entries)
    names = [host.name for host in hosts]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: two hosts are called '{doubled}'")
    return HostsFile(listen=listen, wait_s=wait_s, hosts=hosts)


def _entry(path: Path, table: Any) -> HostEntry:
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(f"{path}: every [[host]] needs a 'name'")
    name = table["name"]
    if unknown := sorted(table.keys() - {"name", *_NUMBERS}):
        raise ConfigError(
            f"{path}: '{name}' has an unknown key '{unknown[0]}'; known are {', '.join(_NUMBERS)}"
        )
    for key in table.keys() - {"name"}:
        value, whole = table[key], key == "layers"
        least = 0.0 if key in ("vram_gb", "delay_ms", "layers") else 1e-6
        if type(value) not in ((int,) if whole else (int, float)) or not least <= value < 1e9:
            raise ConfigError(f"{path}: '{key}' of '{name}' cannot be {value!r}")
    return HostEntry(**table)


def told_of_idle(hosts: Sequence[str], spans: Sequence[SpanPlan]) -> list[str]:
    """A sentence for each of these hosts that has no span."""
    busy = {each.host.name for each in spans}
    return [
        f"{name} has no layers: a pass takes least without it" for name in hosts if name not in busy
    ]


def spread(
    target: ModelBytes, work: Work, machine: Machine, hosts: Sequence[Host], place: Place
) -> Plan:
    """The fastest placement over this machine and others that was found, layer by layer.

    Args:
        machine: this one, which has the first layers, embeddings, head and the draft model.
        hosts: in the order in which a pass goes through them.
        place: how the part of this machine is placed in it.
    Raises:
        ConfigError: more layers were asked for than the model has.
        DoesNotFitError: a machine has no memory for what it would have to take.
    """
    counts, here = [host.layers or 0 for host in hosts], _fewest_here(target)
    if sum(counts) + here > len(target.layers):
        raise ConfigError(
            f"`hosts`: {sum(counts)} layers are asked for and this machine takes {here} at least, "
            f"but the model has {len(target.layers)}"
        )
    free = [0, *(at for at, host in enumerate(hosts, 1) if host.layers is None)]

    def seconds(shares: Sequence[int]) -> float | None:
        try:
            found = _of_counts(target, work, machine, hosts, place, shares)
        except DoesNotFitError:
            return None
        return pass_time(found, min(work.verify_rows, _WEIGHED_ROWS)).seconds

    shares = (here, *counts)  # layers of each machine, this one first
    while sum(shares) < len(target.layers):
        tried = [_with_more(shares, at, 1) for at in free]
        fitting = [(taken, each) for each in tried if (taken := seconds(each)) is not None]
        if not fitting:
            return _of_counts(target, work, machine, hosts, place, tried[0])  # says why
        shares = min(fitting, key=lambda each: each[0])[1]
    shares = _moved(shares, free, here, seconds)
    return _of_counts(target, work, machine, hosts, place, shares)


def _with_more(shares: Sequence[int], at: int, layers: int) -> tuple[int, ...]:
    return tuple(share + (layers if each == at else 0) for each, share in enumerate(shares))


def _fewest_here(target: ModelBytes) -> int:
    """Layers that this machine has at least: with recurrent ones, the first of them (spans.py)."""
    return next((at for at, state in enumerate(target.layer_states) if state), 0) + 1


def _moved(
    shares: tuple[int, ...],
    free: Sequence[int],
    here: int,
    seconds: Callable[[Sequence[int]], float | None],
) -> tuple[int, ...]:
    """The layers of each machine once no move of some from one to another shortens the pass.

    Args:
        free: machines whose layers may be moved.
        here: layers of this machine at least.
        seconds: of a pass, by the layers of each; None where they do not fit.
    """
    least, step = seconds(shares), max(shares)
    while least is not None and step:
        moves = [
            (a, b) for a in free for b in free if a != b and shares[a] - step >= (0 if a else here)
        ]
        tried = [_with_more(_with_more(shares, a, -step), b, step) for a, b in moves]
        fitting = [(taken, each) for each in tried if (taken := seconds(each)) is not None]
        best = min(fitting, key=lambda each: each[0], default=None)
        if best is None or best[0] >= least:
            step //= 2
        else:
            least, shares = best
    return shares


def _of_counts(
    target: ModelBytes, work: Work, machine: Machine, hosts: Sequence[Host], place: Place,
    shares: Sequence[int],
) -> Plan:  # fmt: skip
    """The plan in which each machine has its share of the layers, this machine first.

    Raises:
        DoesNotFitError: they do not fit.
    """
    others, first = [], shares[0]
    for host, count in zip(hosts, shares[1:], strict=True):
        if not count:
            continue
        layers = range(first, first + count)
        try:
            plan = plan_of_span(target, layers, work, host.machine)
        except DoesNotFitError as error:
            raise DoesNotFitError(
                f"{host.name}: {error.what}", error.needed_bytes, error.usable_bytes, error.parts
            ) from None
        others.append(SpanPlan(host=host, layers=layers, plan=plan))
        first += count
    mine = place(part_of(target, range(shares[0]), ends=True), work, machine)
    return replace(mine, others=tuple(others), replays=False)


def plan_of_span(target: ModelBytes, layers: range, work: Work, machine: Machine) -> Plan:
    """Where a machine that has these layers alone keeps them.

    Raises:
        DoesNotFitError: it has no memory for them.
    """
    # the rows behind its last layer come back in any case
    features = tuple(
        sorted({each for each in work.features or () if layers.start < each < layers.stop})
    )
    plain = replace(work, shares_cache=False, shares_tables=False, features=features or None)
    return make_plan(part_of(target, layers, ends=False), None, plain, machine)


def part_of(target: ModelBytes, layers: range, *, ends: bool) -> ModelBytes:
    """The sizes of some of a target's layers, which move whole, a mixture's with their experts.

    Args:
        ends: whether embeddings and head are with them.
    """
    own = slice(layers.start, layers.stop)
    of_all = sum(target.layers) or 1
    share = sum(target.layers[own]) / of_all
    kv, experts = target.layer_kv[own], target.experts
    if experts is not None:  # of which the first layers of a mixture may have none
        of_layers = experts.layers[own]
        experts = replace(experts, layers=of_layers) if any(of_layers) else None
    states = share
    if any(target.layer_states):
        states = sum(target.layer_states[own]) / sum(target.layer_states)
    sizes = replace(
        target,
        layers=target.layers[own],
        layer_params=round(target.layer_params * share),
        active_params=round(target.active_params * share),
        kv_elements=sum(kv) if target.layer_kv else round(target.kv_elements * share),
        layer_kv=kv,
        state_elements=round(target.state_elements * states),
        node_elements=round(target.node_elements * states),
        layer_states=target.layer_states[own],
        experts=experts,
    )
    if ends:
        return sizes
    return replace(sizes, resident=0, head=0, table=0, vocab=0)


def in_waves(texts: Sequence[TextRows], size: int) -> InWaves:
    """Divides the rows of a pass into waves of about `size` rows, in order.

    A text is divided between its pending rows alone: a tree goes with the last of them.
    """
    waves, wave, room = InWaves(), list[Piece](), size
    for text, (total, pending) in enumerate(texts):
        start = 0
        while start < total:
            left = total - start
            stop = total if left <= room else min(start + room, pending - 1)
            if 2 * (stop - start) < min(left, room):  # that little is not worth a wave
                stop = total
                if wave and 2 * room < left:
                    waves.append(wave)
                    wave, room = [], size
            wave.append(Piece(text, start, stop))
            room -= stop - start
            start = stop
            if room <= 0 or start < total:
                waves.append(wave)
                wave, room = [], size
    return [*waves, wave] if wave else waves


class WaveTimes:
    """What passes in waves take by a plan.

    Args:
        plan: of the first machine, with the others'.
    """

    def __init__(self, plan: Plan) -> None:
        self._turns = cache(lambda rows: pass_time(plan, rows).turns_s)
        machines = (plan, *(each.plan for each in plan.others))
        # the weights that a machine streams would come again for each wave
        alone = len(machines) == 1 or any(each.streams for each in machines)
        self._most = 1 if alone else FOR_EACH_MACHINE * len(machines)

    def seconds(self, waves: InWaves) -> float:
        """A pass in these waves."""
        ends: Sequence[float] = ()  # of each machine's turn with the wave before
        for wave in waves:
            turns, end = self._turns(sum(piece.count for piece in wave)), 0.0
            before, ends = ends or (0.0,) * len(turns), list[float]()
            for turn_s, free in zip(turns, before, strict=True):
                end = max(end, free) + turn_s
                ends.append(end)
        return ends[-1]

    def fastest(self, texts: Sequence[TextRows]) -> InWaves:
        """The waves in which a pass of these rows takes least; of equal ones the fewest."""
        total = sum(rows for rows, _ in texts)
        ways = {
            tuple(map(tuple, waves)): waves
            for waves in (
                in_waves(texts, -(-total // count))
                for count in range(1, min(total, self._most) + 1)
            )
        }
        return min(ways.values(), key=self.seconds)
