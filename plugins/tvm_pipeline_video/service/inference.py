"""A running pipeline as a model of the Open Inference Protocol, version 2: arrays come in, and arrays go out.

KServe and Triton define the protocol (https://github.com/kserve/open-inference-protocol), so that Triton's clients work
with it. Read next: inference_http.py and inference_grpc.py, which speak it over HTTP and gRPC.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tvm_pipeline
from tvm_pipeline import OperatorGraph, Tensor
from tvm_pipeline.addresses import is_loopback
from tvm_pipeline.errors import ModelError, OptionError, PipelineClosedError, PipelineError
from tvm_pipeline.runtime.frame_stream import FrameStream
from tvm_pipeline_video.http_server import RequestError, answering, check_address, listening
from tvm_pipeline_video.service.shared_memory import Regions

# The names that the protocol has for types.
DATATYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
DTYPES = {name: dtype for dtype, name in DATATYPES.items()}
PATIENCE_S = 60.0  # of a request, for a place in the pipeline and for its result
VERSION = "1"

_log = logging.getLogger(__name__)


@dataclass
class Statistics:
    """What has been asked so far, in the words of Triton's extension for statistics; times in seconds."""

    success: int = 0
    success_s: float = 0.0
    fail: int = 0
    fail_s: float = 0.0
    compute_s: float = 0.0
    last_s: float = 0.0  # the clock time of the last request

    def durations(self) -> dict[str, dict[str, int]]:
        """Return counts and nanoseconds: of whole requests, of their wait, and of their computing."""

        def duration(count: int, seconds: float) -> dict[str, int]:
            return {"count": count, "ns": round(seconds * 1e9)}

        return {
            "success": duration(self.success, self.success_s),
            "fail": duration(self.fail, self.fail_s),
            "queue": duration(self.success, max(self.success_s - self.compute_s, 0.0)),
            "compute_input": duration(self.success, 0.0),
            "compute_infer": duration(self.success, self.compute_s),
            "compute_output": duration(self.success, 0.0),
        }


@dataclass
class InferenceModel:
    """The model that is served.

    Args:
        pipeline: is running, and takes no other frames.
        graph: of the model.
        name: by which clients ask for it.
        regions: of shared memory; None where other machines may ask.
    """

    pipeline: FrameStream
    graph: OperatorGraph
    name: str
    statistics: Statistics = field(default_factory=Statistics)
    regions: Regions | None = None

    def __post_init__(self) -> None:
        tensors = self.graph.tensors
        for tensor in (*self.graph.inputs, *(tensors[name] for name in self.graph.outputs)):
            if tensor.dtype not in DATATYPES:
                raise ModelError(f"{self.name}: {tensor.name} is {tensor.dtype}, which the protocol has no tensors of")
        self._lock = threading.Lock()
        self._inside: set[Future[Any]] = set()

    @property
    def is_ready(self) -> bool:
        return self.pipeline.state == "running"

    @property
    def input_elements(self) -> int:
        """The elements of all inputs together, which limit the bytes of a request."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.graph.inputs)

    def metadata(self) -> dict[str, Any]:
        """Return name, version, and the tensors that come in and go out."""
        tensors = self.graph.tensors
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": "tvm_pipeline",
            "inputs": [_described(tensor) for tensor in self.graph.inputs],
            "outputs": [_described(tensors[name]) for name in self.graph.outputs],
        }

    def check_name(self, name: str, version: str = "") -> None:
        """Raise RequestError where a client asks for another model."""
        if name != self.name or version not in ("", VERSION):
            asked = f"{name}, version {version}" if version else name
            raise RequestError(f"there is no model {asked}; {self.name} is served, as version {VERSION}", 404)

    def infer(self, inputs: Mapping[str, NDArray[Any]], wanted: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """Return the outputs, or those that are wanted, in their order.

        It waits for the result; many threads may call it, and their frames are in the pipeline at the same time.

        Raises:
            RequestError: the arrays are not those of the model, or the pipeline does not answer.
        """
        began_s = time.perf_counter()
        future: Future[tuple[dict[str, NDArray[Any]], float]] = Future()
        with self._lock:
            self._inside.add(future)
        try:
            names = self._checked(inputs, wanted)
            self.pipeline.submit(inputs, PATIENCE_S, tag=future)
            if not wait([future], PATIENCE_S).done:
                raise RequestError(f"{self.name} has not answered in {PATIENCE_S:g} s", 503)
            outputs, inside_s = future.result()
        except RequestError:
            self._count(began_s, None)
            raise
        except PipelineError as error:
            self._count(began_s, None)
            raise RequestError(f"{self.name} does not answer: {error}", 503) from error
        finally:
            with self._lock:
                self._inside.discard(future)
        self._count(began_s, inside_s)
        return {name: outputs[name] for name in names}

    def run(self) -> None:
        """Hand results to those who wait for them, until the pipeline is stopped by another thread or raises."""
        try:
            with suppress(PipelineClosedError):
                for result in self.pipeline.results():
                    outputs = {name: array.copy() for name, array in result.outputs.items()}
                    with suppress(InvalidStateError):  # nobody waits any more
                        result.tag.set_result((outputs, result.latency_s))
        finally:
            self.pipeline.stop()
            with self._lock:
                waiting = list(self._inside)
            for future in waiting:
                with suppress(InvalidStateError):
                    future.set_exception(RequestError(f"{self.name} does not answer: it is being stopped", 503))

    def warm(self) -> None:
        """Run a frame of zeros: the first one takes long."""
        self.pipeline.submit({tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in self.graph.inputs})
        self.pipeline.result()

    def memory(self) -> Regions:
        """Return the regions of shared memory; raise RequestError where there are none."""
        if self.regions is None:
            raise RequestError("shared memory is for clients of this machine, and this server listens beyond it")
        return self.regions

    def _checked(self, inputs: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Sequence[str]:
        expected = {tensor.name: tensor for tensor in self.graph.inputs}
        if inputs.keys() != expected.keys():
            raise RequestError(f"{self.name} has the inputs {', '.join(expected)}; {', '.join(inputs) or 'none'} came")
        for name, array in inputs.items():
            tensor = expected[name]
            if (array.shape, array.dtype.name) != (tensor.shape, tensor.dtype):
                raise RequestError(
                    f"input {name} is {DATATYPES.get(array.dtype.name)} {list(array.shape)}; {self.name} takes "
                    f"{DATATYPES[tensor.dtype]} {list(tensor.shape)}"
                )
        if unknown := [name for name in wanted if name not in self.graph.outputs]:
            raise RequestError(f"{self.name} has the outputs {', '.join(self.graph.outputs)}, and no {unknown[0]}")
        return wanted or self.graph.outputs

    def _count(self, began_s: float, inside_s: float | None) -> None:
        taken_s = time.perf_counter() - began_s
        with self._lock:
            found = self.statistics
            found.last_s = time.time()
            if inside_s is None:
                found.fail, found.fail_s = found.fail + 1, found.fail_s + taken_s
            else:
                found.success, found.success_s = found.success + 1, found.success_s + taken_s
                found.compute_s += min(inside_s, taken_s)


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": list(tensor.shape)}


def dtype_of(name: str, datatype: str, shape: Sequence[int], known: Mapping[str, object]) -> str:
    """Return numpy's name of the type of an input; raise RequestError where it cannot be a tensor, or came before."""
    dtype = DTYPES.get(datatype)
    if dtype is None or any(extent < 0 for extent in shape) or name in known:
        raise RequestError(f"input {name[:100]}: {datatype[:20]} {list(shape[:8])} is no tensor that is served")
    return dtype


def about_server() -> dict[str, Any]:
    """Return what a client learns of the server."""
    return {
        "name": "tvm-pipeline",
        "version": tvm_pipeline.__version__,
        "extensions": ["binary_tensor_data", "statistics", "system_shared_memory"],
    }


def address_of(option: str, text: str, token: str, *, allow_others: bool) -> tuple[str, int]:
    """Return host and port of PORT or ADDRESS:PORT, the value of an option; raise OptionError where it may not be."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdecimal():
        raise OptionError(
            f"`{option}` {text}: give PORT or ADDRESS:PORT, such as 127.0.0.1:8000", option=option, value=text
        )
    needed = (
        "give `allow_others` and a token (TVM_PIPELINE_TOKEN), which crosses the network as it is, as the arrays do"
    )
    check_address(option, host, int(port), needed="" if allow_others and token else needed)
    return host, int(port)


@contextmanager
def serving(
    model: InferenceModel, http: tuple[str, int] | None, grpc: tuple[str, int] | None, token: str = ""
) -> Iterator[None]:
    """Answer over HTTP and gRPC, each where it has an address, while the block lasts. Call `model.run` in the block.

    Raises:
        OptionError: it cannot listen there.
        PipelineError: the extra `kserve` is not installed.
    """
    is_local = all(is_loopback(where[0]) for where in (http, grpc) if where)
    model.regions = Regions() if is_local else None
    with ExitStack() as stack:
        if http:
            from tvm_pipeline_video.service import inference_http

            at = listening("http", *http)
            stack.enter_context(answering(inference_http.application(model, token), at, "http"))
            _log.info("%s over HTTP at %s", model.name, "http://{}:{}".format(*at.getsockname()[:2]))
        if grpc:
            from tvm_pipeline_video.service import inference_grpc

            listening("grpc", *grpc).close()  # gRPC says little of why it cannot listen
            host, port = grpc
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            rpc, port = inference_grpc.server_of(model, address, token)
            rpc.start()
            stack.callback(lambda: rpc.stop(1.0).wait())
            _log.info("%s over gRPC at %s:%d", model.name, host, port)
        yield
