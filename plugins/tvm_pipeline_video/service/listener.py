"""The object that hears of a run: lines of text, the present figures while it runs, the last figures at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tvm_pipeline_video.service.records import ModelReport
from tvm_pipeline_video.service.settings import Settings

_log = logging.getLogger("tvm_pipeline_video.service")


class Listener:
    """Hears of a run, and writes its lines to the log. The command line's prints them, and draws a table.

    All calls come from the thread that runs the service, but `warn`, which may come from any.
    """

    def say(self, line: str) -> None:
        """Hear of something that happened."""
        _log.info(line)

    def warn(self, line: str) -> None:
        """Hear of something that is not as it should be, while the run goes on."""
        _log.warning(line)

    def begin(self, settings: Settings) -> None:
        """Hear that a run begins; it begins again whenever other settings are read."""

    def look(self, reports: Callable[[], Sequence[ModelReport]]) -> None:
        """Have a look at the figures of now, about twice a second; `reports` costs only where it is called."""

    def end(self, reports: Sequence[ModelReport]) -> None:
        """Hear the last figures, also where a source failed, whose error is raised then."""
