"""Entry point of `specexec`: the commands, and errors as one line with an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from specexec_cli import __version__
from specexec_cli.cli.registry import CommandGroup
from specexec_cli.errors import CLOSED_PIPE_EXIT_CODE, ConfigError, SpecexecError

# error numbers of an output that cannot be written any further
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# the base class of all mistakes on the command line; typer does not export it
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="specexec",
    cls=CommandGroup,
    help="Run language models far bigger than your GPU or RAM, without changing their output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"specexec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    try:
        Path.home()
    except RuntimeError:  # no HOME, and a user id without an entry, as in some containers
        raise ConfigError("this user has no home folder: set HOME to one it may write to") from None


def main() -> None:
    """Runs the command line; a SpecexecError or a wrong option gives one line and its exit code.

    If the output's reader leaves early, as in `| head`, the program ends quietly. An output that
    cannot be written, such as a file on a full disk, gives one line of error.
    """
    # these libraries' warnings are for programmers, who can set the variables themselves
    # torch reads it when it is imported, and warns who asks for cuBLASLt later: see prepare_cuda
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    wait_briefly()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that an encoding like ASCII lacks
    try:
        code = _run()
        _flush()  # here, because Python reports a closed pipe in its own way when it exits
    except (BrokenPipeError, SystemExit) as error:
        if not _is_closed_pipe(error):
            raise
        _discard_unwritten()
        code = CLOSED_PIPE_EXIT_CODE
    except OSError as error:
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        _discard_unwritten()
        code = ConfigError.exit_code
        with contextlib.suppress(OSError):  # stderr may be the same full file
            print(
                f"error: the output cannot be written ({error.strerror}): write it elsewhere",
                file=sys.stderr,
            )
    sys.exit(code)


def wait_briefly() -> None:
    """Makes threads that wait for an operation's last threads give up their cores soon.

    By default libgomp's threads check 300,000 times, which takes milliseconds. Beside other
    programs the threads that they wait for get no core in that time, hundreds of times a pass.
    libgomp reads the variable when torch loads it. A wait policy that the user has set is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _run() -> int:
    try:
        code = app(standalone_mode=False)
    except SpecexecError as error:
        print(f"error: {_with_mend(error)}", file=sys.stderr)
        code = error.exit_code
    except _UsageError as error:
        code = error.exit_code
        message = error.format_message().rstrip(".") + _refused_words(error)
        if message:  # empty if there were no arguments: the help has been printed then
            command = error.ctx.command_path if error.ctx is not None else "specexec"
            message += "" if message.endswith("?") else "."
            from specexec_cli.cli.newcomers import meant_command

            mend = meant_command(error, sys.argv[1:]) or f" See {command} --help"
            print(f"error: {message}{mend}", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _with_mend(error: SpecexecError) -> str:
    from specexec_cli.cli.mends import with_mend

    group: Any = get_command(app)
    list(group.commands.values())  # made, so that the options of all commands are known
    return with_mend(error)


def _refused_words(error: BaseException) -> str:
    """The refused values, for messages that lack them: those of pydantic, in typer from 0.29 on."""
    told: list[dict[str, object]] = getattr(error.__cause__, "errors", list)()
    return "".join(f", not {each['input']!r}" for each in told)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if it was closed before the program began
            stream.flush()


def _is_closed_pipe(error: BaseException | None) -> bool:
    """Whether a closed pipe caused the error: typer and rich raise SystemExit(1) for one."""
    while error is not None and not isinstance(error, BrokenPipeError):
        error = error.__context__
    return error is not None


def _discard_unwritten() -> None:
    """Discards unwritten output, so that Python does not try to write it again when it exits.

    Source: the note on SIGPIPE in the documentation of Python's signal module.
    """
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


if __name__ == "__main__":
    main()
