"""Checks that specexec computes what transformers computes, on a tiny random model of one type.

save_pretrained writes the checkpoint, so its tensors have the names of real ones. It is opened as
any other, streamed from disk layer by layer. Logits are compared with transformers' own forward
with eager attention in float32. A different order of sums stays far below
conformance_logits.TOLERANCE; a wrong mask, position or weight does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conformance_bits import WIDENED, check_bits
from conformance_configs import NO_OPTIONS, VARIANTS, WORDS, tiny_config
from conformance_logits import RULED_OUT, NotConforming, compare, expected_logits
from conformance_report import untried_kinds
from torch import Tensor
from transformers import PreTrainedModel

from specexec_cli.catalog import architectures
from specexec_cli.catalog.architectures import ARCHITECTURES, Architecture, register
from specexec_cli.config import SamplingConfig, Tier, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.models import pass_context
from specexec_cli.models.decoder_layer import is_norm
from specexec_cli.models.kv_cache import SlotLayer
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.stored_names import OTHER_PART, UNUSED_INDEX
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.built_sizes import own_tensors, text_model_class
from specexec_cli.planning.sizes import ExpertBytes, checkpoint_bytes
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget, verify_together

_CHUNK_ROWS = 16
_SLOT_MORE_BYTES = 1 << 14  # bytes of a slot beyond an expert's tensors, to whole disk blocks
_STD = 0.3  # deviation of the random weights; logits then differ clearly from token to token


def check(model_type: str, folder: Path) -> None:
    """Checks a type with its defaults and with each of its VARIANTS; raises what goes wrong.

    Args:
        model_type: of transformers.
        folder: an empty folder.
    """
    own = save(model_type, folder / "defaults" / "target", noise=0.0)
    if untried := untried_kinds(own):
        raise NotConforming(untried)
    _check_saved(model_type, own, folder / "defaults", NO_OPTIONS)
    for number, options in enumerate(VARIANTS.get(model_type, ())):
        check_variant(model_type, folder / f"variant-{number}", options)


def check_variant(model_type: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Checks a type with some options; raises what goes wrong, and names the options.

    Args:
        model_type: of transformers.
        folder: an empty folder.
        options: of the configuration.
    """
    try:
        own = save(model_type, folder / "target", noise=0.0, options=options)
        _check_saved(model_type, own, folder, options)
    except Exception as error:  # whatever it is, it belongs to these options
        told = ", ".join(f"{name}={value}" for name, value in options.items())
        raise NotConforming(f"with {told}: {error}") from error


def check_own_bits(model_type: str, folder: Path) -> None:
    """Checks that a row's bits are its own, with heads of the sizes of real models.

    Args:
        model_type: of transformers.
        folder: an empty folder.
    """
    with _registered(model_type):
        for widen in WIDENED:
            save(model_type, folder / str(widen), noise=0.0, widen=widen)
            check_bits(folder / str(widen), WORDS)


def _check_saved(
    model_type: str, own: PreTrainedModel, folder: Path, options: Mapping[str, Any]
) -> None:
    """Runs all checks on a target that is in `folder` already."""
    save(model_type, folder / "draft", noise=0.03, options=options)
    with _registered(model_type), small_chunks():
        check_passes(own, folder / "target")
        _check_experts(folder / "target")
        _check_together(folder / "target")
        _check_two_bytes(own, folder / "target")
        _check_texts(folder)


def save(
    model_type: str,
    folder: Path,
    noise: float,
    options: Mapping[str, Any] = NO_OPTIONS,
    widen: int = 1,
) -> PreTrainedModel:
    """Writes random weights; returns transformers' model of what was written.

    Args:
        noise: share of other random weights, by which a draft model differs from its target.
        options: of the configuration, replacing the small defaults.
        widen: see tiny_config.
    """
    config = tiny_config(model_type, options, widen)
    kind = text_model_class(config)
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        weights = [*model.parameters(), *_stored_biases(model)]
        for weight in weights:
            weight.normal_(std=_STD / widen**0.5)  # sums of more products come to as much
        for part in model.modules() if widen > 1 else ():
            if is_norm(part):  # rows come to as much as in real models, so that roundings show
                for weight in part.parameters():
                    weight += 1.0
        for weight in weights:
            weight += noise * torch.randn_like(weight)
    model.tie_weights()
    model.save_pretrained(folder)
    found = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return found.eval()


def _stored_biases(model: PreTrainedModel) -> list[Tensor]:
    """Biases that are buffers, such as routers'; a new model's are zeros, which test nothing."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [
        tensor for name, tensor in own_tensors(model)
        if name.endswith("bias") and name not in parameters and tensor.is_floating_point()
    ]  # fmt: skip


def check_passes(own: PreTrainedModel, folder: Path) -> None:
    """Checks a long prompt in chunks with a tree after it, a commit, a crop, and further passes."""
    rng = np.random.default_rng(0)
    prompt = _words(rng, 3 * _CHUNK_ROWS + 7)
    tree = _tree(rng)
    target = LocalTarget(_open(folder, "ssd"))
    try:
        check_unused(target.model)
        _check_sizes(target.model, folder)
        compare("prompt and tree", target.verify(prompt, tree), expected_logits(own, prompt, tree))
        nodes = [0, 2, 5]  # a path that leaves siblings and cousins behind
        target.commit(nodes)
        context = prompt + tree.tokens[nodes].tolist()
        bonus = _words(rng, 2)
        expected = expected_logits(own, context + bonus, tree)
        compare("after a commit", target.verify(bonus, tree), expected)
        target.crop(len(context))
        _interrupt(target, bonus, tree)
        compare("after an interrupted pass", target.verify(bonus, tree), expected)
        target.commit([])
        target.crop(len(prompt) - 9)
        rest = prompt[: len(prompt) - 9] + _words(rng, 5)
        again = rest[len(target.tokens) :]  # a recurrent layer may have to begin anew
        compare("after a crop", target.verify(again, tree), expected_logits(own, rest, tree))
    finally:
        target.close()


def _interrupt(target: LocalTarget, pending: list[int], tree: DraftTree) -> None:
    """Begins a pass that Ctrl-C ends behind all layers but the last."""

    def ends(layer: int) -> None:
        if layer == len(target.model.layers) - 2:
            raise KeyboardInterrupt

    target.model.on_layer = ends
    try:
        target.verify(pending, tree)
    except KeyboardInterrupt:
        target.model.on_layer = lambda layer: None
    else:
        raise NotConforming("a pass that is interrupted goes on")


def _check_together(folder: Path) -> None:
    """Checks that texts that share passes get the logits that they get alone."""
    rng = np.random.default_rng(3)
    model = _open(folder, "ssd")
    # chunk borders within texts and between them, with and without rows in the caches before
    texts = [(_words(rng, 3 * _CHUNK_ROWS + 7), _tree(rng)), (_words(rng, 2), _tree(rng))]
    nexts = [(_words(rng, 1), _tree(rng)), (_words(rng, _CHUNK_ROWS + 3), DraftTree.empty())]
    together, alone = [LocalTarget(model) for _ in texts], [LocalTarget(model) for _ in texts]
    try:
        for part in (texts, nexts):
            parts = [(target, *each) for target, each in zip(together, part, strict=True)]
            for found, single, each in zip(verify_together(parts), alone, part, strict=True):
                compare("beside another text", found, single.verify(*each))
            for target in (*together, *alone):
                target.commit([])
    finally:
        model.close()


def check_unused(model: StreamedModel) -> None:
    """Checks that all tensors are used, except tied ones and those of parts that are not for text.

    Those of an index over tokens are not, since the tests' texts are no longer than it picks.

    Raises:
        NotConforming: another tensor is unused.
    """
    for name, reason in model.skeleton.unused.items():
        if not (reason.startswith("tied to ") or reason in (OTHER_PART, UNUSED_INDEX)):
            raise NotConforming(f"'{name}' is unused: {reason}")


def _check_sizes(model: StreamedModel, folder: Path) -> None:
    """Checks that layers, experts and cache rows have the bytes that `plan` counts."""
    sizes = checkpoint_bytes(read_checkpoint(folder))
    for index, tensors in enumerate(model.skeleton.layer_tensors):
        stored = sum({each.name: each.n_bytes for each in tensors.values()}.values())
        if stored != sizes.layers[index]:
            raise NotConforming(f"layer {index} has {stored} bytes, not {sizes.layers[index]}")
    cache = model.new_state()
    model.forward(PassRows.chain([WORDS.start], 0), cache, [0])
    elements = sum(
        tensor.shape[1] * tensor.shape[3]
        for layer in cache.layers
        for part in getattr(layer, "parts", (layer,))  # of layers that keep several states
        if isinstance(part, SlotLayer)
        for tensor in (part.keys, part.values)
    )
    if elements != sizes.kv_elements:
        raise NotConforming(f"a token takes {elements} cache elements, not {sizes.kv_elements}")


def _check_experts(folder: Path) -> None:
    """Checks that experts that are moved one by one give the logits of whole layers."""
    sizes = checkpoint_bytes(read_checkpoint(folder)).experts
    if sizes is None:
        return
    for dtype in (torch.float32, torch.bfloat16):
        logits = []
        for slots in (0, 3, 2 * sizes.count):
            model = ModelSpec(
                device=torch.device("cpu"),
                dtype=dtype,
                tiers="ssd",
                expert_bytes=slots * (sizes.largest + _SLOT_MORE_BYTES),
            ).open(read_checkpoint(folder))
            if slots:
                _check_expert_sizes(model, sizes)
            cache, words = model.new_state(), _words(np.random.default_rng(3), 40)
            found = [model.forward(PassRows.chain(words[:37], 0), cache, range(37))]
            for place in range(37, 40):
                rows = PassRows.chain([words[place]], place)
                found.append(model.forward(rows, cache, [0]))
            model.close()
            logits.append(torch.cat(found))
        if not all(torch.equal(each, logits[0]) for each in logits[1:]):
            raise NotConforming(f"experts one by one change the logits in {dtype}")


def _check_expert_sizes(model: StreamedModel, sizes: ExpertBytes) -> None:
    assert model.experts is not None
    files, width = model.experts.files, model.experts.width
    for layer, planned in enumerate(sizes.layers):
        keys = [layer * width + expert for expert in range(width)]
        stored = sum(files.tensor_bytes(key) for key in keys if key in files)
        if stored != planned:
            raise NotConforming(f"layer {layer} has experts of {stored} bytes, not {planned}")


def _check_two_bytes(own: PreTrainedModel, folder: Path) -> None:
    """Checks a pass in bfloat16.

    A rounding may change which experts are chosen, so the logits must only point the same way.
    """
    model = ModelSpec(device=torch.device("cpu"), dtype=torch.bfloat16, tiers="ssd").open(
        read_checkpoint(folder)
    )
    prompt = _words(np.random.default_rng(2), 30)
    with torch.no_grad():
        expected = own(input_ids=torch.tensor([prompt])).logits[0]
    found = model.forward(PassRows.chain(prompt, 0), model.new_state(), range(len(prompt)))
    model.close()
    possible = expected > RULED_OUT
    likeness = torch.cosine_similarity(found[possible], expected[possible], dim=0)
    if found.dtype != torch.float32 or not likeness > 0.5:
        raise NotConforming(f"logits in bfloat16 point elsewhere (cosine {float(likeness):.2f})")


def _check_texts(folder: Path) -> None:
    """Checks that texts with a draft model are those without one, token for token."""
    prompt = _words(np.random.default_rng(1), 20)
    target, draft = _open(folder / "target", "ram"), _open(folder / "draft", None)
    config = TreeConfig(budget=12, max_depth=4, batch=4)
    try:
        for sampling in (SamplingConfig(temperature=0.0), SamplingConfig(temperature=1.0, seed=5)):
            sampler = Sampler(sampling)
            plain = autoregressive(LocalTarget(target), sampler, prompt, 24, ())
            drafter = ModelDrafter(draft, sampler, config, target.vocab_size)
            drafted = specexec(LocalTarget(target), drafter, sampler, prompt, 24, ())
            texts = [[token for step in each for token in step.tokens] for each in (plain, drafted)]
            if texts[0] != texts[1]:
                raise NotConforming(f"drafting changes the text (T = {sampling.temperature})")
    finally:
        target.close()
        draft.close()


def _open(folder: Path, tier: Tier | None) -> StreamedModel:
    return ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=tier).open(
        read_checkpoint(folder)
    )


def _words(rng: np.random.Generator, count: int) -> list[int]:
    found: list[int] = rng.integers(WORDS.start, WORDS.stop, count).tolist()
    return found


def _tree(rng: np.random.Generator) -> DraftTree:
    """Two roots, siblings at every depth, and one path of four."""
    parents = np.array([-1, -1, 0, 0, 1, 2, 2, 5, 4])
    depths = np.array([1, 1, 2, 2, 2, 3, 3, 4, 3])
    return DraftTree(np.array(_words(rng, len(parents))), parents, depths, np.zeros(len(parents)))


@contextmanager
def _registered(model_type: str) -> Iterator[None]:
    """Has the type opened even if it is not in the table of types that run."""
    if model_type in ARCHITECTURES:
        yield
        return
    register(Architecture(model_type=model_type, title=model_type))
    try:
        yield
    finally:
        architectures._table.pop(model_type)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Makes chunks so small that their borders are within prompts and trees of a few rows."""
    before = pass_context.CHUNK_ROWS
    pass_context.CHUNK_ROWS = _CHUNK_ROWS
    try:
        yield
    finally:
        pass_context.CHUNK_ROWS = before
