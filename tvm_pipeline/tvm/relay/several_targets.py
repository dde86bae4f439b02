"""The libraries of one model for several targets, compiled at the same time. Next: `build.py`, which compiles one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from tvm_pipeline.core.model import Model
from tvm_pipeline.tvm.kernel_sets import Choices
from tvm_pipeline.tvm.relay.build import build_library
from tvm_pipeline.tvm.relay.child_process import stoppable_pool
from tvm_pipeline.tvm.relay.library import Library

WORTH_A_CHILD = 1 << 20  # bytes of a model that takes longer to compile than a child to start


def build_libraries(
    model: Model, choices: Mapping[str, Choices], host: str = "", elsewhere: Collection[str] = ()
) -> list[Library]:
    """Compile `model` for each target, or take it from the cache.

    A large model is compiled for as many targets at once as this process has cores, each in a child. A small one is
    compiled before a child has started.

    Args:
        choices: of tuning, by target, in the sequence of the libraries.
        elsewhere: targets whose code is not loaded, since it runs on another machine alone.

    Raises what `build_library` raises, and ends the other children.
    """
    apart = len(choices) > 1 and len(model.content) + len(model.params) >= WORTH_A_CHILD
    if not apart:
        return [
            build_library(model, target, host, chosen, elsewhere=target in elsewhere)
            for target, chosen in choices.items()
        ]
    with stoppable_pool(min(len(choices), len(os.sched_getaffinity(0)))) as submit:
        made = [
            submit(build_library, model, target, host, chosen, apart=True, elsewhere=target in elsewhere)
            for target, chosen in choices.items()
        ]
        return [future.result() for future in made]
