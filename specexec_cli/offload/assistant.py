"""Gemma 4's assistants, as checkpoints that draft for a target from its own keys and values.

An assistant is a Gemma 4 of a few layers without keys and values. Each layer attends to those that
the target keeps of one of its layers: the last of the same kind that has any. Its input is a linear
of two rows, the target's embedding of a token and the hidden row behind the token before; another
linear makes the row to go on from. While it drafts it stays at the position of the last committed
token, so a draft node knows of its ancestors by that row alone.

Some have centroids as well, by which transformers' code picks the part of the output head that it
reads. Here the whole head is read, which gives the same logits to the tokens of that part.

Source: `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator` of
transformers; published as google/gemma-4-*-it-assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specexec_cli.catalog.architectures import known_config, text_config
from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import INPUT, Checkpoint, TrainedHead

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_OF_TARGETS = ("gemma4_text", "gemma4_unified_text")
_NOT_READ = ("masked_embedding.",)  # the centroids
# of a layer, where a file has them: no layer has keys and values of its own
_NO_KEYS = (".k_proj.weight", ".v_proj.weight", ".k_norm.weight")
_PROJECTIONS = ("pre_projection.weight", "post_projection.weight")
_MOST_LAYERS = 2_000  # no model has more
_TABLE = "model.embed_tokens.weight"  # which is the output head too
# what a config must say of keys and tokens as its target's does, where both say it
_ALIKE = (
    "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads",
    "vocab_size",
)  # fmt: skip


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an assistant."""
    return config.get("model_type") in _TYPES


def assistant_head(said: Mapping[str, Any], target: Mapping[str, Any], place: str) -> TrainedHead:
    """What makes an assistant a head of its target.

    Args:
        said, target: their config.json.
        place: of the assistant's, for messages.
    Raises:
        CheckpointError: it is an assistant of another model.
    """
    own, text = known_config(said).get("text_config"), text_config(target)
    if not isinstance(own, Mapping):
        raise CheckpointError(
            f"{place}: the config of an assistant says nothing as 'text_config': download it again"
        )
    if text.get("model_type") not in _OF_TARGETS:
        raise CheckpointError(
            f"{place}: an assistant of Gemma 4, and the target is of type "
            f"{text.get('model_type')!r:.60}. Is it of another model?"
        )
    hidden = text.get("hidden_size")
    if said.get("backbone_hidden_size") != hidden:
        raise CheckpointError(
            f"{place}: the assistant reads rows of {said.get('backbone_hidden_size')!r:.60} "
            f"numbers, and its target's have {hidden}. Is it of another model?"
        )
    for key in _ALIKE:
        known = own.get(key), text.get(key)
        if None not in known and known[0] != known[1]:
            raise CheckpointError(
                f"{place}: the assistant's config says {known[0]!r:.60} as '{key}', and its "
                f"target's {known[1]!r:.60}. Is it of another model?"
            )
    packing = {key: said[key] for key in ("quantization_config",) if key in said}
    config = {
        **own, **packing, "num_kv_shared_layers": 0, "tie_word_embeddings": False,
        "final_logit_softcapping": None,  # transformers' class has none, whatever a config says
    }  # fmt: skip
    return TrainedHead(config, keys=_keys(own, text, place))


def _keys(own: Mapping[str, Any], text: Mapping[str, Any], place: str) -> dict[str, int]:
    """For each kind of layer that an assistant has, the target's layer whose keys it attends to.

    Raises:
        CheckpointError: the target has no such layer, or a config does not list its layers.
    """
    kinds, wanted = (_layer_types(each, place) for each in (text, own))
    shared = text.get("num_kv_shared_layers") or 0
    writes = kinds[: max(0, len(kinds) - shared)] if type(shared) is int else kinds
    lacking = [kind for kind in wanted if kind not in writes]
    if lacking:
        raise CheckpointError(
            f"{place}: the assistant attends to keys of '{lacking[0]!s:.60}', which its target "
            "does not keep. Is it of another model?"
        )
    return {kind: len(writes) - 1 - writes[::-1].index(kind) for kind in sorted(set(wanted))}


def _layer_types(text: Mapping[str, Any], place: str) -> list[Any]:
    """The kinds of a Gemma 4's layers; every sixth, and the last, attends in full where the config
    does not list them (as in `Gemma4TextConfig` of transformers).

    Raises:
        CheckpointError: the config says neither how many layers there are nor of which kinds.
    """
    found, count = text.get("layer_types"), text.get("num_hidden_layers")
    if found is None and type(count) is int and 0 < count <= _MOST_LAYERS:
        full = {*range(5, count, 6), count - 1}
        return ["full_attention" if n in full else "sliding_attention" for n in range(count)]
    if not isinstance(found, list) or not found:
        raise CheckpointError(
            f"{place}: an assistant attends to its target's layers by their kinds, and a config "
            f"says {found!r:.60} as 'layer_types': download the files again"
        )
    return found


def assistant_checkpoint(head: Checkpoint, target: Mapping[str, Any]) -> Checkpoint:
    """A published assistant as a checkpoint of layers without keys and values.

    Args:
        target: config.json of the model that it drafts for.
    Raises:
        CheckpointError: tensors that its config promises are absent or of another shape, or it is
            of another target.
    """
    place = str(head.config_path)
    found = assistant_head(head.config, target, place)
    for name in (*_PROJECTIONS, _TABLE):
        if name not in head:
            raise CheckpointError(
                f"{place} is that of an assistant, but its files hold no tensor '{name}': "
                "download them again"
            )
    # the width of the rows it reads, by which its other projection is built and checked
    shape = head["post_projection.weight"].shape
    said = head.config.get("backbone_hidden_size"), found.config.get("hidden_size")
    packed = head["post_projection.weight"].dtype == "U8"  # rows are bytes, checked when built
    if (shape[:1] != said[:1]) if packed else (shape != said):
        raise CheckpointError(
            f"{place} promises a 'post_projection.weight' of shape {said!r:.60}, but its files "
            f"hold one of shape {shape!r:.60}: download them again"
        )
    places = {_TABLE: "lm_head.weight"}
    places |= {name: f"model.{INPUT}.{name}" for name in _PROJECTIONS}
    return head.as_head(found, {
        name: places.get(name, name)
        for name in head
        if not name.startswith((*_NOT_READ, "lm_head.")) and not name.endswith(_NO_KEYS)
    })  # fmt: skip
