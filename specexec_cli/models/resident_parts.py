"""Loads resident weights: embeddings, norms and head, and all layers of a fully resident model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from specexec_kernels.dispatch import uses_triton
from torch import Tensor, nn

from specexec_cli.errors import CheckpointError
from specexec_cli.models.decoder_layer import DecoderLayer
from specexec_cli.models.embedding import MixedEmbedding, resident_linear
from specexec_cli.models.head import Head
from specexec_cli.models.head_input import HeadEmbedding, HeadInput, Joint
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.skeleton import Skeleton
from specexec_cli.offload.checkpoint import INPUT, ITEM_BYTES, TensorRange
from specexec_cli.offload.link import CudaLink
from specexec_cli.offload.reader import lay_out
from specexec_cli.offload.slabs import COPY_BYTES
from specexec_cli.offload.stream import read_tensors
from specexec_cli.offload.upload import upload
from specexec_cli.planning.built_sizes import output_head, path_of, text_decoder

# most of a buffer that may be of tensors nobody reads again, such as norms that become float32
_MOST_COPIED = 0.01


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Weights that a target has loaded and that its own low-bit copy uses too."""

    # weights of embeddings and head, by their names in the model
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    # stored tensors of the layers that are resident on the device, by layer index
    layers: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    skeleton: Skeleton | None = None  # a second skeleton of the target, in which those layers run
    # the embeddings and the head's linear: for a trained head that has none of its own, and what
    # stands in for both where a span of layers is opened alone
    ends: tuple[nn.Module, nn.Module] | None = None


def load_resident(
    skeleton: Skeleton,
    device: torch.device,
    compute_dtype: torch.dtype,
    dtype: torch.dtype | None,
    table_in_ram: bool,
    shared: SharedParts,
) -> tuple[Head, dict[str, Tensor]]:
    """Loads embeddings, norms and head into the model, and moves its buffers to the device.

    Buffers, such as rotary frequencies, are in no checkpoint.

    Args:
        dtype: dtype of embeddings and head; None keeps the file's.
        table_in_ram: whether embeddings are looked up in RAM; ignored if the head uses their table.
        shared: weights of another model. A table is used instead of being loaded if it is on the
            right device and has the right dtype.
    Returns:
        the model's output head, and the tables of embeddings and head by their names.
    """
    model, tensors = skeleton.model, skeleton.resident_tensors
    _move_buffers(text_decoder(model), device)
    head_path = path_of(model, output_head(model))
    table_path = path_of(model, model.get_input_embeddings())
    lent = _lent(skeleton, shared, head_path, table_path)
    for path in lent:
        tensors = {name: tensors[name] for name in tensors if not name.startswith(f"{path}.")}
    in_ram = {f"{table_path}.weight"} & tensors.keys()
    of_head = tensors.keys() - {f"{head_path}.bias"}
    if not (table_in_ram and any(name.startswith(f"{head_path}.") for name in of_head)):
        in_ram.clear()
    places = {name: torch.device("cpu") if name in in_ram else device for name in tensors}
    known = {
        name: table
        for name, table in shared.tables.items()
        if table.device == places[name] and dtype in (None, table.dtype)
    }
    tables: dict[str, Tensor] = {}
    for name, stored in _stored(tensors, places, known, in_ram):
        table = _put(skeleton, name, stored, dtype, device)
        if table is not None:
            tables[name] = table
    head = model.get_submodule(head_path)
    if shared.ends is not None:
        embeddings = model.get_input_embeddings()
        embeddings = shared.ends[0] if table_path in lent else embeddings
        head = shared.ends[1] if head_path in lent else head
        joint = dict(text_decoder(model).named_children()).get(INPUT)
        if isinstance(joint, HeadInput):
            embeddings = HeadEmbedding(embeddings, joint, compute_dtype)
        _set_module(model, table_path, embeddings)
    elif type(head) is nn.Linear:  # tied
        tied = model.get_input_embeddings().as_linear()
        tied.bias = head.bias
        head = tied
    vocab = int(skeleton.config.vocab_size)
    whole = Head(head, compute_dtype, _targets_tokens(skeleton, device), vocab)
    _set_module(model, head_path, whole)
    return whole, tables


def _lent(skeleton: Skeleton, shared: SharedParts, head_path: str, table_path: str) -> list[str]:
    """Those of the modules of embeddings and head that are another model's: an MTP layer takes
    both, but for a head of its own, and other heads what they have not."""
    if shared.ends is None:
        return []
    model = skeleton.model
    joints = [part for part in model.modules() if isinstance(part, HeadInput)]
    if skeleton.head is not None and skeleton.head.own_head:
        return [table_path]
    if not joints or isinstance(joints[0], Joint):
        return [head_path, table_path]
    paths = (head_path, table_path)
    return [path for path in paths if type(model.get_submodule(path)) is nn.Identity]


def _targets_tokens(skeleton: Skeleton, device: torch.device) -> Tensor | None:
    """The target's token of each token of a trained head, (draft vocabulary,) int64; None where
    they are the same.

    Raises:
        CheckpointError: the map names tokens that there are not, or one of them twice.
    """
    if skeleton.head is None or skeleton.head.offsets is None:
        return None
    stored, vocab = skeleton.head.offsets, int(skeleton.config.vocab_size)
    tokens = read_tensors([stored])[stored.name].to(torch.int64)
    tokens = tokens + torch.arange(len(tokens))
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
        what = f"names tokens outside the target's {vocab}"
    elif len(set(tokens.tolist())) < len(tokens):
        what = "names a token twice"
    else:
        return tokens.to(device)
    raise CheckpointError(f"{stored.path}: tensor '{stored.name}' {what}: download it again")


def _stored(
    tensors: Mapping[str, TensorRange],
    places: Mapping[str, torch.device],
    known: Mapping[str, Tensor],
    in_ram: Set[str],
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in its place, as the file has it, or as another model has loaded it.

    Args:
        tensors, places: by the tensor's name in the model.
        known: those that another model has loaded.
        in_ram: names of tables that stay in RAM beside a GPU.
    """
    # Tensors that are read together share one buffer, so a table that stays in RAM is read alone.
    in_pieces = {
        name
        for name in tensors.keys() - known.keys()
        if places[name].type == "cuda" and tensors[name].n_bytes > COPY_BYTES
    }
    alone = in_ram | known.keys() | in_pieces
    loaded = read_tensors([tensors[name] for name in tensors if name not in alone])
    loaded |= read_tensors([tensors[name] for name in in_ram - known.keys()])
    for name, tensor in tensors.items():
        if name in known:
            yield name, known[name]
        elif name in in_pieces:
            yield name, _uploaded(tensor, places[name])
        else:
            yield name, loaded[tensor.name].to(places[name])


def _move_buffers(text: nn.Module, device: torch.device) -> None:
    """Moves what no checkpoint stores, as rotary frequencies, to a device."""
    for name, buffer in list(text.named_buffers(remove_duplicate=False)):
        if not buffer.is_meta:
            path, _, leaf = name.rpartition(".")
            setattr(text.get_submodule(path), leaf, buffer.to(device))


def _put(
    skeleton: Skeleton, name: str, stored: Tensor, dtype: torch.dtype | None, device: torch.device
) -> Tensor | None:
    """Gives a weight to its module, which is replaced where ours computes otherwise.

    Args:
        name: of the parameter in the model.
        stored: the weight, at its place and in the file's dtype.
        dtype: of embeddings and head; the file's unless told.
        device: where norms go, in float32.
    Returns:
        the weight as it stays where it is a table of embeddings or of the head, else None.
    """
    model = skeleton.model
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    packed = skeleton.restored.tables.get(name)
    keeps = dtype is None or packed is not None or isinstance(module, QuantizedLinear)
    weight = stored if keeps else stored.to(dtype)
    if isinstance(module, nn.Embedding) and _looks_up(module):
        _set_module(model, path, MixedEmbedding(module, weight, torch.float32, device, packed))
        return weight
    if type(module).forward is nn.Linear.forward and leaf == "weight":
        linear = resident_linear(weight)
        linear.bias = module.bias
        _set_module(model, path, linear)
        return weight
    if isinstance(module, MixedLinear | QuantizedLinear):
        setattr(module, leaf, frozen(weight))
        if isinstance(module, QuantizedLinear) and uses_triton(device):
            _rearrange(module)
        return None
    plain = stored.to(device, torch.float32)
    change = skeleton.restored.changes.get(name)
    _set_tensor(module, leaf, plain if change is None else change(plain))
    return None


def _rearrange(linear: QuantizedLinear) -> None:
    """Has a weight that stays on a GPU lie as it is read fastest, once it is there as a whole."""
    tensors = linear.packed_weight().tensors
    if not any(tensor.is_meta for tensor in tensors.values()):
        for leaf, tensor in linear.rearrange(tensors).items():
            setattr(linear, linear.leaves[leaf], frozen(tensor))


def _uploaded(tensor: TensorRange, device: torch.device) -> Tensor:
    """A tensor of a file, copied to a GPU in pieces, so that RAM never holds all of it."""
    [found] = upload(
        [lay_out([tensor])], CudaLink(device), piece_bytes=COPY_BYTES, notice=lambda text: None,
        progress=lambda done, total: None,
    )  # fmt: skip
    return found[tensor.name]


def load_layers(
    layers: Sequence[DecoderLayer],
    skeleton: Skeleton,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
    shared: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Loads the weights of all layers to stay; those of linears get the compute dtype.

    Args:
        dtype: compute dtype.
        progress: called with the bytes loaded so far and the total bytes.
        shared: stored tensors of layers that another model has on the device, by layer index; they
            are used in place.
    """
    total = sum(t.n_bytes for layer in skeleton.layer_tensors for t in layer.values())
    whole = {} if shared else _read_whole(layers, skeleton, device, dtype, progress)
    done = 0
    for index, (layer, tensors) in enumerate(zip(layers, skeleton.layer_tensors, strict=True)):
        stored = shared.get(index)
        if stored is None:
            read = whole or read_tensors(list(tensors.values()))
            stored = {tensor.name: read[tensor.name].to(device) for tensor in tensors.values()}
            layer.rearrange(stored)
        for name, weight in layer.stage(stored, device, dtype).items():
            path, _, leaf = name.rpartition(".")
            module = layer.layer.get_submodule(path)
            if index not in shared:
                stays_as = dtype if isinstance(module, MixedLinear) else weight.dtype
                # a copy of what is not whole, so that the buffer that it was read into is freed
                weight = weight.to(stays_as, copy=not whole)
            _set_tensor(module, leaf, weight)
        layer.stay_bound(True)
        done += sum(tensor.n_bytes for tensor in tensors.values())
        if not whole:
            progress(done, total)


def _read_whole(
    layers: Sequence[DecoderLayer],
    skeleton: Skeleton,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> dict[str, Tensor]:
    """The tensors of all layers in one buffer, by their names; none where more than few are copied.

    Weights that stay as they were read need no copy, which would take as long as reading them.
    """
    if device.type != "cpu":
        return {}
    tensors: dict[str, TensorRange] = {}
    copied_bytes = 0
    for layer, own in zip(layers, skeleton.layer_tensors, strict=True):
        stays = layer.used_as_stored(own, dtype)
        copied_bytes += sum(
            each.n_bytes
            for name, each in own.items()
            if name not in stays or each.start % ITEM_BYTES[each.dtype]  # torch views no such items
        )
        tensors |= {tensor.name: tensor for tensor in own.values()}
    total = sum(tensor.n_bytes for tensor in tensors.values())
    if copied_bytes > _MOST_COPIED * total:
        return {}
    return read_tensors(list(tensors.values()), progress=progress)


def _looks_up(embedding: nn.Embedding) -> bool:
    """Whether the embedding takes only ids, as tables of words and of positions do."""
    return len(inspect.signature(embedding.forward).parameters) == 1


def _set_tensor(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    setattr(module, leaf, tensor if leaf in module._buffers else frozen(tensor))


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradients."""
    return nn.Parameter(tensor, requires_grad=False)


def _set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
