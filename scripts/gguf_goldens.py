"""Writes the files that llama.cpp's own converter makes of small models, for the tests.

    python scripts/gguf_goldens.py LLAMA_CPP [NAME ...]

Beside them it writes which architecture the converter gives each type that runs here, and the names
of all pre-tokenizers: tests/goldens/llama_cpp.json.

LLAMA_CPP is a checkout of llama.cpp, or its folder in the source archive of llama-cpp-python, which
has all of it. The converter runs as it is, but for the vocabulary: a model so small has none, and
gets as many tokens as it has embeddings. Given names, only these files are made anew.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
import assistant_toys  # noqa: E402
from conformance_configs import VOCAB  # noqa: E402
from gguf_toys import GOLDENS, TOYS, goldens, save_toy, write_goldens  # noqa: E402
from mtp_toys import CONVERTED, save_converted  # noqa: E402

from specexec_cli.catalog.conforming import RUNS  # noqa: E402
from specexec_cli.planning.built_sizes import text_model_class  # noqa: E402


def set_vocab(model: Any) -> None:
    """Takes the place of the converter's method: tokens without text, of which two end a text."""
    count = model.hparams["vocab_size"]
    writer = model.gguf_writer
    words = [chr(0x100 + n) for n in range(count - 2)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, "<s>", "</s>"])
    writer.add_token_types([1] * len(words) + [3, 3])
    writer.add_token_merges([f"{words[0]} {words[1]}"])
    writer.add_bos_token_id(count - 2)
    writer.add_eos_token_id(count - 1)
    writer.add_add_bos_token(False)


def convert(folder: Path, path: Path, said: Mapping[str, Any], mtp: bool = False) -> None:
    """One GGUF file in float32 of a folder of safetensors, by llama.cpp's converter.

    Args:
        said: values of published configs that transformers' newest config classes leave out.
        mtp: whether the layer that predicts further tokens is converted too.
    """
    import conversion
    import gguf
    import torch

    hparams = conversion.ModelBase.load_hparams(folder, False)
    hparams = {**hparams, **hparams.pop("text_config", {}), "model_type": hparams["model_type"],
               "architectures": hparams["architectures"], **said}  # fmt: skip
    if "text_config" in hparams:  # which the converter lays over the others
        hparams["text_config"] = {**hparams["text_config"], **said}
    hparams = {key: value for key, value in hparams.items() if said.get(key, value) is not None}
    name = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    kind = conversion.get_model_class(name)
    of_mistral = "Mistral4Model" if hparams["model_type"] == "mistral4" else "Ministral3Model"
    kind = getattr(kind, of_mistral, kind)  # to which the class of Mistral 3 hands all over
    changes = {"set_vocab": set_vocab, "model_arch": kind.model_arch, "no_mtp": not mtp}
    own = type(kind.__name__, (kind,), changes)
    with torch.inference_mode():
        model = own(folder, gguf.LlamaFileType.ALL_F32, path, hparams=hparams)
        model.write()


def _as_published(path: Path) -> None:
    """Renames the MLPs of Kimi-Linear's first layers, which transformers saves as mixtures."""
    from safetensors.torch import load_file, save_file

    mlp = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
    save_file({mlp.sub("mlp", name): tensor for name, tensor in load_file(path).items()}, path)


def written(name: str) -> bytes:
    """The GGUF file of a toy."""
    of_mtp = next((kind for kind, own in CONVERTED.items() if own == name), None)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "model")
        if of_mtp is not None:
            toy = save_converted(of_mtp, folder)
        elif name == assistant_toys.CONVERTED:
            assistant_toys.save_converted(folder)
            toy = TOYS["gemma4_text"]
        else:
            toy = TOYS[name]
            save_toy(toy, folder)
            _as_published(folder / "model.safetensors")
        # Gemma's embeddings are cut to as many rows as there are tokens here
        words = {str(n): n for n in range(VOCAB)}
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": words}, "added_tokens": []})
        )
        convert(folder, Path(made, "model.gguf"), toy.said, of_mtp is not None)
        return Path(made, "model.gguf").read_bytes()


def names_of(llama_cpp: Path) -> dict[str, Any]:
    """The architecture of GGUF files for each type that runs here, and pre-tokenizers' names."""
    import conversion
    import gguf
    from transformers import CONFIG_MAPPING

    converted = {}
    for model_type in RUNS:
        name = text_model_class(CONFIG_MAPPING[model_type]()).__name__
        if name in conversion.TEXT_MODEL_MAP:
            kind = conversion.get_model_class(name)
            converted[model_type] = gguf.MODEL_ARCH_NAMES[kind.model_arch]
    source = (llama_cpp / "src" / "llama-vocab.cpp").read_text("utf-8")
    splits = sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', source)))
    return {"architectures": converted, "pre_tokenizers": splits}


def main() -> None:
    llama_cpp, *names = sys.argv[1:]
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    logging.disable(logging.WARNING)
    found = json.dumps(names_of(Path(llama_cpp)), indent=1) + "\n"
    (GOLDENS.parent / "llama_cpp.json").write_text(found)
    files = dict(goldens()) if names else {}
    for name in names or [*TOYS, *CONVERTED.values(), assistant_toys.CONVERTED]:
        files[f"{name}.gguf"] = written(name)
    write_goldens(files)


if __name__ == "__main__":
    main()
