"""From a model and a recipe to a checkpoint, in one call.

    oneshot("path/to/model", recipe, dataset="calibration.jsonl", output_dir="quantized")

The plan comes first; nothing heavy starts if it has errors. Then each block is loaded, transformed,
observed, solved and written; a recipe that needs no data runs file by file. The checkpoint is
validated, and moved into place with its report.
"""

from __future__ import annotations

import contextlib
import functools

from steelyard.collector import passing_over
from steelyard.distributed import together
from steelyard.engine.oneshot_run import AddReport, OneshotRun
from steelyard.engine.out_of_memory import with_smaller_batches
from steelyard.engine.result import Result
from steelyard.engine.run_options import Options

__all__ = ["quantize"]


@together
def quantize(options: Options, add_report: AddReport | None = None) -> Result:
    """Quantize a model.

    add_report: called with the result and the folder, before the folder is moved into place
    """
    with passing_over():
        return with_smaller_batches(options, functools.partial(_quantize, add_report))


def _quantize(add_report: AddReport | None, options: Options, notes: list[str]) -> Result:
    with contextlib.ExitStack() as undo:  # restores a loaded module after an error
        run = OneshotRun(options, undo)
        run.make_plan()
        run.result.notes += notes
        if options.dry_run:
            return run.result
        run.load_data()
        with run.open_output():
            run.resume()
            run.solve_blocks()
            run.save_files()
            run.finish(add_report)
        run.save_module(add_report)
        return run.result
