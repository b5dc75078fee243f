"""The program `steelyard`: its commands, start and exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from steelyard.cli import (
    compare,
    demo,
    doctor,
    evaluate,
    inspect,
    ls,
    merge,
    observe,
    quantize,
    reproduce,
    sign,
    validate,
)
from steelyard.cli.interrupts import interruptible
from steelyard.cli.mistakes import FAILED, USAGE, Interrupted, explain, wants_traceback
from steelyard.cli.quiet import quiet
from steelyard.errors import nearest

__all__ = ["build", "run"]

COMMANDS = (
    quantize.quantize,
    inspect.inspect,
    compare.compare,
    evaluate.evaluate,
    validate.validate,
    doctor.doctor,
    reproduce.reproduce,
    sign.sign,
    observe.observe,
    merge.merge,
    ls.ls,
    demo.demo,
)
HELP = """Find the scales that store a language model in 4 or 8 bits, and write the checkpoint.

\b
Examples:
  steelyard demo
  steelyard quantize path/to/model -o model-W4A16 --scheme W4A16
  steelyard inspect model-W4A16

\b
Exit codes:
  0    done
  1    a checkpoint, the data or the run failed; the message says what to do
  2    the request is invalid; nothing was done
  3    the verdict on a checkpoint is below --require
  130  interrupted

Data goes to standard output, progress and messages to standard error. With --json, standard output
is one JSON document with the field "schema".
"""


class Group(TyperGroup):
    """The commands; suggests the nearest name for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            raise typer.BadParameter.__mro__[1](
                f"there is no command {args[0]!r}: {nearest(args[0], known)}", ctx
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would exit without a message
            raise Interrupted() from None


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"steelyard {version('steelyard')}")
        except PackageNotFoundError:  # a source tree on the path
            print("steelyard, not installed as a package")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback",
            help="Show the traceback of an error; also STEELYARD_TRACEBACK=1.",
        ),
    ] = False,
) -> None:
    quiet()


def build(rich: bool | None = None, whole: bool = True) -> typer.Typer:
    """Return the program.

    rich:  colours and frames in help; None for those on a terminal only
    whole: include the program's own help and completion, which no command needs and which take time
    """
    if rich is None:
        rich = sys.stdout.isatty() and not _completes()
    app = typer.Typer(
        name="steelyard",
        cls=Group,
        help=HELP,
        no_args_is_help=True,
        rich_markup_mode="rich" if rich else None,
        pretty_exceptions_enable=False,
        add_completion=whole,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(add_help_option=whole)(_options)
    for command in COMMANDS:
        app.command()(command)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; errors go to standard error."""
    with interruptible():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = wants_traceback(given)
    if not given and not _completes():
        given = ["--help"]
        code = USAGE
    else:
        code = 0
    named = bool(given) and not given[0].startswith("-")
    try:
        command = typer.main.get_command(build(whole=_completes() or not named))
        result = command.main(given, prog_name="steelyard", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return explain(error, show_traceback)
    except KeyboardInterrupt as error:
        return explain(error, show_traceback)
    return result if isinstance(result, int) and result else code


def _completes() -> bool:
    return "_STEELYARD_COMPLETE" in os.environ
