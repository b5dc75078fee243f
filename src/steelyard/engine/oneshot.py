"""From a model and a recipe to a checkpoint, in one call.

    oneshot("path/to/model", recipe, dataset="calibration.jsonl", output_dir="quantized")

A recipe is planned first, and nothing heavy starts unless the plan holds. Then each block is
loaded, transformed, observed, solved and written; a recipe that needs no data goes file by file.
What was written is validated, and moved into place with its report.
"""

from __future__ import annotations

import contextlib

from steelyard.distributed import together
from steelyard.engine.job import Job, Leave
from steelyard.engine.result import Result
from steelyard.engine.run_options import Options

__all__ = ["quantize"]


@together
def quantize(options: Options, leave: Leave | None = None) -> Result:
    """Quantize a model.

    leave: called with the result and the folder that will be put in place, before it is
    """
    with contextlib.ExitStack() as undo:  # changes of a loaded module, after an error
        job = Job(options, undo)
        job.make_plan()
        if options.dry_run:
            return job.result
        job.load_data()
        with job.open_output():
            job.resume()
            job.solve_blocks()
            job.save_files()
            job.finish(leave)
        job.save_module(leave)
        return job.result
