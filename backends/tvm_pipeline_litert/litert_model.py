"""A TFLite model compiled for LiteRT: any slice of its file as a runnable stage, on a CPU, a GPU or an NPU."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from itertools import dropwhile, filterfalse
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from ai_edge_litert import compiled_model, environment, options
from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.backends.contract import Array, CompiledModel, Delegating, Order, Port, Seconds, StageRunner, loading
from tvm_pipeline.backends.cores import made_on
from tvm_pipeline.backends.engine import EngineStage, refused_operators
from tvm_pipeline.backends.engine_agreement import disagreement
from tvm_pipeline.backends.engine_targets import parsed_target, set_options
from tvm_pipeline.backends.engine_words import taken_words
from tvm_pipeline.backends.operator_timing import OperatorTimer
from tvm_pipeline.backends.trial import Trial, answer
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.frontends.tflite_resizing import packed
from tvm_pipeline_litert.litert import AHEAD, CPU, NPU, cutter, target_precision

Part: TypeAlias = tuple[bytes, tuple[Port, ...], tuple[Port, ...]]  # a file, with what it reads and writes
_VENDORS = Path(options.__file__).with_name("vendors")
_CHATTER = re.compile(r"(INFO|VERBOSE|I\d{4}|WARNING: Logging|error: XDG)|.*npu_registry")


class LitertModel(Delegating):
    """The CompiledModel of this backend. LiteRT orders the operators of a slice by itself, whatever `order` says."""

    inner: Any  # as the engine that cuts the model has compiled it

    def __init__(self, inner: CompiledModel, order: Order) -> None:
        super().__init__(inner)
        self.order = order
        self._ahead: dict[str, bytes] = {}  # slices that were compiled ahead of time
        self._timer = OperatorTimer(self.graph, self.stage, lambda: self.inner.slicer().values())

    @classmethod
    def compile(cls, model: Model, order: Order, targets: Iterable[str], trial: Trial) -> LitertModel:
        engine = cutter()
        compiled = cls(engine.compile(model, engine.engine_devices([Device("cpu", engine.name)])), order)
        for target in targets:
            if not target.startswith(CPU):
                # Stages may be compiled here for a device of another machine, which runs nothing here.
                compiled._try_on(target, None if trial.known(target)[1] else trial)
        return compiled

    def _try_on(self, target: str, trial: Trial | None) -> None:
        """Leave out of `computes` what a GPU or an NPU refuses, or, where there is a trial, computes otherwise."""
        device = Device(parsed_target(target)[0], "litert", (), target)  # which binds this thread to no core

        def tried(operator: str) -> None:
            part = self._part([operator], device)
            if trial is None:
                return
            trial.ask(target, msgspec.msgpack.encode(part))
            stage, precision = LitertStage(part, device), target_precision(target)
            if reason := disagreement(self.graph, [operator], stage, self._timer.values, precision):
                raise ModelError(reason)

        self.inner.refuse({target: refused_operators(self.graph, tried, f"LiteRT on {target}")})

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        self.inner.check(operators, device)
        return LitertStage(self._part(operators, device), device)

    def _part(self, operators: Sequence[str], device: Device) -> Part:
        """Return a slice as a device loads it."""
        part, ahead, key = self.inner.slicer().cut(operators), self._ahead, f"{sorted(operators)} {device.target}"
        content = part.model.content
        if AHEAD in device.target:
            content = ahead[key] = ahead.get(key) or _compiled_ahead(device.target, content)
        return content, tuple(map(Port.of, part.model.inputs)), tuple(map(Port.of, part.outputs))

    def has_operator_times(self, device: Device) -> bool:
        return device.target.startswith(CPU)  # others compute a stage as one

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        return self._timer.seconds(device, repeats)

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        (folder / "cut").mkdir()
        self.inner.save(folder / "cut", [], platform)
        used = {self._part(stage.operators, platform.device(name))[0] for stage in stages for name in stage.devices}
        ahead = {key: content for key, content in self._ahead.items() if content in used}
        (folder / "litert.msgpack").write_bytes(msgspec.msgpack.encode((self.order, self.inner.refused, ahead)))

    @classmethod
    def load(cls, folder: Path) -> LitertModel:
        kind = tuple[Order, dict[str, dict[str, str]], dict[str, bytes]]
        with loading(folder):
            order, refused, ahead = msgspec.msgpack.decode((folder / "litert.msgpack").read_bytes(), type=kind)
        made = cls(cutter().load(folder / "cut", []), order)
        made.inner.refuse(refused)
        made._ahead = ahead
        return made

    def forget_source(self) -> None:
        self._ahead.clear()
        super().forget_source()

    def close(self) -> None:
        self._timer.close()
        super().close()


class LitertStage(EngineStage):
    """The StageRunner of a CompiledModel. Raise ModelError where LiteRT refuses the file or the target."""

    def __init__(self, part: Part, device: Device) -> None:
        content, inputs, outputs = part
        super().__init__(None, inputs, outputs, device.cores)
        self._device = device
        self.words: list[str] = []  # what LiteRT logs while it compiles
        self.made = made_on(device.cores, lambda: self._make(content))

    def _make(self, content: bytes) -> tuple[Any, ...]:  # the model, its buffers, and the buffer of each port
        target, threads = self._device.target, max(len(self._device.cores), 1)
        try:
            with taken_words(self.words):
                place, settings = _settings(target, threads)
                model = compiled_model.CompiledModel.from_buffer(content, environment=place, options=settings)
                key, signature = next(iter(model.get_signature_list().items()))
                taken, given = model.create_input_buffers(0), model.create_output_buffers(0)
                reads = _named(self.inputs, taken, signature["inputs"], model.get_input_tensor_details(key))
                writes = _named(self.outputs, given, signature["outputs"], model.get_output_tensor_details(key))
                for port, buffer in zip(self.inputs, reads, strict=True):
                    buffer.write(np.zeros(port.buffer().nbytes, np.uint8))  # LiteRT logs at the first one
        except (RuntimeError, KeyError) as error:
            raise ModelError(f"LiteRT refuses {target}: {_reason(error, self.words)}") from error
        return model, taken, given, reads, writes

    def compute(self, made: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        model, taken, given, reads, writes = made
        try:  # as bytes, since LiteRT's buffers do not know all types
            for buffer, array in zip(reads, inputs, strict=True):
                buffer.write(array.reshape(-1).view(np.uint8))
            model.run_by_index(0, taken, given)
            for buffer, array in zip(writes, outputs, strict=True):
                array.reshape(-1).view(np.uint8)[:] = buffer.read(array.nbytes, np.uint8)
        except RuntimeError as error:
            raise RunError(f"LiteRT cannot compute a frame on {self._device.name}: {_reason(error)}") from error


def _named(ports: Sequence[Port], buffers: list[Any], names: list[str], details: dict[str, Any]) -> list[Any]:
    """Return the buffers of ports, by the names of the tensors, which those in a signature stand for."""
    found = {details[name]["name"]: buffer for name, buffer in zip(names, buffers, strict=True)}
    return [found[port.name] for port in ports]


def _parsed(target: str) -> tuple[str, str, dict[str, str], dict[str, str]]:
    """Return the accelerator of a target, the vendor of an NPU, the flags of its compiler, and other properties."""
    name, properties = parsed_target(target)
    vendor = properties.get("vendor", "intel_openvino")  # the package has all libraries of that one
    flags = {key: properties.pop(key) for key in list(properties) if key.startswith(f"{vendor}_")}
    return name, vendor, flags, properties


@cache
def _settings(target: str, threads: int) -> tuple[Any, Any]:
    """Return LiteRT's environment and Options; raise ModelError where it has no such target, property or value."""
    name, vendor, flags, properties = _parsed(target)
    if name not in options.HardwareAccelerator.__members__:
        raise ModelError(f"{target!r} is no target of LiteRT")
    made = options.Options(options.HardwareAccelerator[name])
    own, nothing = f"{_VENDORS}/{vendor}", f"{_VENDORS}/../tools"  # where no libraries are
    compiler = f"{own}/compiler" if name == NPU and AHEAD not in properties else nothing
    dispatch = properties.pop("dispatch_library_path", f"{own}/dispatch") if name == NPU else nothing
    if name == NPU and not list(Path(dispatch).glob("libLiteRtDispatch*")):
        raise ModelError(f"{dispatch} has no libLiteRtDispatch*.so; give its folder as `dispatch_library_path`")
    group = getattr(made, f"{vendor if name == NPU else name.lower()}_options", None)  # some vendors have none
    given = {**properties, **({} if AHEAD in properties else flags)}
    set_options(group, {key: text for key, text in given.items() if name != NPU or key not in ("vendor", AHEAD)})
    made.cpu_options.num_threads = threads
    return environment.Environment.create(dispatch_library_path=dispatch, compiler_plugin_path=compiler), made


def _reason(error: Exception, words: Sequence[str] = ()) -> str:
    """Return why LiteRT fails: what it logged, without places in its source and folders; or the error itself."""
    told = dropwhile(lambda line: not re.search("(?i)error|fail|cannot", line), filterfalse(_CHATTER.match, words))
    said = re.sub(r"\[\S+:\d+\]|\S*/(?=[^\s/])|└", "", " ".join(told) or str(error).rpartition("\n")[2])
    return " ".join(said.split())[:300]


def _compiled_ahead(target: str, content: bytes) -> bytes:
    """Return a file as a vendor's compiler, a program, compiles it; raise ModelError where it does not take all."""
    _, vendor, flags, properties = _parsed(target)
    try:
        with taken_words([]):
            aot = import_module("ai_edge_litert.aot.aot_compile")
            import_module(f"ai_edge_litert.aot.vendors.{vendor}.{vendor}_backend")  # it registers
            targets = import_module(f"ai_edge_litert.aot.vendors.{vendor}.target")
            chip, model = targets.Target(targets.SocModel(properties[AHEAD])), aot.aot_types.Model(None, content)
            [made] = aot.aot_compile(model, target=chip, keep_going=False, **flags).models
    except (ImportError, ValueError) as error:
        words = []
        for file in re.findall(r"See (\S+) for details", str(error)):
            words += Path(file).read_text(errors="replace").splitlines()
            Path(file).unlink()
        package = f"ai-edge-litert-sdk-{vendor.replace('_openvino', '').replace('_', '-')}"
        advice = f"`pip install {package}` brings the compiler"
        raise ModelError(f"LiteRT cannot compile for {target}: {_reason(error, words)}; {advice}") from error
    if any(one.num_ops_offloaded < one.num_total_ops for one in made.partition_stats.subgraph_stats):
        raise ModelError(f"the compiler for {target} leaves operators to the CPU: {made.partition_stats}")
    return bytes(made.model_bytes)


def _sum_of_two(target: str) -> Part:
    """Return a file that adds a tensor to itself, to try a target with."""
    x, y = (Port(name, (1, 4, 4, 8), "float32") for name in "xy")
    tensors = [schema.TensorT(shape=list(port.shape), name=port.name) for port in (x, y)]
    add = schema.OperatorT(0, [0, 0], [1], schema.BuiltinOptions.AddOptions, schema.AddOptionsT())
    graphs, codes = [schema.SubGraphT(tensors, [0], [1], [add])], [schema.OperatorCodeT()]  # its default is ADD
    content = packed(schema.ModelT(3, codes, graphs, buffers=[schema.BufferT()]))
    return _compiled_ahead(target, content) if AHEAD in target else content, (x,), (y,)


def serve(order: bytes, channel: socket.socket) -> None:
    """Be the child: run a slice, or a small model, on a target; say what computes it, as LiteRT calls that."""

    def answered(target: str, content: bytes) -> Any:
        part = _sum_of_two(target) if content == b"-" else msgspec.msgpack.decode(content, type=Part)
        stage = LitertStage(part, Device("it", "litert", (), target))
        stage.run([np.zeros(port.shape, port.dtype) for port in stage.inputs], [p.buffer() for p in stage.outputs])
        return (re.findall(r"(?:Selected adapter|OpenVINO device): (.*)", "\n".join(stage.words)) or [""])[-1]

    answer(channel, answered)
