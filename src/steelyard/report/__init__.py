"""What a run did, for a program to read and for a person to look at.

Every run leaves `report.json` and `report.html` beside its checkpoint. Both hold the same: the page
carries the JSON in itself and asks no network for anything.

    report = Report.of(result)                     # of a run
    report = Report.from_json(path.read_text())    # of a file; an unknown version is refused
    report.to_json(), report.to_html()
    write_report(result, folder)                   # both files
    add_evaluation(folder, {"perplexity": 8.1, "base_perplexity": 7.9, "kl_divergence": 0.02})

An evaluation is a flat mapping of names to numbers. The page has words of its own for `tokens`,
`base_perplexity`, `perplexity`, `kl_divergence` and `top1_agreement`, and shows any others as they
are named. What JSON has no number for (a perplexity that is infinite) is kept as text.

Several ways to quantize one model are compared in a report that needs no run:

    rows = [ComparisonRow(scheme="W4A16", observer="optimal", bytes=12_000_000, error=3.1e-3,
                          layers=[2.9e-3, 3.2e-3], evaluation={"perplexity": 8.1})]
    write_files(Report(title="stories15m", comparison=rows), folder)

Every section but the version may be left out, and the page shows those that are there. Errors are
squared: that of a weight over the weight's sum of squares. `decibels` makes a ratio of signal to
noise of them.
"""

from steelyard.report.report import SCHEMA_VERSION, Report
from steelyard.report.report_files import (
    add_evaluation,
    read_report,
    report_at,
    write_files,
    write_report,
)
from steelyard.report.sections import (
    ComparisonRow,
    LeftOut,
    ModuleReport,
    SchemeUse,
    Summary,
    decibels,
)

__all__ = [
    "SCHEMA_VERSION",
    "ComparisonRow",
    "LeftOut",
    "ModuleReport",
    "Report",
    "SchemeUse",
    "Summary",
    "add_evaluation",
    "decibels",
    "read_report",
    "report_at",
    "write_files",
    "write_report",
]
