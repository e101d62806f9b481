"""What a checkpoint is: tensor name -> file, offsets, dtype, shape; and its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from specexec_cli.errors import CheckpointError
from specexec_cli.guarded import read_json

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

# The module, inside the decoder, with what a trained head has before and beside its decoder layer.
INPUT = "head_input"


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor's place on disk."""

    name: str
    path: Path
    dtype: str  # safetensors' name, a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int  # absolute file offset of the first byte
    stop: int  # absolute file offset behind the last byte

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start

    def rows(self, first: int, count: int) -> TensorRange:
        """Some rows of the tensor as a tensor of their own, (count, last dimension).

        Args:
            first: the first row, counted over all leading dimensions together.
        """
        row_bytes = self.shape[-1] * ITEM_BYTES[self.dtype]
        start = self.start + first * row_bytes
        name = f"{self.name}[{first}:{first + count}]"
        shape = (count, self.shape[-1])
        return TensorRange(name, self.path, self.dtype, shape, start, start + count * row_bytes)


@dataclass(frozen=True, slots=True)
class Block:
    """The rows that a head drafts from in one pass: the last committed token, and masks behind it.

    The token at a mask's place is predicted from that mask's row.
    """

    rows: int
    mask_token: int
    causal: bool  # whether a row sees the block's rows before it alone, or all of them


@dataclass(frozen=True)
class TrainedHead:
    """What makes a checkpoint that of a trained head, which drafts from its target's hidden rows.

    It is a model of few layers; mtp.py, eagle.py, assistant.py and block_heads.py say which layouts
    are read.
    """

    config: Mapping[str, Any]  # that model's
    # Where the target's rows are taken: a number n stands for those that its layer n reads, counted
    # from 0, side by side in this order. Without numbers it is the rows that its output head reads.
    features: tuple[int, ...] = ()
    # (draft vocabulary,) what is to be added to each token of the head's own vocabulary to make it
    # the target's token; None where both have the same tokens
    offsets: TensorRange | None = None
    # Where it has no keys and values of its own: by the kind of its layers, as in `layer_types`,
    # the target's layer whose keys and values they attend to.
    keys: Mapping[str, int] = field(default_factory=dict)
    block: Block | None = None  # of a head that drafts one in a pass
    own_head: bool = False  # of an MTP layer: whether it does without the target's output head
    # Of the first of several MTP layers: those behind it, and whether each reads the rows that the
    # one before it made of the token before, or like the first those of the target.
    later: tuple[Checkpoint, ...] = ()
    chained: bool = True


@dataclass(frozen=True)
class Checkpoint(Mapping[str, TensorRange]):
    """All tensors of a checkpoint folder by name, and its config.json."""

    folder: Path
    tensors: dict[str, TensorRange]
    head: TrainedHead | None = field(default=None, kw_only=True)  # of a trained head alone

    def __getitem__(self, name: str) -> TensorRange:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def as_head(self, head: TrainedHead, names: Mapping[str, str]) -> Self:
        """The checkpoint as that of a trained head.

        Args:
            names: of those tensors that it has: in this checkpoint, and as a head's.
        """
        tensors = {new: replace(self[old], name=new) for old, new in names.items()}
        return replace(self, tensors=tensors, head=head)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, in the order of their names."""
        return sorted({tensor.path for tensor in self.tensors.values()})

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json as it is on disk, read at the first use.

        Raises:
            CheckpointError: it is missing or not a JSON object.
        """
        return read_config(self.folder) if self.head is None else self.head.config

    @property
    def config_path(self) -> Path:
        """The file that `config` comes from, for messages."""
        return self.folder / "config.json"


def read_config(folder: Path) -> Mapping[str, Any]:
    """The object in a checkpoint folder's config.json.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: give the folder of a checkpoint")
    try:
        value = read_json(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a JSON object ({error}): download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} is not a JSON object (it is a {type(value).__name__}): download it again"
        )
    return value
