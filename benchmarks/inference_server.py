"""`tvm-pipeline serve --http` beside onnxruntime behind the same web server: requests a second by Triton's client.

    python benchmarks/inference_server.py                  # two networks, four clients, in turns
    python benchmarks/inference_server.py --short          # a small network, briefly, for CI

Both servers have all cores of this machine, which the clients share. Ours runs the plan that `serve` makes for
throughput; onnxruntime has a session of one thread on each core, which is its best setting for throughput. Requests and
answers are binary. Needs the extra `kserve` and `pip install 'tritonclient[http]'`.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
from networks import load_lively
from numpy.typing import NDArray
from peers import CONSOLE, network_file
from rich.table import Table
from tritonclient import http

from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.frontends import load

CLIENTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mobilenet", "resnet-18"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--short", action="store_true", help="a small network, briefly: proves that it works")
    parser.add_argument("--onnxruntime", type=Path, metavar="FILE", help="be the server of this file")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.onnxruntime:
        serve_by_onnxruntime(options.onnxruntime, options.port)
        return
    if options.short:
        options.models, options.rounds, options.seconds = ["branching"], 2, 0.1
    table = Table("network", "ours, requests/s", "onnxruntime", "ours over it", "latency, ms", "onnxruntime's", "apart")
    for name in options.models:
        table.add_row(name, *row(name, options.rounds, options.seconds))
    CONSOLE.print(table)


def row(name: str, rounds: int, seconds: float) -> list[str]:
    """Return the figures of one network, medians with quartiles of the ratio."""
    with TemporaryDirectory() as folder:
        path = network_file(load_lively(name), Path(folder))
        model = load(path)
        frame = {tensor.name: noise(Port.of(tensor)) for tensor in model.inputs}
        ours = [sys.executable, "-m", "tvm_pipeline.cli", "serve", str(path), "--name", "net"]
        own = [sys.executable, __file__, "--onnxruntime", str(path)]
        with server(ours, "--http") as first, server(own, "--port") as second:
            answers = [answer(port, frame) for port in (first, second)]
            apart = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(*answers, strict=True))
            turns: list[list[tuple[float, float]]] = [[], []]
            for round_ in range(rounds):
                for index in (0, 1) if round_ % 2 else (1, 0):
                    turns[index].append(turn((first, second)[index], frame, seconds))
    rates = [[rate for rate, _ in each] for each in turns]
    ratios = [one / other for one, other in zip(*rates, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else [ratios[0]] * 3
    latencies = [statistics.median(latency for _, latency in each) * 1e3 for each in turns]
    return [
        *(f"{statistics.median(each):.1f}" for each in rates),
        f"{middle:.3f} ({low:.3f} to {high:.3f})",
        *(f"{latency:.2f}" for latency in latencies),
        f"{apart:.1e}",
    ]


@contextmanager
def server(command: Sequence[str], option: str) -> Iterator[int]:
    """Run a server, and yield its port when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    process = subprocess.Popen([*command, option, str(port)], stderr=subprocess.DEVNULL)
    client = http.InferenceServerClient(f"127.0.0.1:{port}")
    try:
        while not is_ready(client):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
            time.sleep(0.2)
        yield port
    finally:
        client.close()
        process.terminate()
        process.wait()


def is_ready(client: Any) -> bool:
    try:
        return bool(client.is_server_ready())
    except OSError:
        return False


def request_of(frame: Mapping[str, NDArray[Any]]) -> list[Any]:
    found = []
    for name, array in frame.items():
        found.append(http.InferInput(name, list(array.shape), "FP32"))
        found[-1].set_data_from_numpy(array)
    return found


def answer(port: int, frame: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    with http.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=600.0) as client:
        found = client.infer("net", request_of(frame))
        return [found.as_numpy(output["name"]) for output in found.get_response()["outputs"]]


def turn(port: int, frame: Mapping[str, NDArray[Any]], seconds: float) -> tuple[float, float]:
    """Return the requests a second of all clients, and the median latency."""
    latencies: list[float] = []

    def ask() -> None:
        request = request_of(frame)
        with http.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=600.0) as client:
            client.infer("net", request)
            began.wait()
            while time.perf_counter() < end_s[0]:
                sent_s = time.perf_counter()
                client.infer("net", request)
                latencies.append(time.perf_counter() - sent_s)

    end_s = [0.0]
    began = threading.Barrier(CLIENTS, lambda: end_s.__setitem__(0, time.perf_counter() + seconds))
    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(latencies) / seconds, statistics.median(latencies)


def serve_by_onnxruntime(path: Path, port: int) -> None:
    """Serve a file by a session of one thread on each core, with the web server of `serve`."""
    import uvicorn

    from tvm_pipeline.core.graph import OperatorGraph
    from tvm_pipeline_video.service.inference import InferenceModel
    from tvm_pipeline_video.service.inference_http import application

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in os.sched_getaffinity(0):
        sessions.put(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]))

    class Plain(InferenceModel):
        is_ready = True

        def infer(self, inputs: Mapping[str, NDArray[Any]], wanted: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
            session = sessions.get()
            try:
                names = [output.name for output in session.get_outputs()]
                return dict(zip(names, session.run(names, dict(inputs)), strict=True))
            finally:
                sessions.put(session)

    graph = OperatorGraph("net", load(path).inputs, (), ())
    model = Plain(None, graph, "net")  # type: ignore[arg-type]
    uvicorn.run(application(model), host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
