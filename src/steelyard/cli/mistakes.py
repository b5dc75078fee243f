"""Turns an exception into one line and an exit code.

An invalid request exits with 2, before any work. A fault in a checkpoint or in data, or a failure
during the run, exits with 1. The package's messages name arguments of its Python functions; here
these become options of the command line.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from typing import Any

import typer

from steelyard import errors
from steelyard.cli.grouping import joined_lines
from steelyard.cli.rank_streams import rank
from steelyard.foreign import printable, reason_of

__all__ = [
    "ARGUMENTS",
    "FAILED",
    "INTERRUPTED",
    "USAGE",
    "WORDS",
    "Interrupted",
    "explain",
    "in_options",
    "wants_traceback",
]

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_LINE_END = "\n"

_INVALID = re.compile(r"Invalid value(?: for '?(.+?)'?)?: (.*)", re.DOTALL)
_USAGE = (
    errors.RecipeError,
    errors.PlanError,
    errors.PluginError,
    errors.OptionError,
    errors.UnknownNameError,
)
_EXPECTED = (ValueError, RuntimeError)  # from libraries; KeyError and the like are our defects

WORDS = {
    "overwrite=True": "--overwrite",
    "resume=False": "--no-resume",
    'uncalibrated="weights-only"': "--uncalibrated weights-only",
    'uncalibratable="dynamic"': "--uncalibratable dynamic",
    'pipeline="datafree"': "--pipeline datafree",
    'pipeline="basic"': "--pipeline basic",
    "pass dataset=": "give --data",
    "pass tokenizer=": "give --tokenizer",
    "pass processor=": "give --tokenizer",
    "tokenizer=, or token ids as the dataset": "--tokenizer with the folder of one",
    "trust_remote_code_model=True": "--trust-remote-code",
    "save_statistics=": "observe",
    "statistics=": "--statistics",
    "add them to ignore": "name them with --ignore",
    "' in ignore matches": "' of --ignore matches",
    "group_size=": "--group-size ",
    "to measure max_kl": "to measure --max-kl",
    "give bits instead": "give --bits instead",
    "such as num_bits: 3": "such as --num-bits 3",
    "allow bit_widths 16": "allow it with --bit-widths 4,8,16",
    "wider bit_widths": "wider --bit-widths",
}
"""Words of the package's messages -> words for the command line."""

ARGUMENTS = {
    "text_column": "--text-column",
    "max_seq_length": "--max-seq-length",
    "batch_size": "--batch-size",
    "num_calibration_samples": "--samples",
    "num_samples": "--samples",
    "output_dir": "--output",
    "device": "--device",
    "activations": "--activations",
    "splits": "--split",
    "split": "--split",
}
"""Arguments of the Python functions, wherever a message has `name=` or `name=value`."""
_ARGUMENT = re.compile(rf"\b({'|'.join(ARGUMENTS)})=(?=(\S)?)")
_NAME = re.compile(rf"\b({'|'.join(name for name in ARGUMENTS if '_' in name)})\b")


class Interrupted(Exception):
    """The user stopped a run; the message says how to proceed."""


def wants_traceback(arguments: list[str]) -> bool:
    """Whether a traceback is requested, by option or environment; removes the option."""
    set_to = os.environ.get("STEELYARD_TRACEBACK", "").strip().lower()
    asked = set_to not in ("", "0", "false", "no", "off")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--traceback" in arguments[:end]:
        arguments.remove("--traceback")
        asked = True
    return asked


def explain(error: BaseException, show_traceback: bool = False) -> int:
    """Print an error to standard error and return the exit code."""
    code, message = _classify(error)
    if getattr(error, "silent", False):  # another rank reports it
        return code
    if show_traceback or message is None:
        lines = "".join(traceback.format_exception(error))
        print(printable(lines, keep="\n"), end="", file=sys.stderr)
    who = f"error (rank {rank()})" if rank() else "error"
    if message is None:
        message = (
            f"{type(error).__name__}: {reason_of(Exception(*error.args))}. This is a defect of "
            "Steelyard; please report it with the lines above"
        )
    sys.stdout.flush()
    print(f"{who}: {printable(message, keep=_LINE_END)}", file=sys.stderr)
    return code


def _classify(error: BaseException) -> tuple[int, str | None]:
    """Return the exit code and the message; None for a defect of the package."""
    if isinstance(error, (Interrupted, KeyboardInterrupt, typer.Abort)):
        return INTERRUPTED, f"interrupted{f'; {error}' if str(error) else ''}"
    if isinstance(error, errors.SteelyardError):
        message = in_options(str(error))
        listed = "\n  - " in message
        whole = message if listed else " ".join(message.split())
        return USAGE if isinstance(error, _USAGE) else FAILED, whole
    if isinstance(error, OSError):
        return FAILED, _system(error)
    if isinstance(error, MemoryError):
        return FAILED, "out of memory; use a machine with more"
    if isinstance(error, ImportError):
        missing = (error.name or str(error)).split(".")[0]
        return FAILED, f"{missing} cannot be imported ({reason_of(error)}); pip install {missing}"
    usage = typer.BadParameter.__mro__[1]  # click's, wherever this typer has it from
    if isinstance(error, usage):
        return USAGE, _usage(error)
    if isinstance(error, _EXPECTED):
        return FAILED, f"{reason_of(error)} (--traceback shows where)"
    return FAILED, None


def in_options(message: str) -> str:
    """Return a message with the options of the command line, and similar lines joined."""
    for python, option in WORDS.items():
        message = message.replace(python, option)
    message = _ARGUMENT.sub(lambda m: ARGUMENTS[m[1]] + (" " if m[2] else ""), message)
    message = _NAME.sub(lambda m: ARGUMENTS[m[1]], message)
    return joined_lines(message)


def _system(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}the disk is full; make room and run the same command again"
    if isinstance(error, FileNotFoundError):
        return f"{where}there is no such file or folder; check the spelling"
    if isinstance(error, PermissionError):
        return f"{where}permission denied; change its mode, or choose another path"
    return f"{where}{error.strerror or error}"


def _usage(error: Any) -> str:
    """Return a usage error with the nearest known name and the command that shows help."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "steelyard"
    option = getattr(error, "option_name", None)
    if option is not None and context is not None:
        known = [o for p in context.command.params for o in (*p.opts, *p.secondary_opts)]
        known = [o for o in known if o.startswith("--")]
        known += ["--help", "--traceback"]
        said = str(error.format_message()).lower()
        if "no such option" in said:
            return f"there is no option {option}: {errors.nearest(option, known)} ({path} --help)"
    found = _INVALID.fullmatch(error.format_message().strip())
    where, message = found.groups() if found else (None, error.format_message().strip())
    if where is not None and not message[:1].islower():  # click's words, not ours
        message = f"{where}: {message}"
    elif where is None:
        message = message[:1].lower() + message[1:]
    return f"{message.rstrip('.')} ({path} --help)"
