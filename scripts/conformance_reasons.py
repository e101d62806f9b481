"""Says in a sentence why a model type does not run.

A cause that many types share is recognised by the class names of their modules, or by the error
that was raised. The causes of single types were found by reading transformers' modelling code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# (pattern for the class names of a model's modules, the reason)
_KINDS = [
    (
        r"Mamba|DeltaNet|DeltaAttention|ShortConv|Lightning|LinearAttention|Rwkv|LSTM|RgLru"
        r"|Recurrent|SSM|Retention|KimiDelta|SConv|Conv1d|HybridConv",
        "recurrent or convolutional layers of a kind that is not computed here",
    ),
    (
        r"Indexer|(?<!Sequence)Compressor|HashAttention",
        "attention that picks the earlier tokens it sees by an index of its own, which is not "
        "computed here",
    ),
    (
        r"TextCrossAttention|GatedCrossAttention|SequenceAlignerCrossAttention",
        "layers of text that attend to what was seen, which is not read here",
    ),
]
_ENCODERS = (
    "^(?!modern).*bert|electra|ernie$|roformer|data2vec|big_bird|megatron|roc_bert|xmod|reformer"
    "|xlm|xlnet"
)
BOTH_HALVES = "an encoder and a decoder, or one half of the two: a decoder alone runs"
_BOTH_WAYS = (
    "reads text in both directions, as encoders do: what it made of a token changes with the "
    "tokens behind it"
)
_ABOUT_PICTURES = "writes text about a picture only, and pictures are not read here"
_DRAFT_HEAD = "drafts for a Gemma 4 from the keys and values of that model, and is none alone"
# The reasons of single types
_OWN = {
    "bloom": "biases attention by distance (ALiBi) in place of positions, for which there is no "
    "kernel here",
    "mpt": "biases attention by distance (ALiBi) in place of positions, for which there is no "
    "kernel here",
    "blip": _ABOUT_PICTURES,
    "blt": "reads bytes in patches by three models one behind another, where one list of decoder "
    "layers is run here",
    "cpmant": "biases attention by a table of distances and segments, and puts learned tokens "
    "before every text, neither of which is done here",
    "diffusion_gemma": "writes blocks of text by denoising them, not token by token",
    "doge": "adds to each score a number that the layer computes from the values it attends to, "
    "where a mask only hides tokens here",
    "ernie4_5_vl_moe": "numbers the experts for text and those for pictures together in its "
    "checkpoint, which are not told apart here",
    "gemma4_assistant": _DRAFT_HEAD,
    "gemma4_unified_assistant": _DRAFT_HEAD,
    "gpt_neo": "cuts its local windows by slots of the cache, where the siblings of a draft tree "
    "lie side by side",
    "hrm_text": "runs two stacks of layers several times over for each token, where one list of "
    "decoder layers is run once here",
    "kosmos-2.5": "counts positions from behind the number of its padding token, not from 0",
    "longcat_flash": "attends twice in each layer, with two entries in the cache, where a layer "
    "has one here",
    "molmo2": "keeps its table of tokens in two tensors, which are not put together here",
    "moshi": "writes speech beside text, in several streams of codes at once",
    "openai-gpt": "keeps no keys and values: transformers computes the whole text anew for each "
    "token",
    "paligemma": "reads its prompt in both directions and writes in one, for which there is no "
    "mask here",
    "pi0": "moves a robot, and writes no text",
    "shieldgemma2": "answers yes or no about a picture, and writes no text",
    "unlimited_ocr": "has a window that slides over its answer while the picture stays in sight "
    "(reference_sliding_attention), for which there is no mask here",
}
# (pattern for the error that trying the type raised, the reason)
_RAISED = [
    (r"pixel_values|image_embeds|missing \d required positional", _ABOUT_PICTURES),
    (r"do not depend on the text", _ABOUT_PICTURES),
    (
        r"timm",
        "its part that sees wants the library timm, without which transformers builds no part of "
        "it; pictures are not read here",
    ),
    (r"Strict\w*ValidationError", "no small model of it could be made to be tried"),
    (r"no list of \d+ decoder layers", "its decoder layers were not found in one list"),
]


def by_name(model_type: str) -> str | None:
    """The reason for a type that is known by name; None for others."""
    if model_type in _OWN:
        return _OWN[model_type]
    return _BOTH_WAYS if re.search(_ENCODERS, model_type) else None


def by_error(raised: str) -> str:
    """The reason for the error that trying a type raised, in one line."""
    if any(raised.startswith(meaning) for _, meaning in _KINDS):
        return raised  # of what real models have, and the tiny one has not
    meant = next((meaning for pattern, meaning in _RAISED if re.search(pattern, raised)), None)
    return meant or f"fails when it is tried: {raised}"


def kind_among(class_names: Iterable[str]) -> str | None:
    """The reason for the first class that specexec cannot run, with its name; None if there is
    none."""
    for name in class_names:
        for pattern, meaning in _KINDS:
            if re.search(pattern, name) and not re.search("Vision|Audio|Speech|Resampler", name):
                return f"{meaning} ({name})"
    return None
