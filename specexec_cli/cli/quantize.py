"""`specexec quantize`: writes a low-bit copy of a checkpoint, which may be larger than memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specexec_cli.catalog.downloads import missing, survey
from specexec_cli.catalog.hub import fetch
from specexec_cli.catalog.registry import load_registry
from specexec_cli.cli import option_groups, options
from specexec_cli.cli.complete import model_names
from specexec_cli.cli.fetching import agree, fetch_all
from specexec_cli.cli.live import PassingLine
from specexec_cli.cli.render import LoadingBar
from specexec_cli.device import format_bytes
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, CheckpointError, ConfigError

if TYPE_CHECKING:
    from specexec_cli.models.quantize import QuantizationPlan

_BITS = (2, 3, 4, 8)
_NO_TEXT = "none"  # the value of --calibration for no text; a file of this name is ./none


def quantize(
    target: Annotated[
        str,
        typer.Argument(
            help="A name of models.toml, a folder, or a hub id: org/name or org/name@revision.",
            autocompletion=model_names,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the copy.")],
    bits: Annotated[int, typer.Option(help="2, 3, 4 or 8.")] = 4,
    group_size: Annotated[
        int, typer.Option(min=8, help="Inputs that share a scale and a zero point.")
    ] = 64,
    calibration: Annotated[
        str,
        typer.Option(
            metavar="FILE|none",
            help="Text for GPTQ, in place of Python's standard library; none: without a text.",
        ),
    ] = "",
    models_file: option_groups.ModelsFile = None,
    offline: option_groups.Offline = False,
    yes: options.Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a quantized copy of a checkpoint, in the format of GPTQModel (gptq_v2).

    Layer by layer, so that a model need not fit into memory, and so that errors on a text stay low
    (GPTQ). The folder appears when it is whole.
    """
    if bits not in _BITS:
        raise ConfigError(f"--bits {bits} is not one of {', '.join(map(str, _BITS))}")
    if out.exists():
        raise ConfigError(f"{out} exists: give another folder, or remove it first")
    entry = load_registry(models_file).resolve(target)
    downloads = [] if offline else [survey(each) for each in missing([entry])]
    if downloads:
        agree(downloads, "", yes=yes, quiet=quiet)
        fetch_all(downloads, quiet=quiet)
    folder = fetch(entry, offline=offline)

    with PassingLine(f"reading {target}", shown=not quiet):
        from specexec_cli.models.quantize import plan_quantization
        from specexec_cli.offload.store import read_checkpoint

        try:
            plan = plan_quantization(read_checkpoint(folder), bits, group_size)
        except ConfigError as error:
            mend = "choose other --bits, or a --group-size that suits"
            raise ConfigError(f"{error}: {mend}") from error
        pieces = _pieces(folder, calibration)
    _write(plan, out, pieces, quiet)
    if not quiet:
        sizes = format_bytes(plan.source.total_bytes), format_bytes(plan.n_bytes)
        print(
            f"{out}: {len(plan.linears)} linears in {bits} bits, {sizes[0]} -> {sizes[1]}",
            file=sys.stderr,
        )


def _write(plan: QuantizationPlan, out: Path, pieces: list[list[int]], quiet: bool) -> None:
    """Writes the copy and shows a bar; stopped by Ctrl-C, it leaves nothing behind."""
    from specexec_cli.models.quantize import write_quantized

    bar = LoadingBar(shown=not quiet, title="quantizing")
    try:
        write_quantized(plan, out, bar, pieces=pieces)
    except KeyboardInterrupt:
        bar.close()
        if not quiet:
            print("stopped: nothing was kept", file=sys.stderr)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    finally:
        bar.close()


def _pieces(folder: Path, calibration: str) -> list[list[int]]:
    """The calibration text's pieces, as tokens; empty if only the weights are fitted.

    Raises:
        CheckpointError: the model's tokenizer is missing or cannot be read.
        ConfigError: the text cannot be read or is too short.
    """
    from specexec_cli.models.calibration_text import calibration_pieces, standard_pieces
    from specexec_cli.models.tokenizer import load_tokenizer

    if calibration == _NO_TEXT:
        return []
    try:
        if calibration:
            return calibration_pieces(folder, Path(calibration))
        pieces = standard_pieces(load_tokenizer(folder))
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read, which a calibration text needs: copy the "
            "original model's, or fit to the weights alone, --calibration none"
        ) from error
    if not pieces:
        raise ConfigError(
            "Python's standard library is not installed as text files here: give another text, "
            "--calibration FILE, or none, --calibration none"
        )
    return pieces
