"""A Library: what one compilation of a Relay module for one target gives, in memory and as plain files.

It is kernels as a shared object, the graph executor's JSON, the parameters, and what each kernel computes
(`kernel_walkers.py`). Loading one runs no Relay at all, and the parameters are mapped from their file. Next:
`build.py`, which makes libraries.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import tvm

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.errors import BundleError
from tvm_pipeline.files import SUMS, linked
from tvm_pipeline_tvm.devices.runtimes import ready_to_run
from tvm_pipeline_tvm.devices.targets import has_own_memory, kind_of
from tvm_pipeline_tvm.kernel_sets import choices_of, hashable
from tvm_pipeline_tvm.kernels import Entry, Kernel
from tvm_pipeline_tvm.machine_code import load_kernels
from tvm_pipeline_tvm.overwriting import overwritten
from tvm_pipeline_tvm.relay.output_names import load_output_names
from tvm_pipeline_tvm.relay.overwriting_record import load_overwriting
from tvm_pipeline_tvm.relay.saved_params import UNMAPPED, read_params, write_params
from tvm_pipeline_tvm.tvm_errors import reason
from tvm_pipeline_tvm.weights_file import WEIGHTS

TUNING, INDEX = "tuning.json", "kernels.json"  # of a library: its Tuning; the rest, with the length of each file


class Tuning(msgspec.Struct, frozen=True):
    """What can be tuned in a library, and what was.

    Attributes:
        workloads: of each function that tuning can make faster.
        choices: of tuning, for workloads of this library.
        winograd: how many distinct kernels Winograd's algorithm computes.
        error: of the outputs then, measured against float64 (`reference.py`); None where that was not possible.
    """

    workloads: dict[str, Any] = msgspec.field(default_factory=dict)
    choices: tuple[tuple[Any, Any], ...] = ()
    winograd: int = 0
    error: float | None = None

    @property
    def tuned(self) -> int:
        """How many distinct kernels run by a choice of tuning."""
        return len(self.choices)

    @property
    def convolutions(self) -> int:
        """How many distinct kernels can have one."""
        return len(set(self.workloads.values()))


@dataclass(slots=True)
class Library:
    """One model compiled for one target.

    Attributes:
        graph: the graph executor's JSON, parsed.
        module: the kernels; None where they are for a processor that is not this one.
        params: parameters by their name in the graph; every slice shares these arrays, and nothing writes into them.
        inputs: the model's inputs, in order.
        outputs: the names of the model's outputs, in order; none where its file does not tell.
        heads: the model's outputs as (kernel, output).
        overwriting: of each function the positions of the arguments that its result may overwrite.
        entry_of_node: (node, output) of the JSON to (kernel, output), for all but parameters.
    """

    target: str
    inputs: tuple[Tensor, ...]
    graph: dict[str, Any]
    kernels: list[Kernel]
    module: tvm.runtime.Module | None
    params: dict[str, Any]
    folder: Path | None = None
    tuning: Tuning = field(default_factory=Tuning)
    outputs: tuple[str, ...] = ()
    overwriting: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    entry_of_node: dict[tuple[int, int], tuple[int, int]] = field(init=False)
    heads: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        positions = {tensor.name: index for index, tensor in enumerate(self.inputs)}
        self.entry_of_node = {
            (kernel.node, output): (index, output)
            for index, kernel in enumerate(self.kernels)
            for output in range(len(kernel.outputs))
            if kernel.node is not None
        }
        for node, described in enumerate(self.graph["nodes"]):
            if described["op"] == "null" and described["name"] in positions:
                self.entry_of_node[node, 0] = -1, positions[described["name"]]
        self.heads = [self.entry_of_node[node, index] for node, index, _ in self.graph["heads"]]

    @property
    def device_type(self) -> int:
        return int(self.graph["attrs"]["device_index"][1][0])

    def is_reshape(self, kernel: int) -> bool:
        """Whether the kernel only shows its input under another shape, and nothing runs."""
        node = self.kernels[kernel].node
        return bool(self.graph["nodes"][node]["attrs"]["func_name"] == "__nop")

    def overwrites(self, kernel: int) -> tuple[Entry, ...]:
        """Return the entries that the kernel reads and whose bytes its result may take."""
        described = self.graph["nodes"][self.kernels[kernel].node]
        arguments = [self.entry_of_node.get((node, index)) for node, index, _ in described["inputs"]]
        return overwritten(self, arguments, self.overwriting.get(described["attrs"]["func_name"], ()))

    def save(self, folder: Path) -> None:
        """Writes the library into an existing folder."""
        if self.folder is None:
            raise BundleError(f"the library for {self.target} was never written to the cache")
        for file in self.folder.iterdir():
            if file.name not in (UNMAPPED, SUMS):  # a bundle has sums of its own
                (linked if file.name == WEIGHTS else shutil.copy2)(file, folder / file.name)
        if (self.folder / UNMAPPED).exists():
            write_params(folder, self.params)
            write_index(folder, self.target, self.inputs, self.kernels)


def write_index(folder: Path, target: str, inputs: Sequence[Tensor], kernels: Sequence[Kernel]) -> None:
    """Write what else is in a library, and how long each of its files is: the last of them."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.name != INDEX}
    (folder / INDEX).write_bytes(msgspec.json.encode((target, inputs, kernels, sizes)))


def load_library(folder: Path, runs_here: Callable[[str], bool] = lambda _: True) -> Library:
    """Reads what `build_library` wrote.

    Args:
        runs_here: whether code for a target runs on this machine; else the kernels are left where they are.

    Raises:
        BundleError: it is damaged.
        PlatformError: it is for a kind of device that TVM cannot run here.
    """
    try:
        target, inputs, kernels, sizes = msgspec.json.decode(
            (folder / INDEX).read_bytes(), type=tuple[str, tuple[Tensor, ...], list[Kernel], dict[str, int]]
        )
        for name, size in sizes.items():  # to run code that was cut short would end the process
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{name} is not as long as it was")
        graph = json.loads((folder / "graph.json").read_text())
        module = None
        if runs_here(target):
            ready_to_run(kind_of(target))
            module = load_kernels(folder / "kernels.so", has_own_memory(target))
        params = read_params(folder)
        tuning, outputs, overwriting = read_tuning(folder), load_output_names(folder), load_overwriting(folder)
        library = Library(target, inputs, graph, kernels, module, params, folder, tuning, outputs, overwriting)
        _check_graph(library)
        return library
    except (OSError, LookupError, ValueError, TypeError, msgspec.MsgspecError, tvm.TVMError) as error:
        raise BundleError(f"{folder}: damaged compiled model ({reason(error)}); compile it again") from error


class _Node(msgspec.Struct):
    op: Literal["null", "tvm_op"]
    name: str
    inputs: list[tuple[int, int, Literal[0]]]
    attrs: dict[str, str] = {}  # also of numbers


class _Attributes(msgspec.Struct):
    shape: tuple[str, list[tuple[int, ...]]]
    dltype: tuple[str, list[str]]
    device_index: tuple[str, list[int]]


class _Graph(msgspec.Struct):
    """What slices take from the graph executor's JSON."""

    nodes: list[_Node]
    node_row_ptr: list[int]
    attrs: _Attributes


def _check_graph(library: Library) -> None:
    """Raise ValueError or LookupError where the graph does not fit the kernels, since slices are only made later."""
    graph = msgspec.convert(library.graph, _Graph)
    device_type, rows = tvm.device(kind_of(library.target)).device_type, graph.node_row_ptr
    entries = list(zip(graph.attrs.shape[1], graph.attrs.dltype[1], strict=True))
    if set(graph.attrs.device_index[1]) != {device_type} or sorted({*rows}) != rows or rows[-1] > len(entries):
        raise ValueError("the entries of its graph are damaged")
    for kernel in library.kernels:
        node = graph.nodes[kernel.node or 0]
        name, called = node.name[:80], node.attrs.get("func_name", "")
        known = {"num_inputs": str(len(node.inputs)), "num_outputs": str(len(kernel.outputs)), "flatten_data": "0"}
        if node.op != "tvm_op" or not known.items() <= node.attrs.items():
            raise ValueError(f"node {name} of its graph is not the kernel that was compiled")
        if called != "__nop" and library.module is not None and not library.module.implements_function(called):
            raise ValueError(f"node {name} of its graph calls {called[:80]!r}, which was not compiled")
        for producer, output, _ in node.inputs:
            if (entry := library.entry_of_node.get((producer, output))) is None:
                param = library.params[graph.nodes[producer].name]
                if output or entries[rows[producer]] != (tuple(param.shape), str(param.dtype)):
                    raise ValueError(f"node {name} of its graph reads a parameter that is another one")
            elif entry not in kernel.reads:
                raise ValueError(f"node {name} of its graph reads what the kernel does not")


def read_tuning(folder: Path) -> Tuning:
    """Read what was tuned in a library; bundles of earlier versions do not tell."""
    file = folder / TUNING
    if not file.exists():
        return Tuning()
    read = msgspec.json.decode(file.read_bytes(), type=Tuning)
    workloads = {name: hashable(workload) for name, workload in read.workloads.items()}
    choices = tuple(choices_of(read.choices).items())
    return msgspec.structs.replace(read, workloads=workloads, choices=choices)
