"""Memory a session takes besides the target's decoder layers: the part that cannot be streamed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specexec_cli.device import format_bytes
from specexec_cli.errors import ConfigError, OutOfMemoryError
from specexec_cli.planning.sizes import ModelBytes

GPU_CONTEXT_BYTES = 600_000_000  # CUDA context and libraries, before any tensor
# Of them what is still to come once the context exists, and what is free is told without it:
# workspaces of cuBLAS, and kernels, which are loaded when they are first used.
GPU_LIBRARY_BYTES = 200_000_000
# A GPU's draft steps are captured for each of these numbers of rows. Their caches begin with
# STEP_SLOTS slots and double.
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)
STEP_SLOTS = 2048
PASS_ROWS = (1, 16, 32, 64, 128)  # of a target's passes that a GPU replays
PART_SLOTS = 256  # that one kernel of a captured step's attention sums over
# Rows of every product that a GPU's library is asked for in a target's pass. To read a matrix from
# a GPU's memory takes about as long as to multiply it by so many rows: with fewer it would be read
# more often for trees of a thousand nodes, and with more, zeros would be multiplied for longer than
# the link takes to bring it.
BLOCK_ROWS = 128
FLOAT32_BYTES = 4  # of logits and of what runs between layers, in every compute dtype
PROMPT_ROWS = 2048  # of other texts' prompts, beside one that a pass carries whole
# A draft model that reads its target's cache rows drafts behind a prompt of so many rows at most,
# before the target has them: longer ones would take as much memory and arithmetic as the target's.
OWN_PROMPT_ROWS = 512
NOISE_POSITIONS = 64  # whose noise stays at hand
DRAFT_WINDOW_TOKENS = 4096  # that a draft model sees of a longer text, where nothing fits otherwise
STEP_SCORES = 4  # rows of the vocabulary that a draft step makes of each row of logits
SCRATCH_BYTES = 80_000_000  # packing buffers and code that the first pass brings in

CHECKPOINTS = 3  # states of a text that a recurrent layer keeps to go back to

DRAFT_MODEL = "draft model"  # its weights, among the parts

Parts = tuple[tuple[str, int], ...]  # what takes how many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How large a session will be: the numbers that its memory follows from."""

    context_tokens: int = 2048  # prompt and text
    budget: int = 128  # most nodes of a pass
    batch: int = 32  # of them, how many the draft model expands at once
    texts: int = 1  # at once; each has `context_tokens`, and `budget` is shared
    chunk_rows: int = 512  # most rows that go through a layer together
    item_bytes: int = 2  # of the compute dtype
    eight_bit_kv: bool = False  # whether the target's keys and values are kept in 8 bits
    widened: bool = False  # whether a CPU multiplies that dtype as float32
    # whether the draft model reads the target's own cache rows, and goes on from its states
    shares_cache: bool = False
    # of a copy of the target's own layers: whether it takes embeddings and head from the target
    shares_tables: bool = False
    shares_layers: bool = False  # and layers that stay on a GPU, in the place of their copies
    draft_window: int | None = None  # most tokens of a text that the draft model sees; None: all
    # Of a trained head: which of the target's rows it reads, see TrainedHead. The target keeps
    # them, and the head its own. None: no head drafts. Of a span on another machine: which of them
    # it sends back beside the rows behind its last layer.
    features: tuple[int, ...] | None = None
    reads_keys: bool = False  # whether it attends to the target's keys and values, and keeps none
    block_rows: int = 0  # of a head that drafts a block in one pass, once for each tree
    mtp_layers: int = 1  # of several MTP layers, each of which keeps rows of its own

    def __post_init__(self) -> None:
        if min(self.context_tokens, self.chunk_rows, self.texts) < 1 or self.budget < 0:
            raise ConfigError("context, chunk and texts must be 1 or more, the budget 0 or more")

    @property
    def reads_target(self) -> bool:
        """Whether the draft model is a trained head, which reads rows that the target keeps."""
        return self.features is not None

    @property
    def verify_rows(self) -> int:
        """Rows of a usual pass: the trees and the bonus token before each."""
        return self.budget + self.texts

    @property
    def pass_rows(self) -> int:
        """Rows of the largest pass: a whole prompt, and beside it what others may bring."""
        others = PROMPT_ROWS if self.texts > 1 else 0
        return self.context_tokens + others + self.verify_rows

    @property
    def slots(self) -> int:
        """Cache rows of all texts."""
        found = self._rows_of_texts(self.context_tokens)
        return _in_parts(found) if self.shares_cache else found

    @property
    def draft_slots(self) -> int:
        """Cache rows that the draft model has of its own.

        Where it reads its target's, those of a short prompt, and of nodes.
        """
        if not self.shares_cache:
            return self._rows_of_texts(self.draft_tokens)
        found = min(self.context_tokens, OWN_PROMPT_ROWS) + self.budget + 1
        return _in_parts(found + 1) - 1  # a captured step has one more

    @property
    def draft_tokens(self) -> int:
        """The most tokens of a text that the draft model sees at once."""
        return min(self.context_tokens, self.draft_window or self.context_tokens)

    def _rows_of_texts(self, tokens: int) -> int:
        return self.texts * (tokens + nodes_of_a_text(self.budget, self.texts) + 1)


def _in_parts(slots: int) -> int:
    """The slots rounded up to whole parts, by which a captured step divides those of two caches."""
    return -(-slots // PART_SLOTS) * PART_SLOTS


def nodes_of_a_text(budget: int, texts: int) -> int:
    """The most nodes of one text, where several texts share a budget.

    Up to four times its share, so that not every text needs memory for the nodes of all.
    """
    return min(budget, -(-4 * budget // texts))


def activation_bytes(model: ModelBytes, work: Work) -> int:
    """Rows between and inside layers, mask, logits, and what matmul libraries set aside.

    Where a latent is cached in the place of keys and values (DeepSeek-V2), the layer that attends
    has those of all slots beside it.

    Measured on a 0.6B Llama: within 2 % of the peak of the whole process (docs/measured.md).
    """
    between = 3 * work.pass_rows * model.hidden * FLOAT32_BYTES
    inside = _rows_in_a_layer(model, work, _most_rows_in_a_layer(work))
    expanded = model.expanded_elements * work.slots * _inner_bytes(work)
    logits = 2 * _logit_bytes(model, work)  # of this pass and of the last
    return between + inside + expanded + logits + SCRATCH_BYTES


def prompt_rows(target: ModelBytes, work: Work, spare_bytes: int) -> int:
    """Rows of a long prompt that may go through a layer of a GPU's target together.

    A stored matrix is converted once for as many rows as come together. What a tree's logits take
    behind the last layer, prompts have no use for before it, and what the plan left over nobody.

    Returns:
        `work.chunk_rows` or more of them.
    """
    planned = _most_rows_in_a_layer(work)
    room = _rows_in_a_layer(target, work, planned) + _logit_bytes(target, work) + spare_bytes
    rows = max(work.chunk_rows, planned)
    while rows < work.context_tokens:
        if _rows_in_a_layer(target, work, rows + BLOCK_ROWS) > room:
            break
        rows += BLOCK_ROWS
    return rows


def _most_rows_in_a_layer(work: Work) -> int:
    return max(work.verify_rows, min(work.chunk_rows, work.context_tokens))


def _rows_in_a_layer(model: ModelBytes, work: Work, rows: int) -> int:
    """The bytes that rows take inside a layer, their mask included."""
    elements = 8 * model.hidden + 3 * model.intermediate
    if model.experts is not None:
        elements += model.experts.chosen * model.experts.row_elements
    mask = rows * (work.context_tokens + rows) * (1 + work.item_bytes)
    return rows * elements * _inner_bytes(work) + mask


def _inner_bytes(work: Work) -> int:
    """Of an element inside a layer."""
    return FLOAT32_BYTES if work.widened else work.item_bytes


def _logit_bytes(model: ModelBytes, work: Work) -> int:
    return work.verify_rows * model.vocab * FLOAT32_BYTES


def fixed_parts(target: ModelBytes, draft: ModelBytes | None, work: Work) -> Parts:
    """What the memory of the device that computes must hold wherever the layers are.

    A copy of the target has its tables of embeddings and head, where they are on that device.
    """
    parts = [
        ("embeddings and head", target.resident),
        ("target's KV cache", kv_bytes(target.kv_elements * work.slots, work)),
        *_layer_in_full(target, work),
        *_states("target", target, work),
        ("activations", activation_bytes(target, work)),
    ]
    if draft is not None:
        tables = 0
        if work.shares_tables:
            # without a head of its own the table is the head; beside a GPU it may be in RAM
            there = draft.head + (draft.table if target.table else 0)
            tables = there if draft.head else draft.resident
        parts += [
            (DRAFT_MODEL, draft.loaded(work.item_bytes) - tables),
            ("draft model's KV cache", _draft_cache_bytes(draft, work)),
            *_states("draft model", draft, work, behind_target=work.shares_cache),
            ("scores of draft nodes", _score_bytes(draft, work)),
        ]
        if work.features is not None:
            parts.append(("hidden rows", _hidden_row_bytes(target, draft, work.features, work)))
    elif work.features:  # of a span: where the head is, the rows are kept
        # a CPU sends them without a copy; those of a GPU pass through RAM one layer at a time
        elements = _features_in_pass(target, work.features, work)
        parts.append(("hidden rows", elements * work.item_bytes))
    return tuple(parts)


def kv_bytes(elements: int, work: Work) -> int:
    """The bytes in which a target keeps its keys and values.

    In 8 bits an element has a byte, and each 32 of a head, or the last fewer ones, have 2 more: an
    eighth at most, in heads of 16 elements or more.
    """
    return elements * 9 // 8 if work.eight_bit_kv else elements * work.item_bytes


def _layer_in_full(target: ModelBytes, work: Work) -> Parts:
    """Keys and values of one layer as its attention reads them, where they are kept in 8 bits."""
    if not (work.eight_bit_kv and target.kv_elements):
        return ()
    elements = max(target.layer_kv, default=target.kv_elements // len(target.layers)) * work.slots
    scales = elements * (FLOAT32_BYTES + 2) // 32  # a copy of them, and in float32
    # a copy of the target reads them too, and an assistant those of two layers while it drafts
    times = 1 + work.shares_cache + 2 * work.reads_keys
    return (("one layer's keys and values", times * elements * work.item_bytes + scales),)


def _hidden_row_bytes(
    target: ModelBytes, draft: ModelBytes, features: tuple[int, ...], work: Work
) -> int:
    """Bytes of hidden rows: those the target keeps for a trained head, and the head's own.

    A head that attends to the target's keys keeps rows of the present tree alone. A pass holds the
    rows of several layers apart until it puts them side by side.
    """
    kept = max(len(features), 1) * target.hidden * work.slots
    own = target.hidden * work.verify_rows if work.reads_keys else draft.hidden * work.slots
    own *= work.mtp_layers
    return (kept + own + 2 * _features_in_pass(target, features, work)) * work.item_bytes


def _features_in_pass(target: ModelBytes, features: tuple[int, ...], work: Work) -> int:
    return len(features) * target.hidden * work.pass_rows


def _states(name: str, model: ModelBytes, work: Work, *, behind_target: bool = False) -> Parts:
    """What recurrent layers keep of all texts, and of draft nodes that are undecided.

    Of a text that is the state behind its committed tokens, and that behind the pending ones, which
    alone is a draft model's own where it goes on from its target's.
    """
    states = model.state_elements // (2 if behind_target else 1)
    elements = work.texts * states + work.budget * model.node_elements
    return ((f"{name}'s recurrent states", elements * FLOAT32_BYTES),) if elements else ()


def checkpoints(target: ModelBytes, draft: ModelBytes | None, work: Work) -> Parts:
    """The RAM for earlier states of recurrent layers, beside the two of a text that are at work."""
    models = [target] if draft is None or work.shares_cache else [target, draft]
    elements = sum(model.state_elements // 2 for model in models) * work.texts * CHECKPOINTS
    return (("checkpoints of recurrent states", elements * FLOAT32_BYTES),) if elements else ()


def _score_bytes(draft: ModelBytes, work: Work) -> int:
    """Rows of the vocabulary that the drafter works with.

    It keeps one for every expanded node until the tree has been verified, and noise for as many
    positions as `sampling` does. A draft step makes more on the way from logits to the best tokens.
    """
    nodes = work.budget + work.texts
    step = STEP_SCORES * min(work.batch, max(work.budget, 1))
    return (nodes + NOISE_POSITIONS + step) * draft.vocab * FLOAT32_BYTES


def _draft_cache_bytes(draft: ModelBytes, work: Work) -> int:
    """Keys and values of the draft model, as far as they are its own."""
    row_bytes = draft.kv_elements * work.item_bytes
    own = row_bytes * work.draft_slots
    if not work.shares_cache:
        return own
    # the rows of one layer are put together for attention
    layer = max(draft.layer_kv, default=draft.kv_elements // max(len(draft.layers), 1))
    return own + layer * work.item_bytes * (work.slots + work.draft_slots)


def _block_rows(work: Work) -> int:
    """Rows of logits beside those that count: zeros behind few, the last block beside many."""
    few = work.verify_rows <= BLOCK_ROWS
    return BLOCK_ROWS - work.verify_rows if few else BLOCK_ROWS


def gpu_parts(
    target: ModelBytes,
    draft: ModelBytes | None,
    work: Work,
    context_bytes: int = GPU_CONTEXT_BYTES,
    *,
    table_in_ram: bool = True,
) -> Parts:
    """What must lie in a GPU's memory besides decoder layers.

    Weights stored in another form than they are multiplied in are converted one matrix at a time: a
    target's packed ones in every pass, a draft model's where a pass has more rows than the fused
    kernels take.

    Args:
        context_bytes: that the CUDA context and its libraries have yet to take.
        table_in_ram: the target's table of embeddings is looked up in RAM, unless it is its head.
    """
    if table_in_ram:
        target = replace(target, resident=target.resident - target.table, table=0)
    matrices = [target.largest_matrix] if target.layers_differ_from(work.item_bytes) else []
    if target.packed_head or (matrices and not target.packed):
        matrices.append(target.vocab * target.hidden)
    if draft is not None and draft.packed:
        matrices.append(draft.largest_matrix)
    return (
        ("CUDA context", context_bytes),
        *fixed_parts(target, draft, work),
        ("one converted matrix", max(matrices, default=0) * work.item_bytes),
        ("one block of rows", _block_rows(work) * target.vocab * FLOAT32_BYTES),
        ("draft steps", 0 if draft is None or work.reads_target else _step_bytes(draft, work)),
    )


def _step_bytes(draft: ModelBytes, work: Work) -> int:
    """What captured steps take: the slot for padding, and the logits of every graph.

    While the buffers grow, one layer has its old ones too.
    """
    row_bytes = draft.kv_elements * work.item_bytes
    old = row_bytes * work.draft_slots // max(len(draft.layers), 1)
    return row_bytes + old + sum(STEP_ROWS) * draft.vocab * FLOAT32_BYTES


def replay_bytes(target: ModelBytes, work: Work) -> int:
    """What passes that a GPU replays take: logits for all of them, and what they compute with."""
    most = next((size for size in PASS_ROWS if size >= work.verify_rows), PASS_ROWS[-1])
    logits = (PASS_ROWS[-1] + BLOCK_ROWS) * target.vocab * FLOAT32_BYTES
    between = 3 * most * target.hidden * FLOAT32_BYTES
    return logits + between + _rows_in_a_layer(target, work, most)


class DoesNotFitError(OutOfMemoryError):
    """A session that this machine has no memory for, as facts."""

    def __init__(self, what: str, needed_bytes: int, usable_bytes: int, parts: Parts) -> None:
        """Collects the facts.

        Args:
            what: the beginning of the sentence, up to the numbers, with {needed} in it.
            parts: what takes how much, the largest first.
        """
        self.what = what
        self.needed_bytes = needed_bytes
        self.usable_bytes = usable_bytes
        self.parts = parts
        small = sum(size for _, size in parts[4:])
        shown = [*parts[:4], *([("other", small)] if small else [])]
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown)
        sentence = what.format(
            needed=format_bytes(needed_bytes), usable=format_bytes(usable_bytes), parts=listed
        )
        super().__init__(sentence)

    @property
    def biggest(self) -> str:
        """The part that takes the most of what can be changed at all."""
        kept = ("program", "CUDA context")
        return next(name for name, _ in self.parts if name not in kept)
