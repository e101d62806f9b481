"""A model's weights in numbers, matrix by matrix, and the bytes that its files have of them.

models.toml has these counts of every model that it names, as scripts/count_sizes.py writes them;
those of other models are counted by planning/built_sizes.py. Knows no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specexec_cli.catalog.row_bits import packed_bytes, packs_experts_alone

Matrices = tuple[int, int, int]  # how many matrices of one shape, their inputs, their outputs

ROLES = ("dense", "plain", "routed", "experts")
_MOST, _MOST_LAYERS = 1 << 48, 2_000  # no model has more
NUMBERS = ("others", "expert_others", "shared", "kv", "expanded", "state", "node")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """One decoder layer's weights. The names are those of the keys in models.toml."""

    dense: tuple[Matrices, ...] = ()  # every row is multiplied by them
    plain: tuple[Matrices, ...] = ()  # as dense, but never quantized
    routed: tuple[Matrices, ...] = ()  # of all experts, where experts move with their layer
    experts: tuple[Matrices, ...] = ()  # of all experts, where experts move one by one
    others: int = 0  # weights of norms and biases
    expert_others: int = 0  # of these the weights of experts that move one by one
    shared: int = 0  # of all weights, those that an earlier layer has too, stored once (Zamba)
    kv: int = 0  # elements that one token adds to the layer's cache
    # elements that attention makes of one token's latent (MLA); 0 where keys and values are cached
    expanded: int = 0
    # float32 elements that a recurrent layer keeps of one text, and of each draft node
    state: int = 0
    node: int = 0

    def matrices(self) -> Iterator[Matrices]:
        """All matrices, whatever their role."""
        for role in ROLES:
            yield from getattr(self, role)

    @property
    def params(self) -> int:
        """Weights of the layer."""
        return self.others + _weights(self.matrices())

    def active_params(self, experts: int, chosen: int) -> int:
        """Weights of the matrices that one row is multiplied by.

        Args:
            experts: experts of the layer.
            chosen: experts that a row is routed to.
        """
        routed = sum(min(chosen, count) * size * to for count, size, to in self.routed)
        of_experts = _weights(self.experts) * chosen // experts if experts else 0
        return _weights((*self.dense, *self.plain)) + routed + of_experts

    def stored_bytes(self, item: int, quantization: Any) -> tuple[int, int]:
        """Bytes of the layer in a checkpoint.

        Args:
            item: bytes of a weight that is not quantized.
            quantization: config.json's quantization_config; None where nothing is quantized.
        Returns:
            bytes of the layer, and the part of them that belongs to its experts.
        Raises:
            ConfigError: the quantization_config makes no sense.
        """
        plain, packed = [*self.plain], [*self.dense, *self.routed]
        if packs_experts_alone(quantization):
            plain, packed = plain + packed, []
        of_experts = self.expert_others * item + _packed(self.experts, item, quantization)
        rest = (self.others - self.expert_others + _weights(plain)) * item
        return rest + _packed(packed, item, quantization) + of_experts, of_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """A model's weights; parts that read pictures or sound are not counted."""

    layers: tuple[LayerCounts, ...]
    outside: int  # weights outside the layers
    head: int  # of these the output head's own; 0 where the embedding table is the head
    table: int  # of these the embedding table; 0 where it is the head too
    hidden: int
    vocab: int
    experts: int = 0  # of a mixture's layer, where experts move one by one
    chosen: int = 1  # experts that a row is routed to

    def kinds(self) -> list[tuple[LayerCounts, int]]:
        """Layers that are one object, and how often it is there; equal ones may be several."""
        times = Counter(map(id, self.layers))
        return [
            (kind, times[key]) for key, kind in {id(each): each for each in self.layers}.items()
        ]

    def total_bytes(self, item: int, quantization: Any) -> int:
        """Bytes of the whole checkpoint; the arguments are those of LayerCounts.stored_bytes."""
        kinds = self.kinds()
        layers = sum(times * kind.stored_bytes(item, quantization)[0] for kind, times in kinds)
        once = sum(times * kind.shared for kind, times in kinds)
        return layers + (self.outside - once) * item


def counts_of(table: Mapping[str, Any]) -> WeightCounts:
    """The counts that models.toml has as a table: equal layers once, with their numbers as text.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is no such table.
    """
    found: dict[int, LayerCounts] = {}
    for kind in table["layers"]:
        parts: dict[str, Any] = {name: _whole(kind[name]) for name in NUMBERS if name in kind}
        for role in ROLES:
            parts[role] = tuple(
                (_whole(count), _whole(inputs), _whole(outputs))
                for count, inputs, outputs in kind.get(role, ())
            )
        layer = LayerCounts(**parts)
        for run in kind["at"].split():
            first, _, last = run.partition("-")
            indices = range(int(first), int(last or first) + 1)
            if indices.stop > _MOST_LAYERS:
                raise ValueError(f"{run} are more layers than any model has")
            found |= dict.fromkeys(indices, layer)
    layers = tuple(found[index] for index in range(len(found)))
    rest = {name: _whole(value) for name, value in table.items() if name != "layers"}
    counts = WeightCounts(layers=layers, **rest)
    if not layers or any(layer.experts and not counts.experts for layer in layers):
        raise ValueError("there are no layers, or experts of which no layer has one")
    return counts


def table_of(counts: WeightCounts) -> dict[str, Any]:
    """The counts as a table that counts_of reads: equal layers once, with their numbers as text."""
    places: dict[LayerCounts, list[int]] = {}
    for index, layer in enumerate(counts.layers):
        places.setdefault(layer, []).append(index)
    names = ("hidden", "vocab", "outside", "head", "table", "experts", "chosen")
    kinds = [
        {"at": _ranges(indices)}
        | {role: [list(each) for each in getattr(layer, role)] for role in ROLES}
        | {name: getattr(layer, name) for name in NUMBERS}
        for layer, indices in places.items()
    ]
    kinds = [{key: value for key, value in kind.items() if value} for kind in kinds]
    return {name: getattr(counts, name) for name in names} | {"layers": kinds}


def _ranges(indices: list[int]) -> str:
    """Ascending numbers as text, neighbours joined: `0-4 6 8-9`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} counts nothing")
    return value


def _weights(matrices: Iterator[Matrices] | tuple[Matrices, ...] | list[Matrices]) -> int:
    return sum(count * inputs * outputs for count, inputs, outputs in matrices)


def _packed(matrices: tuple[Matrices, ...] | list[Matrices], item: int, quantization: Any) -> int:
    """Bytes of matrices that a quantized checkpoint has quantized."""
    sizes = ((count, packed_bytes(quantization, inputs, to)) for count, inputs, to in matrices)
    packed = [count * size for count, size in sizes if size is not None]
    return sum(packed) if len(packed) == len(matrices) else _weights(matrices) * item
