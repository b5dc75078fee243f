"""The logger of llm-compressor's scripts: `from steelyard import logger, configure_logger`.

Messages go to Python's logger "steelyard". The package itself prints plan and progress, and logs
nothing. `from steelyard import logger` may be this module, so it has the methods of the logger.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["LoggerConfig", "configure_logger", "logger"]

_LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "success": 25,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


@dataclass
class LoggerConfig:
    """What to log where.

    metrics_disabled, rank: no effect
    """

    disabled: bool = False
    console_log_level: str | None = "INFO"
    log_file: str | None = None
    log_file_level: str | None = None
    metrics_disabled: bool = False
    rank: int | None = None


class ScriptLogger:
    """Logs as loguru's logger does: braces in a message stand for further arguments."""

    def __getattr__(self, name: str) -> Any:
        if name not in _LEVELS:
            raise AttributeError(
                f"the logger has {', '.join(_LEVELS)}, not {name!r}; configure "
                'logging.getLogger("steelyard") for more'
            )

        def log(message: Any, *args: Any, **values: Any) -> None:
            text = str(message).format(*args, **values) if args or values else str(message)
            logging.getLogger("steelyard").log(_LEVELS[name], text)

        return log


logger = ScriptLogger()


def configure_logger(logger_config: LoggerConfig | None = None) -> None:
    """Log to the terminal and to a file, instead of where earlier calls said."""
    config = logger_config or LoggerConfig()
    target = logging.getLogger("steelyard")
    for handler in list(target.handlers):
        target.removeHandler(handler)
        handler.close()
    target.disabled = config.disabled
    handlers: list[tuple[logging.Handler, str]] = []
    if config.console_log_level:
        handlers.append((logging.StreamHandler(sys.stderr), config.console_log_level))
    if config.log_file:
        file = logging.FileHandler(config.log_file, encoding="utf-8", delay=True)
        handlers.append((file, config.log_file_level or "INFO"))
    for handler, level in handlers:
        handler.setLevel(_LEVELS[level.lower()])
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        target.addHandler(handler)
    target.setLevel(min((handler.level for handler, _ in handlers), default=logging.WARNING))


def __getattr__(name: str) -> Any:
    if name in _LEVELS:
        return getattr(logger, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
