"""Applications: models with work of the host around them, such as reading, decoding and writing the frames of a video.

The engine plans and runs that work as operators of the graph, and does not know what it does. A plug-in does: its entry
point of the group `tvm_pipeline.applications` names a module that has the functions of `Applications`.
Read next: `runtime/host_work.py`, which runs these operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.plugins import entry_points
from tvm_pipeline.runtime.comparison import Run
from tvm_pipeline.workflow.steps import Compiled

GROUP = "tvm_pipeline.applications"


@dataclass(frozen=True, slots=True)
class MeasuredApplication:
    """An application whose host work was measured on a source.

    Attributes:
        graph: the operators of the model and of the host.
        profile: the figures of all of them.
        run: runs a plan of the graph on a stretch of the source.
        record: what `Bundle.application` keeps, from which the plug-in makes the application again.
    """

    graph: OperatorGraph
    profile: Profile
    run: Run
    record: dict[str, Any]


class Application(Protocol):
    """A model that was read as an application wants it.

    Attributes:
        preprocessing: how a frame becomes the model's input, for `Bundle.preprocessing`.
        said: sentences for people: what was given, recognised or assumed.
    """

    @property
    def preprocessing(self) -> dict[str, Any]: ...

    @property
    def said(self) -> Sequence[str]: ...

    def measure(self, made: Compiled, profile: Profile) -> MeasuredApplication:
        """Measure the host work on the source; `profile` has the model's operators.

        Raises PipelineError where the source breaks or no device can do the work.
        """


class Applications(Protocol):
    """What the module of an entry point offers."""

    def read(self, graph: OperatorGraph, metadata: Mapping[str, str], options: Mapping[str, Any]) -> Application:
        """Return the application of a model. The options are those of `compile`, from `preprocessing` to `video`.

        Raises OptionError where an option is wrong.
        """

    def again(self, bundle: Bundle, source: str) -> Run:
        """Return the function that runs a plan of a bundle's application on a source, or on its own if it is empty."""

    def seen(self) -> Iterator[str]:
        """Yield lines for `devices`: hardware of this machine that serves applications and no plan."""


def applications(option: str) -> Applications:
    """Return the module of the plug-in that knows applications; `option` is the setting that needs it.

    Raises:
        OptionError: there is no such plug-in.
        PipelineError: it lacks libraries; the message names what to install.
    """
    for found in entry_points(group=GROUP):
        module: Applications = found.load()
        return module
    raise OptionError(
        f"`{option}` is of applications, and no plug-in for them is installed (entry points {GROUP}); install "
        "tvm_pipeline_video",
        option=option,
    )
