"""ONNX's own backend tests, which its package brings, by our front ends, compilers and stages.

A model is read from a file, as a user's is, and runs as one stage and, where it has several operators, as two. If it is
refused as it is, its inputs but for the first become constants (`input_values`), as a user would do with axes and
shapes. A child runs one test after another; the next one follows where it dies or hangs.
"""

from __future__ import annotations

import pickle
import re
import socket
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

import msgspec
import numpy as np

from tvm_pipeline.core.number_types import NARROW, dtype_of, is_float, widened
from tvm_pipeline.files import cache_folder, write_bytes
from tvm_pipeline.processes import Child, receive, send

OUTCOMES = ("right", "rounded", "refused", "engine", "wrong", "foreign", "crashed", "hung")
LONGEST_S = 120.0
_IN_FILES = ("simple", "pytorch-converted", "pytorch-operator")
# onnx 1.16 expects numbers that wrap around, where the operator is to saturate, or the reverse, and a bfloat16 without
# its last digits, where it is to be rounded; onnx has mended its tests since.
_FAULTY = {
    *("test_qlinearmatmul_2D_int8_float32", "test_qlinearmatmul_3D_int8_float32"),
    *(f"test_cast_{source}_to_{target}" for source in ("FLOAT", "FLOAT16") for target in ("INT4", "UINT4")),
    *("test_cast_FLOAT_to_BFLOAT16", "test_castlike_FLOAT_to_BFLOAT16", "test_castlike_FLOAT_to_BFLOAT16_expanded"),
}
_EXACT = NARROW.keys() - {"bfloat16"}  # types that are compared without a tolerance; the runner has one for this
# What they give is drawn at random, of which the shape and the type can be compared.
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}

_FAULT = re.compile(r"\b(Assertion|Attribute|Index|Key|Type)Error\b")  # in a message: a fault that a net has caught

Values = dict[str, Any]


class Verdict(msgspec.Struct, frozen=True):
    """What became of a test.

    Attributes:
        outcome: one of OUTCOMES. `rounded` is beyond the test's tolerance and within 16 times the spacing of the type
            at the largest value, such as 1e-5 in place of 0 where sums are 450. `engine` is what the engine alone
            gives, too: the same numbers, or an error when it runs. `foreign` is an error that is not
            ours, or that comes when a frame runs.
        names_a_part: whether the message has an operator, or a tensor by name, and not the file alone.
        bound: whether inputs were constants.
        operators: the kinds in the model.
    """

    name: str
    outcome: str
    message: str = ""
    names_a_part: bool = False
    bound: bool = False
    operators: tuple[str, ...] = ()


class _Wrong(Exception):  # noqa: N818  it never leaves this file
    """Outputs differ from those that the test expects; an outcome, and how."""


def verdicts(names: Iterable[str], compiler: str, workers: int = 2) -> Iterator[Verdict]:
    """Run tests by `tvm`, of either IR, or by an engine; yield what became of each, in their order."""
    idle: SimpleQueue[Child] = SimpleQueue()

    def judge(name: str) -> Verdict:
        try:
            child = idle.get_nowait()
        except Empty:
            child = Child(f"{__name__}:serve", compiler.encode())
        try:
            child.send(name.encode())
            if answer := child.receive(time.monotonic() + LONGEST_S)[0]:
                idle.put(child)
                return msgspec.json.decode(answer, type=Verdict)
            outcome, how = "crashed", child.how()
        except TimeoutError:
            outcome, how = "hung", f"no answer in {LONGEST_S:g} s"
        child.end()
        return Verdict(name, outcome, how)

    try:
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(judge, names)
    finally:
        while not idle.empty():
            idle.get().end()


def serve(order: bytes, channel: socket.socket) -> None:
    while name := receive(channel)[0].decode():
        send(channel, msgspec.json.encode(verdict(cases()[name], order.decode())))


@cache
def cases() -> Mapping[str, Any]:
    """Return the tests that need no network, by name.

    A new onnx computes those of single nodes for five seconds. They are kept in the cache, for the other processes of a
    run. The others are files of this environment, whose places no other environment may learn.
    """
    import onnx
    from onnx.backend.test.loader import load_model_tests

    kept = cache_folder() / f"node tests of onnx {onnx.__version__}"
    try:
        found = pickle.loads(kept.read_bytes())
    except FileNotFoundError:
        found = load_model_tests(kind="node")
        if all(case.model is not None for case in found):
            write_bytes(kept, pickle.dumps(found))
    found += [case for kind in _IN_FILES for case in load_model_tests(kind=kind)]
    return {case.name: case for case in found if case.model is not None or case.name not in _FAULTY}


def verdict(case: Any, compiler: str) -> Verdict:
    """Run a test in this process."""
    from tvm_pipeline.errors import PipelineError, RunError

    proto, bound = _proto(case), False

    def found(outcome: str, message: str = "", names_a_part: bool = False) -> Verdict:
        kinds = {node.op_type for node in proto.graph.node}
        return Verdict(case.name, outcome, message, names_a_part, bound, tuple(sorted(kinds)))

    try:
        for inputs, expected in _data(case, proto):
            try:
                given = _outputs(proto, compiler, inputs, {})
            except PipelineError as error:
                if isinstance(error, RunError) or len(inputs) < 2:
                    raise
                (first, frame), *others = inputs.items()
                try:
                    given = _outputs(proto, compiler, {first: frame}, dict(others))
                except PipelineError:  # the first reason is that of the model as it is
                    raise error from None
                bound = True
            for outputs in given:
                _compare(case, outputs, expected)
    except _Wrong as error:
        if error.args[0] == "wrong" and _is_of_engine(compiler, proto, inputs, outputs, expected):
            return found("engine", error.args[1])
        return found(error.args[0], " ".join(error.args[1].split())[:300])
    except PipelineError as error:
        if isinstance(error, RunError) and _is_of_engine(compiler, proto, inputs, None, expected):
            return found("engine", str(error))
        names_a_part = _names_a_part(str(error), proto)
        is_fault = isinstance(error, RunError) or (_FAULT.search(str(error)) and not names_a_part)
        return found("foreign" if is_fault else "refused", str(error), names_a_part)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return found("foreign", f"{at.filename}:{at.lineno}: {type(error).__name__}: {error}"[:600])
    return found("right")


def _outputs(proto: Any, compiler: str, inputs: Values, constants: Values) -> list[list[Any]]:
    """Return the outputs of the model as one stage, and as two where it can be cut."""
    from tests.support.stages import model_outputs, random_stages, run_stages
    from tvm_pipeline.backends.registry import find_backend
    from tvm_pipeline.core.platform import Device
    from tvm_pipeline.frontends import load

    declared = {value.name: value.type.tensor_type.shape.dim for value in proto.graph.input}
    open_ = [name for name, extents in declared.items() if not all(extent.dim_value for extent in extents)]
    backend = find_backend("host" if compiler == "tvm" else compiler)
    device = backend.settle(Device("cpu0", backend.name, (0,), ""))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        shapes = {name: np.shape(array) for name, array in inputs.items() if name in open_}
        model = load(path, shapes, constants)
    compiled = backend.compile(model, [device])
    try:
        names = compiled.graph.operator_names
        cuts = [[names], *([random_stages(compiled.graph, Random(0), 2)] if len(names) > 1 else [])]
        runs = [run_stages(compiled, [(stage, device) for stage in cut], inputs) for cut in cuts]
        return [model_outputs(compiled, run) for run in runs]
    finally:
        compiled.close()


def _is_of_engine(compiler: str, proto: Any, inputs: Values, outputs: list[Any] | None, expected: list[Any]) -> bool:
    """Whether the engine alone gives these outputs of the file as it is; or of None fails, or gives other shapes."""
    from tvm_pipeline.frontends.onnx_types import numpy_name

    ends = (*proto.graph.input, *proto.graph.output)
    if compiler not in _ALONE or any(numpy_name(value.type.tensor_type.elem_type) in NARROW for value in ends):
        return False  # its `run` takes no such arrays
    try:
        alone = _ALONE[compiler](proto.SerializeToString(), inputs)
    except Exception:  # its errors have no common root
        return outputs is None
    if outputs is None:
        return [array.shape for array in alone] != [array.shape for array in expected]
    return all(map(_is_near, alone, outputs))


def _by_onnxruntime(content: bytes, inputs: Values) -> list[Any]:
    import onnxruntime

    return list(onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, inputs))


def _by_openvino(content: bytes, inputs: Values) -> list[Any]:
    import openvino

    core = openvino.Core()
    model = core.compile_model(core.read_model(content), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return list(model(list(inputs.values())).values())


_ALONE = {"onnxruntime": _by_onnxruntime, "openvino": _by_openvino}


def _compare(case: Any, outputs: list[Any], expected: list[Any]) -> None:
    """Compare as ONNX's own runner does, and shapes, which it lets numpy broadcast."""
    from onnx.backend.test.runner import Runner

    kinds = [[(array.dtype.name, np.shape(array)) for array in arrays] for arrays in (outputs, expected)]
    if kinds[0] != kinds[1]:
        raise _Wrong("wrong", f"types and shapes {kinds[0]}, not {kinds[1]}")
    if _is_random(_proto(case)):
        return
    pairs = list(zip(outputs, expected, strict=True))
    for output, wanted in pairs:
        if wanted.dtype.name in _EXACT and not _is_same(output, wanted):
            raise _Wrong("wrong", f"{output.dtype} {output.tolist()}, not {wanted.dtype} {wanted.tolist()}")
    others = [pair for pair in pairs if pair[1].dtype.name not in _EXACT]
    outputs, expected = ([pair[index] for pair in others] for index in (0, 1))
    try:
        Runner.assert_similar_outputs(expected, outputs, case.rtol, case.atol)
    except AssertionError as error:
        is_near = all(map(_is_near, outputs, expected))
        raise _Wrong("rounded" if is_near else "wrong", str(error)) from error


def _is_same(one: Any, other: Any) -> bool:
    """Whether arrays have one type and shape, and the same numbers."""
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and bool(np.array_equal(widened(one), widened(other), equal_nan=is_float(one.dtype.name)))


def _is_near(one: Any, other: Any) -> bool:
    if one.dtype.name in NARROW:
        return _is_same(one, other)
    if one.dtype != other.dtype or one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    finite = np.isfinite(other)
    largest = np.max(np.abs(other[finite]), initial=0)
    return bool(np.allclose(one, other, rtol=0, atol=16 * np.finfo(one.dtype).eps * largest, equal_nan=True))


def _is_random(proto: Any) -> bool:
    return any(node.op_type in _RANDOM or "training" in proto.graph.name for node in proto.graph.node)


def _proto(case: Any) -> Any:
    import onnx

    return case.model or onnx.load(Path(case.model_dir) / "model.onnx")


def _data(case: Any, proto: Any) -> Iterator[tuple[Values, list[Any]]]:
    """Yield inputs by name and the outputs of each set of a test's data."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    names = [value.name for value in proto.graph.input if value.name not in constants]
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            yield dict(zip(names, map(_array, inputs), strict=True)), list(map(_array, outputs))
        return
    declared = {value.name: value.type for value in (*proto.graph.input, *proto.graph.output)}
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        inputs = {name: _read(folder / f"input_{index}.pb", declared[name]) for index, name in enumerate(names)}
        outputs = [_read(folder / f"output_{i}.pb", value.type) for i, value in enumerate(proto.graph.output)]
        yield inputs, outputs


def _array(value: Any) -> Any:
    from onnx import TensorProto, numpy_helper

    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _typed(array: Any, kind: Any) -> Any:
    """Return an array in the type that the model declares: of narrow ones onnx 1.16 gives the value, or the bits."""
    from tvm_pipeline.frontends.onnx_types import numpy_name

    name = numpy_name(kind.tensor_type.elem_type)
    if name not in NARROW or array.dtype.name == name:
        return array
    return array.view(dtype_of(name)) if array.dtype == np.uint16 else array.astype(dtype_of(name))


def _read(path: Path, kind: Any) -> Any:
    """Return a tensor, a sequence or an optional value from a file of the package."""
    from onnx import OptionalProto, SequenceProto, TensorProto, numpy_helper

    readers = {
        "tensor_type": (TensorProto, numpy_helper.to_array),
        "sequence_type": (SequenceProto, numpy_helper.to_list),
        "optional_type": (OptionalProto, numpy_helper.to_optional),
    }
    message, convert = readers[kind.WhichOneof("value")]
    return _typed(convert(message.FromString(path.read_bytes())), kind)


def _names_a_part(message: str, proto: Any) -> bool:
    """Whether a message names an operator, a node, or an input or output of the model."""
    nodes = [part for node in proto.graph.node for part in (node.op_type, node.name, *node.input, *node.output)]
    values = [value.name for value in (*proto.graph.input, *proto.graph.output)]
    return any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", message) for part in (*nodes, *values) if part)
