"""A supervised run: a process that crashes is started again, and goes on where it was.

The parent only starts a command as its child, passes signals on, and waits. The child keeps its counts of finished
frames in files that outlive it, see progress.py. Read next: commands/run.py, which is the parent and the child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tvm_pipeline import PipelineError
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline.files import cache_folder, temporary_folder
from tvm_pipeline.power import power_modes
from tvm_pipeline.processes import how_ended
from tvm_pipeline.runtime import Event
from tvm_pipeline.signals import WAIT_S, ending, handling
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.progress import WORKER, FrameCounts
from tvm_pipeline_video.service.records import event_log
from tvm_pipeline_video.service.video_extra import Reconnect

CRASHED = 70  # the status of a child after an error that the next may not meet; EX_SOFTWARE of sysexits.h
TICK_S = 0.1  # between two looks whether a signal came while it waits
FINAL = (0, 1, 2, 130)  # statuses by which the command line ends on purpose
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
MOST_SIGNALS = 2  # that are passed on; one more kills a child which answers none
STEADY_S = 60.0  # after a run of this length the back-off begins again at its shortest wait


def is_worth_a_restart(error: Exception, counts: FrameCounts, live: bool) -> bool:
    """Return whether another process may not meet this error. It meets again what the user must mend.

    Once frames came out, files and devices were right; then the only lasting error is a file as a source that breaks.
    """
    if isinstance(error, OptionError):
        return False
    if isinstance(error, VideoError):
        return live and counts.begun
    return counts.begun or isinstance(error, RunError) or not isinstance(error, PipelineError)


def supervise(command: Sequence[str], events: Path | None, reloads: bool, listener: Listener | None = None) -> int:
    """Run a command in child processes until one ends on purpose; return the status to end with.

    SIGINT, SIGTERM and SIGHUP are passed on; the first lets the child drain, the next ends it at once, and one more
    kills it. Each ends the supervision, but not SIGHUP where the child `reloads` by it.

    A child that crashed is followed by the next after .5 s, then after twice as long each time, up to 30 s.

    Args:
        command: the program and its arguments. The environment variable WORKER gives it the folder of its counts.
        events: the file of JSON lines that restarts are appended to.
    """
    listener = listener or Listener()
    back_off = Reconnect()
    began_s, waits = time.monotonic(), back_off.waits()
    ended_by: list[int] = []  # signals
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP or not reloads:
            ended_by.append(number)
        if child:
            child.send_signal(number if len(ended_by) <= MOST_SIGNALS else signal.SIGKILL)

    with (
        handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), pass_on) | ending(pass_on, [signal.SIGHUP])),
        temporary_folder() as folder,
        event_log(events) as write_event,
    ):
        while not ended_by:
            started_s = time.monotonic()
            # What a crash leaves in its temporary folder, such as an unpacked bundle, goes with the folder.
            with temporary_folder() as temporary:
                child = subprocess.Popen(
                    command,
                    # A cache among the temporary files would go with the folder, so it is the supervisor's.
                    env={
                        **os.environ,
                        WORKER: str(folder),
                        "TMPDIR": str(temporary),
                        "TVM_PIPELINE_CACHE": str(cache_folder()),
                    },
                    start_new_session=True,  # Ctrl-C in a terminal comes here alone, and is passed on once
                )
                if ended_by:  # while it was being started
                    child.terminate()
                while child.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(WAIT_S)
                status = child.returncode
            # A worker that was killed leaves a power mode set. The next one sets it again, if it is still asked for.
            power_modes().put_back_left()
            if ended_by or status in FINAL:
                # A signal that met it while it was being started is no failure.
                return 0 if status < 0 or status in STOPPED else status
            if time.monotonic() - started_s > STEADY_S:
                waits = back_off.waits()
            wait_s = next(waits)
            reason = f"the worker {how_ended(status)}; it is started again in {wait_s:g} s"
            listener.warn(reason)
            write_event(Event(time.monotonic() - began_s, "restart", reason, 0), "")
            until_s = time.monotonic() + wait_s
            while not ended_by and time.monotonic() < until_s:
                time.sleep(TICK_S)
    return 0
