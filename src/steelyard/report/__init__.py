"""Reports of runs, as JSON and as a page.

Every run writes `report.json` and `report.html` beside its checkpoint. Both hold the same data: the
page embeds the JSON and loads nothing from the network.

    report = Report.of(result)                     # from a run
    report = Report.from_json(path.read_text())    # from a file; refuses an unknown version
    report.to_json(), report.to_html()
    write_report(result, folder)                   # both files
    add_evaluation(folder, {"perplexity": 8.1, "base_perplexity": 7.9, "kl_divergence": 0.02})
    add_study(folder, study(base, folder, data))   # with the verdict, tokens and blocks

An evaluation is a flat mapping of names to numbers. The page has labels for `tokens`,
`base_perplexity`, `perplexity`, `kl_divergence` and `top1_agreement`, and shows others under their
names. Infinities and NaN, which JSON cannot hold, are stored as text.

A report without a run compares several ways to quantize one model:

    rows = [ComparisonRow(scheme="W4A16", observer="optimal", bytes=12_000_000, error=3.1e-3,
                          layers=[2.9e-3, 3.2e-3], evaluation={"perplexity": 8.1})]
    write_files(Report(title="stories15m", comparison=rows), folder)

Every section but the version is optional, and the page shows those that are present. Errors are
relative squared errors: the sum of squared errors over the weight's sum of squares. `decibels`
turns them into signal-to-noise ratios.
"""

from steelyard.report.report import SCHEMA_VERSION, Report
from steelyard.report.report_files import (
    add_evaluation,
    add_study,
    read_report,
    report_at,
    write_files,
    write_report,
)
from steelyard.report.sections import (
    CheckpointRow,
    ComparisonRow,
    ModuleReport,
    SchemeUse,
    SkippedWeight,
    Summary,
    decibels,
)

__all__ = [
    "SCHEMA_VERSION",
    "CheckpointRow",
    "ComparisonRow",
    "ModuleReport",
    "Report",
    "SchemeUse",
    "SkippedWeight",
    "Summary",
    "add_evaluation",
    "add_study",
    "decibels",
    "read_report",
    "report_at",
    "write_files",
    "write_report",
]
