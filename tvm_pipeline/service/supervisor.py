"""`run --supervise`: a process that crashes is started again, and goes on where it was.

The parent does nothing but start the same command as its child, hand on signals, and wait. The child keeps the count
of finished frames in files that outlive it, see frames.py. Read next: run.py, which is both of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from tvm_pipeline.errors import OptionError, PipelineError, RunError, VideoError
from tvm_pipeline.runtime import Event
from tvm_pipeline.service.common import say, video_room
from tvm_pipeline.service.feeds import Progress
from tvm_pipeline.service.records import event_log
from tvm_pipeline.service.running import handling

WORKER = "TVM_PIPELINE_WORKER"  # the environment variable that makes a run a child: the folder of its counts
CRASHED = 70  # the status of a child that another may do better than; EX_SOFTWARE of sysexits.h
TICK_S = 0.1  # between two looks whether a signal came while it waits
FINAL = (0, 1, 2, 130)  # what the command line ends with on purpose
STEADY_S = 60.0  # after so long a run the back-off begins anew


def may_fare_better(error: Exception, progress: Progress, live: bool) -> bool:
    """Whether another process may not meet this error: all but what the user must mend.

    Once frames came out, files and devices were right; then only a file as a source may still be to blame.
    """
    if isinstance(error, OptionError):
        return False
    if isinstance(error, VideoError):
        return live and progress.begun
    return progress.begun or isinstance(error, RunError) or not isinstance(error, PipelineError)


def supervise(events: Path | None, reloads: bool) -> int:
    """Runs this command in child processes until one ends on purpose; returns the status to end with.

    SIGINT, SIGTERM and SIGHUP are handed on; all end it, but SIGHUP where the child `reloads` by it. A child that
    crashed is followed by the next after .5 s, then twice as long each time up to 30 s.
    """
    back_off = video_room().Reconnect()
    began_s, waits = time.monotonic(), back_off.waits()
    ended_by: list[int] = []  # signals
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP or not reloads:
            ended_by.append(number)
        if child:
            child.send_signal(number)

    with (
        handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), hand_on)),
        tempfile.TemporaryDirectory(prefix="tvm-pipeline-") as folder,
        event_log(events) as tell,
    ):
        while not ended_by:
            started_s = time.monotonic()
            # What a crash leaves in its temporary folder, such as an unpacked bundle, goes with the folder.
            with tempfile.TemporaryDirectory(prefix="tvm-pipeline-", ignore_cleanup_errors=True) as temporary:
                child = subprocess.Popen(
                    [sys.executable, "-m", "tvm_pipeline.cli", *sys.argv[1:]],
                    env={**os.environ, WORKER: folder, "TMPDIR": temporary},
                    start_new_session=True,  # Ctrl-C in a terminal comes here only, and is handed on once
                )
                if ended_by:  # while it was being started
                    child.terminate()
                status = child.wait()
            if ended_by or status in FINAL:
                return max(status, 0)  # a signal that met it while it was being started is no failure
            if time.monotonic() - started_s > STEADY_S:
                waits = back_off.waits()
            wait_s = next(waits)
            reason = f"the worker {_end(status)}; it is started again in {wait_s:g} s"
            say(reason, "yellow")
            tell(Event(time.monotonic() - began_s, "restart", reason, 0), "")
            until_s = time.monotonic() + wait_s
            while not ended_by and time.monotonic() < until_s:
                time.sleep(TICK_S)
    return 0


def _end(status: int) -> str:
    """How a process ended, from its status."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
