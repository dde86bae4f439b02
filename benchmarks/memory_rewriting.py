"""Compare peaks with those of Kahn's order and program order, with and without rewriting, and with TVM's plans.

    python benchmarks/memory_rewriting.py           # five minutes
    python benchmarks/memory_rewriting.py --only relay
    python benchmarks/memory_rewriting.py --short   # one cell, for CI

1. peaks: cells and networks of `memory_networks.py`, in float32, nothing in place, inputs may die. `partitioned` is the
   optimal peak with the rewritings of SERENITY (Ahn et al., MLSys 2020, section 3.3): concatenations that convolutions
   and depthwise convolutions read in parts. `piecewise` adds sums and other concatenations that take their inputs one
   by one. int8: the same with a byte for each element, and sums carried in int32 where that still pays. A concatenation
   stands at the end of a cell and its convolution at the start of the next: pairs of cells show it. Geometric means are
   over the cells and pairs. Targets: 1.68x without and 1.86x with rewriting. Those are SERENITY's figures against
   TensorFlow Lite, whose order is a program order; here both baselines are orders of the same graph with the same
   accounting: Kahn's (first ready, first run) and program order (as the generator lists the operators). A concatenation
   is a copy here and costs nothing in SERENITY's count, so that the targets are not comparable figures; the benchmark
   `serenity_tables.py` counts as the paper does.
2. relay: the pass RewriteConcat on networks of real convolutions of random weights, without and with the order of least
   memory: the optimal peak, by which the pass decides, with inputs kept; the arena of the whole network as one stage;
   and what the planner of TVM's graph executor allocates, which hands buffers on whole and so may need more where there
   are more of them. Outputs of both, by how much they differ.

3. product: models that `compile --memory-rewrite` compiles for one core, by Relay and by TFLite. The arena of the whole
   model as it is, in the order of least memory, and rewritten in that order; the difference of the outputs, by which
   the command decides; processor time of a frame of the rewritten model over the ordered one, in turns. A model of int8
   must give equal bits, and TFLite adds no int8 up in parts.

With Relax part 2 is left out, and part 3 has the networks that are written as .tflite, by Relax and by TFLite.

An asterisk marks a peak that was not proven in time. The exit status is 1 if a rewriting costs memory or outputs
differ by more than is allowed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from planner import ROOT, run_parts, show

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.memory import memory_graph, minimum_peak, peak_bytes
from tvm_pipeline.memory.orders import Ordering, kahn_order, program_order
from tvm_pipeline.memory.rewriting import rewritable, rewrite, rewritten

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support import memory_networks as networks

Make = Callable[[], OperatorGraph]


def pair(genotype: networks.Genotype, filters: int, size: int) -> OperatorGraph:
    """Return two normal cells, the first of which reads tensors of `filters` channels."""
    net = networks.Net()
    first = net.input(size, size, filters)
    second = networks.add_cell(net, genotype, net.input(size, size, filters), first, filters, False)
    networks.add_cell(net, genotype, first, second, filters, False)
    return net.graph(f"{genotype.name}-pair")


def dense_block(layers: int = 6, growth: int = 12, size: int = 28) -> OperatorGraph:
    """Return DenseNet's block (Huang et al., CVPR 2017): each layer reads all before it, and adds channels."""
    net = networks.Net()
    x = net.conv(net.input(size, size, 3), 2 * growth, 9)
    for _ in range(layers):
        x = net.concat(x, net.conv(net.conv(net.relu(x), 4 * growth, kind="conv2d+relu"), growth, 9))
    net.conv(net.relu(x), growth)
    return net.graph("dense-block")


def branches(count: int = 3, filters: int = 16, size: int = 16) -> OperatorGraph:
    """Return the end of an Inception module, and the convolution behind it."""
    net = networks.Net()
    x = net.input(size, size, 4)
    net.conv(net.concat(*(net.conv(x, filters) for _ in range(count))), 4)
    return net.graph("branches")


PAIRS: dict[str, Make] = {
    f"{name}, two cells": partial(pair, genotype, filters, 28)
    for name, genotype, filters in (
        ("DARTS", networks.DARTS, 48),
        ("NASNet-A", networks.NASNET, 44),
        ("PNASNet", networks.PNASNET, 54),
        ("AmoebaNet-A", networks.AMOEBANET, 50),
    )
}
WHOLE: dict[str, Make] = {
    "dense block": dense_block,
    **{name: make for name, make in networks.NETWORKS.items() if name not in networks.CELLS},
}


COLUMNS = (
    *("network", "Kahn", "program order", "optimal", "partitioned", "piecewise, too"),
    *("Kahn / optimal", "/ partitioned", "/ piecewise"),
)


def int8(graph: OperatorGraph) -> OperatorGraph:
    operators = (replace(o, outputs=tuple(replace(t, dtype="int8") for t in o.outputs)) for o in graph.operators)
    return replace(graph, inputs=tuple(replace(t, dtype="int8") for t in graph.inputs), operators=tuple(operators))


def peaks(graph: OperatorGraph, limit_s: float) -> list[Ordering]:
    """Return the peaks of Kahn's, program and best order, and of the best with partitioned and with all rewritings."""
    memory = memory_graph(graph)
    free = (order(memory) for order in (kahn_order, program_order))
    best = minimum_peak(memory, time_limit_s=limit_s)
    how = rewritable(graph, memory)
    partitioned = rewrite(graph, memory, [n for n in how if how[n] == "partitioned"], time_limit_s=limit_s).ordering
    if any(tensor.dtype == "int8" for tensor in graph.inputs):
        everything = rewrite(graph, memory, time_limit_s=limit_s).ordering
    else:  # all of them cost no memory: which of them are needed is not searched
        everything = minimum_peak(rewritten(graph, memory, how), time_limit_s=limit_s)
    orders = [Ordering(order, peak_bytes(memory, order), 0) for order in free]
    return [*orders, best, partitioned, min(everything, partitioned, key=lambda found: found.peak_bytes)]


def peak_rows(graphs: dict[str, OperatorGraph], limit_s: float) -> tuple[list[list[str]], list[list[int]]]:
    rows, figures = [], []
    for name, graph in graphs.items():
        found = peaks(graph, limit_s)
        sizes = [ordering.peak_bytes for ordering in found]
        cells = [f"{o.peak_bytes:,}{'' if o.status == 'optimal' or i < 2 else '*'}" for i, o in enumerate(found)]
        rows.append([name, *cells, *(f"{sizes[0] / size:.3f}" for size in sizes[2:])])
        figures.append(sizes)
    return rows, figures


def report_peaks(short: bool) -> list[str]:
    limit_s = 0.2 if short else 10.0
    cells = {name: make() for name, make in networks.CELLS.items()}
    pairs = {name: make() for name, make in PAIRS.items()}
    whole = {} if short else {name: make() for name, make in WHOLE.items()}
    if short:
        cells, pairs = {"DARTS normal": cells["DARTS normal"]}, {}
    quantized = {name: int8(graph) for name, graph in (cells | pairs).items()}
    failed = []
    for kind, averaged, others in (("float32", cells | pairs, whole), ("int8", quantized, {})):
        rows, figures = peak_rows(averaged, limit_s)
        for label, chosen in (("cells", cells), ("cells and pairs", averaged)):
            picked = [sizes for name, sizes in zip(averaged, figures, strict=True) if name in chosen]
            for baseline, base in ((0, "Kahn"), (1, "program order")):
                ratios = (statistics.geometric_mean(s[baseline] / s[i] for s in picked) for i in (2, 3, 4))
                rows.append([f"geometric mean, {label}: {base}", "", "", "", "", "", *(f"{r:.3f}" for r in ratios)])
        more, sizes = peak_rows(others, limit_s)
        show(f"1. Peaks, bytes, {kind}", COLUMNS, [*rows, *more])
        names = [*averaged, *others]
        failed += [f"{n} ({kind})" for n, s in zip(names, [*figures, *sizes], strict=True) if max(s[3:]) > s[2]]
    return failed


def report_relay(short: bool) -> list[str]:
    from tvm_pipeline_tvm.installed_ir import installed_ir

    if installed_ir() != "relay":
        return []
    made: dict[str, Make] = {"three branches": branches}
    if not short:
        made |= {
            "dense block": partial(dense_block, 6, 8, 16),
            "DARTS, two cells": partial(pair, networks.DARTS, 16, 28),
            "NASNet-A, two cells": partial(pair, networks.NASNET, 16, 28),
        }
    rows, failed = [], []
    for name, make in made.items():
        sizes, difference = relay_sizes(make())
        for kind, (before, ordered, rewritten_, both) in sizes.items():
            cells = [f"{size:,}" if size else "" for size in (before, ordered, rewritten_, both)]
            rows.append([name, kind, *cells, f"{ordered / both:.3f}", f"{difference:.1e}"])
        failed += [name] if difference > 1e-5 or sizes["optimal peak"][3] > sizes["optimal peak"][1] else []
    columns = (
        "network",
        "bytes",
        "as written",
        "ordered",
        "rewritten",
        "both",
        "ordered / both",
        "greatest difference",
    )
    show("2. Relay; differences are shares of the largest output", columns, rows)
    return failed


def relay_sizes(graph: OperatorGraph) -> tuple[dict[str, tuple[int, int, int, int]], float]:
    """Return bytes as written, ordered, rewritten, and both, as three allocators see them; and how outputs differ."""
    from graph_networks import relay_network

    from tvm_pipeline_tvm.host.detection import host_target
    from tvm_pipeline_tvm.relay.importer import import_model
    from tvm_pipeline_tvm.relay.memory_order import MemoryOrder, planned_bytes
    from tvm_pipeline_tvm.relay.rewrite_concat import RewriteConcat, optimal_peak_bytes

    import tvm  # isort: skip
    from tvm import relay  # isort: skip

    mod, params = import_model(relay_network(graph))
    mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
    fuse = tvm.transform.Sequential([relay.transform.FuseOps(2), relay.transform.InferType()])
    device = Device("cpu0", "host", (0,), host_target())
    planned, arenas, outputs, peaks = [], [], [], []
    mods = [relay.transform.InferType()(mod)]
    mods.append(RewriteConcat()(mods[0]))
    for each in mods:
        planned += [planned_bytes(fuse(each)), planned_bytes(fuse(MemoryOrder()(each)))]
        sizes, arrays = arena(Model(graph.name, "relay.json", tvm.ir.save_json(each).encode()), device)
        arenas += sizes
        outputs.append(arrays)
        peaks += [0, optimal_peak_bytes(each)]
    difference = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(*outputs, strict=True))
    kinds = {"optimal peak": peaks, "arena of a stage": arenas, "TVM's planner": planned}
    return {kind: (b[0], b[1], b[2], b[3]) for kind, b in kinds.items()}, difference


def arena(model: Model, device: Device) -> tuple[tuple[int, int], list[Any]]:
    """Return the arena of the whole network, without and with the least-memory order, and its outputs for noise."""
    from tvm_pipeline_tvm.host.host import bind
    from tvm_pipeline_tvm.relay.compiled import RelayModel

    compiled = RelayModel.compile(model, [device.target], bind, "memory")
    operators = compiled.graph.operator_names
    bind(device)
    stage = compiled.stage(operators, device)
    outputs = [port.buffer() for port in stage.outputs]
    stage.run([noise(port) for port in stage.inputs], outputs)
    return compiled.activation_bytes(operators, device), outputs


DESK = """name = "one core"
[[device]]
name = "core"
backend = "{}"
target = "{}"
cores = [0]
"""


def report_product(short: bool) -> list[str]:
    """Compile models with `--memory-rewrite`, on both backends."""
    from tvm_pipeline_tvm.host.detection import host_target
    from tvm_pipeline_tvm.installed_ir import installed_ir

    ir = installed_ir()

    made: dict[str, Make] = {"three branches": branches}
    if not short:
        made |= {
            "dense block": partial(dense_block, 6, 8, 16),
            "DARTS, two cells": partial(pair, networks.DARTS, 16, 28),
            "AmoebaNet-A, two cells": partial(pair, networks.AMOEBANET, 16, 28),
        }
    rows, failed = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host, tflite = folder / "host.toml", folder / "tflite.toml"
        host.write_text(DESK.format("host", host_target()))
        tflite.write_text(DESK.format("edgetpu", "tflite"))
        files: list[tuple[str, Path | str, Path]] = []
        for network, make in made.items():
            written = tflite_files(make(), folder)
            if ir == "relax":
                files.append((f"{network}, Relax", written, host))
            elif not short:  # Relay comes with the three pools, too
                files.append((f"{network}, Relay", relay_files(make(), folder), host))
            files.append((f"{network}, TFLite", written, tflite))
        if ir == "relay":
            files.append(("three pools in int8, Relay", int8_files(folder), host))
        if ir == "relay" and not short:
            files += [("squeezenet, Relay", "squeezenet", host), ("densenet-121, Relay", "densenet-121", host)]
            cells = [read_graph(path) for path in sorted((ROOT / "profiles/swiftnet").glob("*.json"))]
            files += [(f"{cell.name} in float, Relay", relay_files(cell, folder), host) for cell in cells]
        for label, file, desk in files:
            row, is_good = product_row(label, file, desk, 1 if short else 30)
            rows.append(row)
            failed += [] if is_good else [label]
    columns = ("model", "as it is", "ordered", "rewritten", "ordered / rewritten", "in parts", "difference", "time")
    show("3. compile --memory-rewrite: bytes of the arena of the whole model", columns, rows)
    return failed


def product_row(label: str, file: Path | str, desk: Path, rounds: int) -> tuple[list[str], bool]:
    """Return the row, and whether a rewriting kept what it must keep."""
    from tvm_pipeline.workflow.steps import compile_source

    plain = compile_source(file, None, desk, order="memory")
    made = compile_source(file, None, desk, memory_rewrite=True)
    found, device = made.rewriting, made.platform.devices[0]
    assert found is not None
    names = plain.compiled.graph.operator_names
    usual, ordered = plain.compiled.activation_bytes(names, device)
    if not found.operators:
        return [label, f"{usual:,}", f"{ordered:,}", "", "", "nothing", "", ""], True
    cells = [f"{usual:,}", f"{ordered:,}", f"{found.arena_bytes[1]:,}", f"{ordered / found.arena_bytes[1]:.3f}"]
    with ThreadPoolExecutor(1) as pool:  # a thread of its own, which is bound to the core
        taken = pool.submit(time_over, plain.compiled, made.compiled, device, rounds).result()
    row = [label, *cells, str(len(found.operators)), f"{found.difference:.1e}", taken]
    return row, found.arena_bytes[1] <= ordered and found.difference <= found.tolerance


def time_over(one: CompiledModel, other: CompiledModel, device: Device, rounds: int) -> str:
    """Return processor time of a frame of `other` over that of `one`: the median of rounds in turns, and their ends."""
    frames = []
    for compiled in (one, other):
        stage = compiled.stage(compiled.graph.operator_names, device)
        stage.bind()
        inputs, outputs = [noise(port) for port in stage.inputs], [port.buffer() for port in stage.outputs]
        frames.append(partial(stage.run, inputs, outputs))
    ratios = []
    for _ in range(rounds + 1):
        seconds = []
        for run in frames:
            began = time.thread_time()
            run()
            seconds.append(time.thread_time() - began)
        ratios.append(seconds[1] / seconds[0])
    kept = ratios[1:]  # the first round warms up
    return f"{statistics.median(kept):.2f} ({min(kept):.2f}-{max(kept):.2f})"


def relay_files(graph: OperatorGraph, folder: Path) -> Path:
    from graph_networks import relay_network

    return saved(relay_network(graph), folder / f"{graph.name}.json")


def saved(model: Model, path: Path) -> Path:
    path.write_bytes(model.content)
    path.with_suffix(".params").write_bytes(model.params)
    return path


def tflite_files(graph: OperatorGraph, folder: Path) -> Path:
    from tflite_networks import tflite_file

    path = folder / f"{graph.name}.tflite"
    path.write_bytes(tflite_file(graph))
    return path


def int8_files(folder: Path) -> Path:
    """Write a quantized network: three pools of a picture, and a convolution of all of them to one channel."""
    from tests.support.networks import Weights, as_model

    import tvm  # isort: skip
    from tvm import relay  # isort: skip

    one, zero, weights = relay.const(0.05), relay.const(0), Weights()
    data = relay.var("data", shape=(1, 32, 16, 16), dtype="int8")
    pools = [relay.nn.max_pool2d(data, (size, size), padding=(size // 2, size // 2)) for size in (3, 5, 7)]
    filters = weights(2, 96, 3, 3, dtype="int8")
    options = {"kernel_size": (3, 3), "channels": 2, "padding": (1, 1)}
    x = relay.qnn.conv2d(relay.concatenate(pools, axis=1), filters, zero, zero, one, relay.const(0.01), **options)
    x = relay.qnn.requantize(x, relay.const(0.0005), zero, relay.const(0.5), zero, out_dtype="int8")
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(x), x))
    return saved(as_model("pools", relay.transform.InferType()(mod), weights.params), folder / "pools.json")


PARTS: dict[str, Callable[[bool], list[str]]] = {
    "peaks": report_peaks,
    "relay": report_relay,
    "product": report_product,
}


def main() -> None:
    if failed := list(chain.from_iterable(run_parts(__doc__, PARTS))):
        sys.exit(f"not as it must be: {', '.join(failed)}")


if __name__ == "__main__":
    main()
