"""From a model and a recipe to a checkpoint, in one call.

    oneshot("path/to/model", recipe, dataset="calibration.jsonl", output_dir="quantized")

A recipe is planned first, and nothing heavy starts unless the plan holds. Then each block is
loaded, transformed, observed, solved and written; a recipe that needs no data goes file by file.
What was written is validated, and moved into place with its report.
"""

from __future__ import annotations

import contextlib

from steelyard.distributed import together
from steelyard.engine.oneshot_run import Leave, OneshotRun
from steelyard.engine.result import Result
from steelyard.engine.run_options import Options

__all__ = ["quantize"]


@together
def quantize(options: Options, leave: Leave | None = None) -> Result:
    """Quantize a model.

    leave: called with the result and the folder that will be put in place, before it is
    """
    with contextlib.ExitStack() as undo:  # changes of a loaded module, after an error
        run = OneshotRun(options, undo)
        run.make_plan()
        if options.dry_run:
            return run.result
        run.load_data()
        with run.open_output():
            run.resume()
            run.solve_blocks()
            run.save_files()
            run.finish(leave)
        run.save_module(leave)
        return run.result
