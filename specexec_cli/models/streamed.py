"""A causal language model whose decoder layers arrive one after another, pass after pass.

transformers' own forward runs the pass. Each decoder layer is a thin wrapper that asks the layer
source for its weights, runs, and releases them. A resident model, such as the draft model, is of
the same class, with weights that stay in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from specexec_kernels.tree_attention import TreeMask
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from specexec_cli.catalog.architectures import longest_text
from specexec_cli.core import Piece
from specexec_cli.errors import ConfigError, clear_shortage
from specexec_cli.models import attention
from specexec_cli.models.decoder_layer import DecoderLayer, visible_span
from specexec_cli.models.expert_mlp import PerExpert
from specexec_cli.models.fused import fuse
from specexec_cli.models.head_input import HeadEmbedding
from specexec_cli.models.kv_cache import HiddenRows, SlotCache, SlotLayer, halves
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.layer_states import state_kind
from specexec_cli.models.own_bits import leave_mode
from specexec_cli.models.own_rows import keep_rows_apart
from specexec_cli.models.pass_context import CHUNK_ROWS, LayerSource, PassContext
from specexec_cli.models.pass_rows import OthersKeys, PassRows, Span
from specexec_cli.models.recurrent import Parts
from specexec_cli.models.recurrent_layers import CACHE_NAMES
from specexec_cli.models.resident_parts import (
    SharedParts,
    frozen,
    load_resident,
)
from specexec_cli.models.rows_in_turn import TurnLayer
from specexec_cli.models.side_by_side import (
    KeysByText,
    KeysTouchedError,
    SideBySide,
    joint_state,
)
from specexec_cli.models.skeleton import Skeleton, build_skeleton
from specexec_cli.models.spans import Elsewhere, OtherMachines, check_splits
from specexec_cli.models.waiting_rows import DeviceRows, WaitingLayer
from specexec_cli.models.waves import Waves
from specexec_cli.offload.checkpoint import Block, Checkpoint
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.experts import ExpertStore
from specexec_cli.offload.link import use_device
from specexec_cli.offload.pinned import PinnedMemory
from specexec_cli.offload.stream import LayerStream
from specexec_cli.planning.hosts import InWaves, TextRows
from specexec_cli.transfers import sent

# kinds of rotary positions with frequencies that depend on a pass's highest position
_FOLLOWS_POSITIONS = frozenset({"dynamic", "longrope"})

_NO_LONGEST = 1 << 24  # tokens; no text is as long


class StreamedModel:
    """A model that runs passes over rows; PassRows explains the rows of a pass."""

    later: tuple[StreamedModel, ...] = ()  # of an MTP layer: those behind it

    def __init__(
        self,
        skeleton: Skeleton,
        device: torch.device,
        dtype: torch.dtype,
        resident_dtype: torch.dtype | None = None,
        *,
        table_in_ram: bool = False,
        own_rows: bool = True,
        shared: SharedParts | None = None,
    ) -> None:
        """Prepares the layers for a layer source, and loads embeddings, norms and head.

        Args:
            dtype: compute dtype.
            resident_dtype: dtype of embeddings and head; None keeps the file's.
            table_in_ram: whether embeddings are looked up in RAM; ignored if the head uses their
                table.
            own_rows: whether a GPU's products and norms give a row the same bits in passes of any
                number of rows, see own_rows.py.
            shared: the same weights, as another model has loaded them.
        """
        shared = shared or SharedParts()
        self.skeleton = skeleton
        self.device = device
        self.dtype = dtype
        self.experts: ExpertStore | None = None  # set if a mixture's experts come one by one
        self.span = range(len(skeleton.layers))  # the layers that are opened here
        self.others: OtherMachines | None = None  # which have the layers outside of the span
        self._waves: Waves | None = None  # of passes through them
        self.context = PassContext(skeleton.config, device, dtype)
        takes = inspect.signature(skeleton.model.forward).parameters
        self._waiting: Collection[int] = ()  # layers whose keys and values wait in RAM
        self._memory: PinnedMemory | None = None  # for them
        self._eight_bit_kv = False  # see keep_rows_in_8_bits
        self._cache_name = next(name for name in CACHE_NAMES if name in takes)
        # transformers passes a 4D mask on unchanged; each layer replaces it by its own mask
        self._placeholder = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        if skeleton.config._attn_implementation == attention.DENSE:
            skeleton.config._attn_implementation = attention.implementation(device)
        # whether rows of several texts take turns in each layer, see side_by_side.py
        self._turns = skeleton.config._attn_implementation not in attention.SIDE_BY_SIDE
        self.layers = self._placed_layers(skeleton, shared)
        self._head, self._tables = load_resident(
            skeleton, device, dtype, resident_dtype, table_in_ram, shared
        )
        self._embeddings = skeleton.model.get_input_embeddings()
        self.reads_hidden_rows = isinstance(self._embeddings, HeadEmbedding)
        # Which rows stay in a text's state for a trained head to read, as TrainedHead says of its
        # target; None keeps none. A head goes on from its own: those behind its layer where it
        # reads such of the target. One that drafts a block in a pass goes on from none.
        self.kept_features: tuple[int, ...] | None = None
        if skeleton.head is not None and self.block is None:
            self.kept_features = (len(self.layers),) if skeleton.head.features else ()
        if own_rows and device.type == "cuda":
            keep_rows_apart(skeleton.model)
        for part in skeleton.model.modules():
            if isinstance(part, PreTrainedModel):
                # modelling code reads the model's device and dtype from its first parameter
                part.register_parameter("here", frozen(torch.empty(0, device=device)))

    def _placed_layers(self, skeleton: Skeleton, shared: SharedParts) -> list[DecoderLayer]:
        """Puts a layer that finds its weights by itself in the place of each of the skeleton's."""
        placed = []
        for index in range(len(skeleton.layers)):
            exact = shared.skeleton if index in shared.layers else None
            if exact is not None:
                exact.config._attn_implementation = skeleton.config._attn_implementation
            own = exact or skeleton
            layer = DecoderLayer(
                own.layers[index], index, self.context, own, visible_span(own.config, index)
            )
            fuse(layer.layer, self.device, self.dtype)
            skeleton.layers[index] = layer
            placed.append(layer)
        return placed

    def shared_parts(self, checkpoint: Checkpoint | None) -> SharedParts:
        """The weights of this model that its low-bit copy can use instead of loading its own.

        Args:
            checkpoint: this model's checkpoint, to share the layers that stay on a GPU too; None
                shares only embeddings and head.
        """
        if checkpoint is None or not isinstance(self.source, DeviceStream):
            return SharedParts(self._tables)
        return SharedParts(self._tables, self.source.staying, build_skeleton(checkpoint))

    @property
    def ends(self) -> SharedParts:
        """Embeddings and head, for a trained head that has none of its own."""
        return SharedParts(ends=(self._embeddings, self._head.linear))

    @torch.no_grad()
    def of_target(self, kept: HiddenRows, start: int, stop: int) -> Tensor:
        """A target's rows of some slots as this head reads them, (stop - start, hidden).

        The target may keep several for each slot, which are made one a few slots at a time.
        """
        read = self._embeddings
        assert isinstance(read, HeadEmbedding), "it is a trained head"
        parts = range(start, stop, CHUNK_ROWS) or (start,)
        return torch.cat([
            read.of_target(kept.between(first, min(first + CHUNK_ROWS, stop))) for first in parts
        ])  # fmt: skip

    def keys_of_target(self, state: ModelState, count: int) -> OthersKeys:
        """A target's first `count` keys and values, of the layers that this head's attend to."""
        found = {}
        for kind, layer in self._read_layers(state).items():
            keys, values = layer.first_rows(count)
            found[kind] = keys, values
        return found

    def keep_read_layers_in_one_piece(self, state: ModelState) -> None:
        """Has copies of a target's text share no rows of those layers: every tree would join them.

        Rows that are shared already stay so.
        """
        for layer in self._read_layers(state).values():
            layer.shares = False

    def _read_layers(self, state: ModelState) -> dict[str, SlotLayer]:
        """A target's layers that this head's attend to, by kind."""
        found = {}
        for kind, index in self.others_layers.items():
            layer = state.layers[index]
            assert isinstance(layer, SlotLayer), "it has keys"
            found[kind] = layer
        return found

    def rows_to_time(self, count: int) -> PassRows:
        """So many rows behind each other, to time a pass: what others compute of them is zeros."""
        rows = PassRows.chain([0] * count, 0)
        if not self.reads_hidden_rows:
            return rows
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        hidden = zeros(count, self._embeddings.width)
        if not self.others_layers:
            return replace(rows, hidden_rows=hidden)
        keys = {}
        for layer in self.layers:
            part: Any = layer.layer.self_attn
            heads = self.skeleton.config.num_attention_heads // part.num_key_value_groups
            none = zeros(1, heads, count, part.head_dim)
            keys[part.layer_type] = none, none
        return replace(rows, hidden_rows=hidden, others_keys=keys)

    @property
    def others_layers(self) -> Mapping[str, int]:
        """The target's layers whose keys and values this model reads, see TrainedHead.keys."""
        return self.skeleton.head.keys if self.skeleton.head is not None else {}

    @property
    def block(self) -> Block | None:
        """The block that this model drafts in one pass, if it is a head that does."""
        return self.skeleton.head.block if self.skeleton.head is not None else None

    @property
    def source(self) -> LayerSource | None:
        """The source of the decoder layers' weights; None if all of them are resident."""
        return self.context.source

    @source.setter
    def source(self, source: LayerSource | None) -> None:
        self.context.source = source

    @property
    def on_layer(self) -> Callable[[int], None]:
        """Called with a layer's index when the layer is done; an error it raises ends the pass."""
        return self.context.on_layer

    @on_layer.setter
    def on_layer(self, callback: Callable[[int], None]) -> None:
        self.context.on_layer = callback

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.skeleton.config.vocab_size)

    @property
    def context_length(self) -> int:
        """Most positions that one set of rotary frequencies covers.

        LongRoPE (Phi-3 128k) has two sets, and changes all positions to the second when a text
        outgrows the first. The keys in the cache would then have the wrong frequencies. A model
        that only keeps states, as Mamba does, has no positions and no longest text. One that picks
        the tokens it sees by an index sees all of them as long as there are few.
        """
        config = self.skeleton.config
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
        names = ("model_type", "max_position_embeddings", "index_topk")
        own = {name: value for name in names if (value := getattr(config, name, None)) is not None}
        return longest_text(own) or _NO_LONGEST

    @property
    def spans(self) -> set[Span | None]:
        """How far back the layers attend; None is full attention."""
        return {layer.span for layer in self.layers}

    @property
    def capturable(self) -> bool:
        """Whether a pass can be captured as a CUDA graph.

        It cannot be if layers are elsewhere, if Python picks the experts to run, if rotary
        frequencies depend on the highest position (which Python reads from the GPU), if a layer's
        state is no KV cache or is kept in RAM or in 8 bits, or if hidden rows are read beside
        tokens or kept. Whether a GPU picks the experts is known behind a first pass.
        """
        config = self.skeleton.config
        kinds = [state_kind(config, layer.index) for layer in self.layers]
        if self.reads_hidden_rows or any(kind is not None for kind in kinds):
            return False
        if self.kept_features is not None or self._waiting or self._eight_bit_kv:
            return False
        if self.others is not None or self.experts is not None:
            return False
        if isinstance(self.source, DeviceStream) and not self.source.all_stay:
            return False
        return not any(
            (isinstance(module, PerExpert) and not module.keeps_tables)
            or _rope_types(module) & _FOLLOWS_POSITIONS
            for module in self.skeleton.model.modules()
        )

    @property
    def table_in_ram(self) -> Tensor | None:
        """The table of embeddings, (vocab, columns), where a model on a GPU has it in RAM."""
        table: Tensor = self._embeddings.table
        return table if table.device.type != self.device.type else None

    def new_state(self) -> ModelState:
        """An empty state of all layers, for a new text."""
        config = self.skeleton.config
        kinds = [state_kind(config, layer.index) for layer in self.layers if layer.writes_cache]
        if all(kind is None for kind in kinds):
            state: ModelState = SlotCache(len(kinds))
        else:
            state = ModelState([SlotLayer() if kind is None else kind(config) for kind in kinds])
        there = DeviceRows(self.device)
        eight_bit = self.dtype if self._eight_bit_kv else None
        reads_blocks = attention.implementation(self.device) != attention.DENSE
        for index, layer in enumerate(state.layers):
            rows = layer.parts[-1] if isinstance(layer, Parts) else layer
            if not isinstance(rows, SlotLayer):
                continue
            if index in self._waiting:
                assert self._memory is not None
                rows = WaitingLayer(there, self._memory, eight_bit)
            elif eight_bit is not None:
                rows = TurnLayer(there, eight_bit)
            else:
                rows.shares = reads_blocks
            if isinstance(layer, Parts):
                layer.parts = (*layer.parts[:-1], rows)
            else:
                state.layers[index] = rows
        for index in range(len(self.layers)):
            if index not in self.span:
                state.layers[index] = Elsewhere()
        for passage in self.others.passages if self.others is not None else ():
            state.layers[passage.span.start] = passage.new_rows()
        if self.kept_features is not None:
            state.layers.append(HiddenRows())
        return state

    def open_alone(self, span: range) -> None:
        """Has passes run the layers of a span, and hand rows on at all others.

        Raises:
            CheckpointError: the model's layers cannot be on several machines.
        """
        config = self.skeleton.config
        kinds = [state_kind(config, layer.index) for layer in self.layers]
        check_splits(self.skeleton, self.layers, kinds, span)
        self.span, self.context.first_layer = span, span.start
        for layer in self.layers:
            layer.elsewhere = None if layer.index in span else lambda hidden, tuples: hidden

    def pass_on(
        self, others: OtherMachines, divide: Callable[[Sequence[TextRows]], InWaves]
    ) -> None:
        """Has passes take their rows to other machines for the layers outside of the span.

        Args:
            divide: passes into waves, as `Waves` takes it.
        """
        self.others = others
        if not others.passages:  # the whole model is on this machine
            return
        self._waves = Waves(others, divide, self.context)
        for layer in self.layers[others.passages[0].span.start :]:
            layer.elsewhere = self._waves.between
        for at, passage in enumerate(others.passages):
            self.layers[passage.span.start].elsewhere = self._waves.through(at)

    def meanwhile(self, work: Callable[[], None]) -> None:
        """Has work done while the rows of the next pass are on other machines; at once if none has
        layers. It stays undone where the pass fails before."""
        if self._waves is None:
            work()
        else:
            self._waves.meanwhile = work

    def keep_rows_in_ram(self, layers: Collection[int], memory: PinnedMemory) -> None:
        """Has keys and values of some layers wait in RAM, in every state from now on.

        Args:
            layers: their indices. No layer of the model may attend to keys of another one.
            memory: where the RAM comes from; closed with the model.
        """
        assert all(layer.writes_cache for layer in self.layers), "states are counted by layers"
        self._waiting, self._memory = frozenset(layers), memory

    def keep_rows_in_8_bits(self) -> None:
        """Has keys and values kept in 8 bits, in every state from now on.

        Raises:
            ConfigError: layers read the keys of others, which would have to stay in full.
        """
        if not all(layer.writes_cache for layer in self.layers):
            raise ConfigError(
                f"`kv='8bit'`: some layers of {self.skeleton.config.model_type} models attend to "
                "the keys of others, which are kept in full: leave it out"
            )
        self._eight_bit_kv = True

    @torch.no_grad()
    def forward(self, rows: PassRows, state: ModelState, logit_rows: Sequence[int]) -> Tensor:
        """One pass over all layers; appends every row to the state.

        Args:
            logit_rows: indices of the rows for which logits are computed.
        Returns:
            (len(logit_rows), vocab) logits in float32, whatever the compute dtype.
        Raises:
            StreamError: weights could not be read. The state may then hold part of the rows, and
                the caller must crop it.
        """
        return self._through_layers([rows], [state], logit_rows)

    @torch.no_grad()
    def forward_together(
        self, texts: Sequence[tuple[PassRows, ModelState, Sequence[int]]]
    ) -> list[Tensor]:
        """One pass over the rows of several texts; appends each row to its own text's state.

        On a CPU a row has the same bits in every pass, so each text's logits are those of a pass of
        its own.

        Args:
            texts: each text's rows, state and logit_rows, as for `forward`.
        Returns:
            (wanted, vocab) logits in float32 for each text.
        Raises:
            StreamError: as for `forward`; the caller must crop all states.
        """
        parts, states, wanted = zip(*texts, strict=True)
        before = [state.length for state in states]
        logit_rows, first = [], 0
        for rows, own in zip(parts, wanted, strict=True):
            logit_rows += [first + row for row in own]
            first += len(rows.tokens)
        try:
            logits = self._through_layers(parts, states, logit_rows)
        except KeysTouchedError:  # at most once for a model, in its first pass of several texts
            self._turns = True
            for state, length in zip(states, before, strict=True):
                state.crop(length)
            if self.source is not None:
                self.source.restart()
            logits = self._through_layers(parts, states, logit_rows)
        return list(torch.split(logits, [len(own) for own in wanted]))

    def _through_layers(
        self, parts: Sequence[PassRows], states: Sequence[ModelState], logit_rows: Sequence[int]
    ) -> Tensor:
        """The logits of some rows of a pass, which goes in waves where other machines have layers.

        Args:
            logit_rows: indices among the rows of all texts, one text behind the other.
        """
        whole = self._together(parts, states)
        if self._waves is None:
            for rows, state in zip(parts, states, strict=True):
                state.begin(rows)
            return self._pass(*whole, logit_rows, whole)
        try:
            *before, last = self._waves.of_pass(parts)
            for wave in before:
                self._pass(*self._wave(wave, parts, states, last=False), (), None)
            return self._pass(*self._wave(last, parts, states, last=True), logit_rows, whole)
        finally:
            self._waves.end()

    def _wave(
        self,
        wave: Sequence[Piece],
        parts: Sequence[PassRows],
        states: Sequence[ModelState],
        *,
        last: bool,
    ) -> tuple[SideBySide, Cache]:
        """Begins a wave of a pass; its rows, and the cache for them."""
        assert self._waves is not None, "other machines have layers"
        rows = [parts[piece.text].part(piece.start, piece.stop) for piece in wave]
        own = [states[piece.text] for piece in wave]
        for part, state in zip(rows, own, strict=True):
            state.begin(part)
        self._waves.begin(wave, rows, own, last)
        return self._together(rows, own)

    def _together(
        self, parts: Sequence[PassRows], states: Sequence[ModelState]
    ) -> tuple[SideBySide, Cache]:
        """Rows of one text or several as one, and the cache for them."""
        rows = SideBySide(parts, self._turns)
        return rows, states[0] if len(parts) == 1 else joint_state(states, rows)

    def _pass(
        self,
        rows: SideBySide,
        cache: Cache,
        logit_rows: Sequence[int],
        kept: tuple[SideBySide, Cache] | None,
    ) -> Tensor:
        """Runs transformers' forward over rows that have begun.

        Args:
            logit_rows: indices among the rows that come to the head.
            kept: those rows and their cache, for a trained head to read; None keeps none.
        """
        use_device(self.device)
        self.context.begin(rows)
        if self.experts is not None:
            visits = [
                sum(piece.count for piece in pieces)
                for pieces in rows.chunks(self.context.chunk_rows)
            ]
            self.experts.expect(max(visits), len(visits))
        tokens = [token for part in rows.parts for token in part.tokens]
        positions = [position for part in rows.parts for position in part.positions]
        numbers = torch.tensor([*tokens, *positions, *logit_rows], dtype=torch.int64)
        self._embeddings.host_ids = numbers[: len(tokens)][None]
        counts = [len(tokens), len(positions), len(logit_rows)]
        ids, places, wanted = torch.split(sent(numbers, self.device), counts)
        if self.reads_hidden_rows:
            beside = [part.hidden_rows for part in rows.parts]
            self._embeddings.hidden_rows = torch.cat([each for each in beside if each is not None])
        if self.kept_features is not None:
            self._head.keep = partial(self._keep_hidden_rows, *kept) if kept is not None else None
            self.context.take(self.kept_features)
        return self._run(ids[None], places[None], cache, wanted, _others_keys(rows))

    def _keep_hidden_rows(self, rows: SideBySide, cache: Cache, hidden: Tensor) -> None:
        """Appends rows of the pass to their texts' states, the kept features or, where there are
        none, the (1, rows, hidden) rows that the head reads."""
        rows.now = rows.every_piece
        found = self.context.taken() or [hidden.to(self.dtype)]
        made = torch.cat(found, dim=-1)
        if self.reads_hidden_rows:
            made = self._embeddings.to_go_on(made)
        cache.layers[-1].update(*halves(made))

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Mapping[Span | None, Tensor | TreeMask],
        cache: SlotCache,
        looked_up: Tensor | None = None,
    ) -> Tensor:
        """A pass of a resident model over tensors only, so that it can be captured; see graphs.py.

        Args:
            tokens, positions: (1, rows) int64.
            masks: for each of `spans`, a (1, 1, rows, slots) mask from PassContext.dense, or the
                slots of the rows' paths.
            looked_up: (rows, columns) the tokens' rows of `table_in_ram`, on the device.
        Returns:
            (rows, vocab) logits in float32.
        """
        self.context.begin_step(masks)
        self._embeddings.looked_up = looked_up
        try:
            return self._run(tokens, positions, cache, None)
        finally:
            self._embeddings.looked_up = None

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        logit_rows: Tensor | None,
        others_keys: Mapping[str, Any] | None = None,
    ) -> Tensor:
        self._head.rows = logit_rows
        given = {self._cache_name: cache}
        if others_keys:
            given["shared_kv_states"] = others_keys  # as Gemma 4's layers call them
        leave_mode()
        with clear_shortage(f"it ran out in a pass of {tokens.shape[1]} rows"):
            output = self.skeleton.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._placeholder,
                use_cache=True,
                **given,
            )
        logits: Tensor = output.logits[0]
        return logits

    @property
    def bytes_streamed(self) -> int:
        """Bytes of layers that were streamed so far."""
        return self.source.bytes_streamed if self.source is not None else 0

    @property
    def read_s(self) -> float:
        """Seconds spent reading the SSD so far; 0 with a GPU or if experts come one by one."""
        return self.source.read_s if isinstance(self.source, LayerStream) else 0.0

    def close(self) -> None:
        """Ends threads, closes files and frees memory; idempotent."""
        if self.source is not None:
            for layer in self.layers:
                layer.release()
            self.source.close()
        if self._memory is not None:
            self._memory.close()
        if self.others is not None:
            self.others.close()


def _others_keys(rows: SideBySide) -> Mapping[str, Any]:
    """The keys and values of other models that rows attend to, as layers are given their own."""
    found = [part.others_keys for part in rows.parts if part.others_keys is not None]
    if not rows.by_text:
        return found[0] if found else {}
    return {
        kind: tuple(KeysByText([each[kind][half] for each in found]) for half in (0, 1))
        for kind in (found[0] if found else ())
    }


def _rope_types(module: nn.Module) -> set[str]:
    """The kinds of rotary positions that a module computes; empty if it computes none."""
    found = getattr(module, "rope_type", None)
    if isinstance(found, Mapping):
        return {kind for kind in found.values() if isinstance(kind, str)}
    return {found} if isinstance(found, str) else set()
