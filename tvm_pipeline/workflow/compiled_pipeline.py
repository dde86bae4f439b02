"""The whole road in one call: a model is compiled, measured, planned and verified, and frames run through the result.

    import tvm_pipeline as tp

    pipe = tp.compile("model.onnx")
    for outputs in pipe.map(frames):
        ...

The command line takes the same steps (`steps.py`), so it finds the same plan. Next: `runtime/pipeline.py`.

`compile` and `open` import the steps when they are called, since many programs only plan, or run a bundle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from tvm_pipeline.backends.bundle import Bundle, write_bundle
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.core.model import Format, Model
from tvm_pipeline.core.plan import describe
from tvm_pipeline.core.problem import Objective, Problem, check_limits, checked_objective
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline.frontends import Shapes, load
from tvm_pipeline.runtime import Pipeline
from tvm_pipeline.runtime.frame_stream import Inputs
from tvm_pipeline.runtime.isolation import isolated
from tvm_pipeline.runtime.verification import VERIFY_S, check_seconds


class CompiledPipeline:
    """A model that is compiled for the devices of this machine, with the plan by which they share it.

    Args:
        bundle: the model, the plan, and what was measured.
        opened: what closes with it, such as the folder that a file was unpacked into.

    Examples:
        >>> import numpy
        >>> from tvm_pipeline.testing import example_backend, example_bundle, installed
        >>> pipe = CompiledPipeline(example_bundle())
        >>> frames = [numpy.full(4, number, "float32") for number in range(3)]
        >>> with installed(example_backend()):
        ...     [outputs[0].item() for outputs in pipe.map(frames)]
        [1.0, 3.0, 5.0]
    """

    def __init__(self, bundle: Bundle, opened: ExitStack | None = None) -> None:
        self.bundle = bundle
        self._opened = opened or ExitStack()
        if opened is None:
            self._opened.callback(bundle.compiled.close)

    @cached_property
    def compiled(self) -> CompiledModel:
        """Return the model, whose stages on an Edge TPU run in a process that lasts until `close`."""
        bundle = self.bundle
        return self._opened.enter_context(isolated(bundle.compiled, bundle.platform, bundle.plan.stages, every=False))

    def map(self, frames: Iterable[Inputs]) -> Iterator[Any]:
        """Yield the outputs of each frame, in order; one stream after another may be mapped.

        Args:
            frames: an array for a model of one input, else arrays by input name; shapes and dtypes are the model's.

        Yields:
            An array for a model of one output, else arrays by output name.

        Raises:
            ModelError: a frame does not fit the model's inputs.
            StageError: a device fails.
        """
        with Pipeline(self.compiled, self.bundle.plan, self.bundle.platform) as pipeline:
            for result in pipeline.map(frames):
                yield _alone(result.outputs)

    def __call__(self, frame: Inputs) -> Any:
        """Return the outputs of one frame, see `map`."""
        return next(iter(self.map([frame])))

    def save(self, path: Path | str) -> None:
        """Write a bundle, which `open` and the command `run` take; raise PipelineError where that is not possible."""
        write_bundle(Path(path), self.bundle)

    def close(self) -> None:
        """Release the model, and the folder of a file that was opened; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> CompiledPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        plan = self.bundle.plan
        said = [f"{self.bundle.graph.name}: {describe(plan)}"]
        if plan.batch > 1:
            said.append(f"{plan.batch} frames a call")
        if plan.predicted.throughput_fps:
            said.append(f"{plan.predicted.throughput_fps:.4g} frames a second predicted")
        if plan.gap is not None:
            said.append(f"at most {plan.gap:.1%} from the best")
        return f"<{', '.join(said)}>"


def compile(
    model: str | Path | Model | Any,
    params: dict[str, Any] | None = None,
    *,
    devices: str | Path = "auto",
    engines: str = "",
    objective: Objective = "throughput",
    stages: int | None = None,
    input_shapes: Shapes | None = None,
    verify_s: float = VERIFY_S,
    tolerance: float | None = None,
    weights: str | None = None,
    batch: int | str = 1,
) -> CompiledPipeline:
    """Compile a model, measure it on each device, find the best plan and verify it side by side with the next ones.

    Args:
        model: a file that `load` takes, a Model, or a module of Relay or Relax.
        params: the parameters of a module, by name.
        devices: what may run the model: "auto" for all that this machine has; kinds or names of its devices, such as
            "cpu,gpu"; or a platform file, as `tvm-pipeline devices -o` writes it.
        engines: those that compete for each stage, such as "tvm,openvino,onnxruntime"; without it, TVM and the engines
            that a platform file names.
        objective: throughput, latency, energy, or one of bytes; see `Problem`.
        stages: how many the plan has; any number without it.
        input_shapes: of inputs whose shape the file leaves open.
        verify_s: seconds, at most, in which candidates that are predicted alike run side by side; 0 takes the
            prediction.
        tolerance: the error that faster algorithms, such as Winograd's, may add to an output, over its largest value;
            0 keeps direct sums. Without it, 1e-5 for a file, and 0 for a module.
        weights: the type in which weights are stored: "float32", or "float16" or "bfloat16", which take half of the
            memory and are rounded. All is computed in float32.
        batch: how many frames a call of a stage computes together; "auto" tries 1, 2, 4 and 8, and takes more than 1
            only if that is faster.

    Raises:
        ModelError: the model cannot be read or compiled.
        PlatformError: the platform file does not fit this machine.
        OptionError: there is no such objective, device or engine.
        NoPlanError: no plan keeps within the devices' memory.

    Examples:
        >>> import numpy
        >>> from tvm_pipeline.testing import example_backend, installed
        >>> with installed(example_backend()):  # an example needs devices that every machine has
        ...     pipe = compile(Model("net", "onnx", b""), verify_s=0.0)
        ...     pipe(numpy.ones(4, "float32"))[0].item()
        3.0
    """
    from tvm_pipeline.workflow.batches import Planned, batches_of, best_batch
    from tvm_pipeline.workflow.compiling import Compiled
    from tvm_pipeline.workflow.steps import PlanningInput, compile_source, decide, measured_profile

    objective = checked_objective(objective)  # before the model is compiled
    check_limits(objective, stages, None, None, None)
    check_seconds(verify_s)
    platform = Path(devices) if str(devices).endswith(".toml") else None
    chosen = "" if platform or devices == "auto" else str(devices)
    batches = batches_of(str(batch), objective)
    source = model if isinstance(model, (str, Path, Model)) else _of_module(model, params or {})

    def compiled_again(source: str | Path | Model, shapes: Shapes | None = None) -> Compiled:
        return compile_source(
            source, shapes, platform, devices=chosen, engines=engines, tolerance=tolerance, weights=weights
        )

    def decided(made: Compiled, problem: Problem) -> Planned:
        decision, profile = decide(problem, compiled=made.compiled, verify_s=verify_s)
        return Planned(made, replace(problem, profile=profile), decision)

    made = compiled_again(source, input_shapes)
    profile = measured_profile(made)
    best = decided(made, PlanningInput(made.compiled.graph, made.platform, profile).problem(objective, stages))
    if batches:
        loaded = source if isinstance(source, Model) else load(source, input_shapes)
        best = best_batch(loaded, best, batches, compiled_again, decided, verify_s)
    made, problem, decision = best.made, best.problem, best.decision
    bundle = Bundle(
        problem.graph,
        made.platform,
        problem.profile,
        decision.plan,
        made.compiled,
        decision=decision,
        metadata=made.metadata,
    )
    return CompiledPipeline(bundle)


def open(path: Path | str) -> CompiledPipeline:
    """Open a bundle of `compile`, `CompiledPipeline.save` or the command `compile`.

    Raises:
        BundleError: it is damaged, or made by another version or for another machine.
        OptionError: it holds a whole application, which `tvm-pipeline run` runs.

    Examples:
        >>> import numpy, tempfile
        >>> from pathlib import Path
        >>> from tvm_pipeline.testing import example_backend, example_bundle, installed
        >>> with installed(example_backend()), tempfile.TemporaryDirectory() as folder:
        ...     write_bundle(Path(folder) / "net.tar", example_bundle())
        ...     with open(Path(folder) / "net.tar") as pipe:
        ...         pipe(numpy.ones(4, "float32"))[0].item()
        3.0
    """
    from tvm_pipeline.workflow.steps import opened_bundle

    with ExitStack() as stack:
        bundle = stack.enter_context(opened_bundle(Path(path)))
        if bundle.application:
            raise OptionError(f"{path} holds a whole application, from frames to results; `tvm-pipeline run` runs it")
        return CompiledPipeline(bundle, stack.pop_all())


def _alone(outputs: dict[str, Array]) -> Any:
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _of_module(mod: Any, params: Mapping[str, Any]) -> Model:
    """Return a module of TVM, with its parameters by name, as a Model; raise ModelError for anything else.

    It has direct sums, as the passes for scripts make of it, so that both give the same bits.
    """
    tvm = sys.modules.get("tvm")  # whoever has a module of TVM has imported it
    if tvm is None or not isinstance(mod, tvm.IRModule):
        raise ModelError(f"{type(mod).__name__} is no module of TVM; give one, a file, or a Model of `load`")
    kind: Format = "relay.json" if hasattr(tvm, "relay") else "relax.json"
    content, saved = tvm.ir.save_json(mod).encode(), bytes(tvm.runtime.save_param_dict(params))
    return Model("main", kind, content, params=saved, tolerance=0.0)
