"""How every process of the service logs: structlog events on stderr, as text for people or as JSON lines.

An event is a fixed name with key=value details. The process's role is added to every event, so that lines
of fronts, workers and the main process can be told apart. Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger


def configure_logs(log_format: str, level: str, **role: Any) -> None:
    """Sets up structlog for this process. `role` (process="front", front=0, …) is added to every event.

    Third-party libraries that use the standard logging module are shown from WARNING on, in the same form.
    """
    is_json = log_format == "json"
    severity = logging.getLevelNamesMapping()[level.upper()]

    def add_role(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        for key, value in role.items():
            event.setdefault(key, value)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_role,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if is_json else "%H:%M:%S.%f", utc=is_json),
    ]
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    renderers: list[Processor] = [console, _over_progress] if sys.stderr.isatty() else [console]
    if is_json:
        renderers = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    formatter = structlog.stdlib.ProcessorFormatter(processors=[strip, *renderers], foreign_pre_chain=shared)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=max(severity, logging.WARNING), force=True)


def _over_progress(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """Clears the terminal's line first: the main process may be drawing a progress bar there."""
    return f"\r\x1b[2K{line}"  # type: ignore[return-value]
