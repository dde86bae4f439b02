"""The errors a user can meet, as one tree.

    PipelineError                  anything this package reports on purpose
    ├── OptionError                an option or a setting that cannot be used
    ├── ModelError                 a model file that cannot be read or imported
    ├── GraphError                 an operator graph that is not a DAG, or whose figures are impossible
    ├── PlatformError              a platform that does not fit this machine, or a device that is missing
    ├── ProfileError               a profile with impossible figures, or of another graph
    ├── PowerError                 a sensor of power that cannot be read, or a power mode that cannot be set
    ├── PlanError                  a plan that does not fit the graph or the platform
    │   └── NoPlanError            no plan was found
    │       ├── InfeasibleError    none exists, which is proven; carries the reason
    │       ├── LimitMissedError   one may exist, but this search does not count the limit that its plan misses
    │       └── SearchTimeError    one may exist, but the time allowed was over before
    ├── BundleError                a bundle that is damaged, unsafe or of another version
    └── RunError                   a running pipeline
        ├── StageError             a stage raised; carries stage, device and frame, and the host operator that raised
        ├── PipelineTimeoutError   nothing came in the time allowed
        ├── PipelineClosedError    used before start or after stop
        └── BoardLostError         a board that cannot be reached, or no longer

A message says what went wrong, where (file, operator, device, frame), and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection


class PipelineError(Exception):
    """Anything that tvm-pipeline reports on purpose.

    Examples:
        >>> try:
        ...     load("missing.onnx")
        ... except PipelineError as error:
        ...     print(type(error).__name__, str(error)[:26])
        ModelError missing.onnx: no such file
    """


class OptionError(PipelineError):
    """An option or a setting that cannot be used.

    A message names a setting by its field in Python, in backticks; the command line and the service file translate it.

    Attributes:
        option: the field that cannot be used, such as `min_throughput_fps`; None where it is not one field.
        value: its value.
    """

    def __init__(self, message: str, *, option: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.option = option
        self.value = value


class ModelError(PipelineError):
    """A model file that cannot be read, or holds something that cannot be imported."""


class GraphError(PipelineError):
    """An operator graph that is not a DAG, or whose figures are impossible."""


class PlatformError(PipelineError):
    """A platform that does not fit this machine, or a device that is missing."""


class ProfileError(PipelineError):
    """A profile with impossible figures, or one of another graph or platform."""


class PowerError(PipelineError):
    """A sensor of power that is missing or cannot be read, or a power mode that cannot be set."""


class PlanError(PipelineError):
    """A plan that does not fit the graph or the platform."""


class NoPlanError(PlanError):
    """No plan was found; the message gives the reason."""


class InfeasibleError(NoPlanError):
    """It is proven that no plan satisfies the problem; the message names what is in conflict."""


class LimitMissedError(NoPlanError):
    """The plan that was found misses a limit that the search does not count; another plan may keep it."""


class SearchTimeError(NoPlanError):
    """The time allowed was over before a plan was found; one may exist."""


class BundleError(PipelineError):
    """A bundle that is damaged, unsafe to unpack, or made by another version."""


class RunError(PipelineError):
    """A running pipeline failed."""


class StageError(RunError):
    """A stage raised. The original exception is `__cause__`.

    Attributes:
        stage: index of the stage in the plan; -1 for a stage that was made for no plan.
        device: name of the device it ran on.
        frame: index of the frame it was given; -1 where it could not be made or tied to its device.
        operator: the host operator that raised; empty where the device failed. No other device would do better.
    """

    def __init__(self, stage: int, device: str, frame: int, cause: BaseException, operator: str = "") -> None:
        which = "a stage" if stage < 0 else f"stage {stage}"
        where = f"{operator} in {which}" if operator else which
        when = "before its first frame" if frame < 0 else f"at frame {frame}"
        super().__init__(f"{where} on {device} failed {when}: {type(cause).__name__}: {cause}")
        self.stage = stage
        self.device = device
        self.frame = frame
        self.operator = operator


class PipelineTimeoutError(RunError):
    """Nothing could be handed over in the time allowed."""


class PipelineClosedError(RunError):
    """The pipeline was used before it was started or after it was stopped."""


class BoardLostError(RunError):
    """A board cannot be reached, is in use, or its link could not be had back."""


def nearest(name: str, known: Collection[str], otherwise: str = "") -> str:
    """Return the advice for a name that is none of the known ones; where none is like it, they are listed.

    Examples:
        >>> nearest("sorce", ["source", "tag"]), nearest("video", ["source", "tag"])
        ('did you mean source?', 'it takes source, tag')
    """
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else otherwise or f"it takes {', '.join(known)}"
