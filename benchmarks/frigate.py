"""What Frigate's protocol adds to the latency of a picture, and the rate with several endpoints.

    python benchmarks/frigate.py            # the street detector of examples/, about two minutes
    python benchmarks/frigate.py --short    # an empty YOLO, briefly: proves that it works

`inside` is the work of a request without ZeroMQ: a picture is prepared, goes through the pipeline, and the outputs
become rows. `Frigate's` is what the client waits for, in another process; `added` is the difference for the same
request. After each, the client sends the picture to a server that only multiplies matrices for about as long: what that
adds is ZeroMQ's and the machine's. Then some clients at one endpoint ask as fast as they can, and every answer is
compared with that of a direct call. All of them share the cores with the pipeline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import zmq
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.frigate_client import FrigateClient
from tests.support.tiny_yolo import write_tiny_yolo
from tvm_pipeline.core.plan import describe
from tvm_pipeline_video.service.frigate import Detector, interpretation, serve
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.running_model import opened_pipeline
from tvm_pipeline_video.service.settings import Settings

STREET = Path(__file__).parents[1] / "examples/street/detector.tflite"
PICTURES = 8  # that differ
PLAIN_S = 0.024  # of multiplying matrices
CONSOLE = Console(width=150)


def pictures(width: int, height: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (1, height, width, 3), np.uint8) for _ in range(PICTURES)]


def ask(endpoint: str, plain: str, count: int, width: int, height: int) -> None:
    """Ask `count` times in this process, which `clients` has started; print seconds and a digest of the answers."""
    images, seconds, plainly, answers = pictures(width, height), [], [], {}
    with ExitStack() as stack:
        client = stack.enter_context(FrigateClient(endpoint))
        other = stack.enter_context(FrigateClient(plain)) if plain else None
        print(client.asks_for("benchmark"), flush=True)
        sys.stdin.readline()
        for number in range(count):
            began_s = time.perf_counter()
            rows, _ = client.detect(images[number % PICTURES])
            seconds.append(time.perf_counter() - began_s)
            answers.setdefault(number % PICTURES, set()).add(rows.tobytes().hex())
            if other:
                began_s = time.perf_counter()
                (inside_s,) = other.ask(b"", images[number % PICTURES].tobytes())
                plainly.append(time.perf_counter() - began_s - float(inside_s))
    found = {key: sorted(rows) for key, rows in answers.items()}
    print(json.dumps({"seconds": seconds, "added": plainly, "answers": found}))


def multiply(endpoint: str, context: zmq.Context, until: threading.Event) -> None:
    """Answer each request with the seconds in which this thread multiplied matrices."""
    matrix = np.random.default_rng(0).random((256, 256), np.float32)
    with context.socket(zmq.REP) as requests:
        requests.bind(endpoint)
        while not until.is_set():
            if requests.poll(100):
                requests.recv_multipart(copy=False)
                began_s = time.perf_counter()
                while (taken_s := time.perf_counter() - began_s) < PLAIN_S:
                    matrix @ matrix
                requests.send(str(taken_s).encode())


def clients(number: int, endpoint: str, count: int, size: tuple[int, int], plain: str = "") -> tuple[list[dict], float]:
    """Return what each client printed, and the seconds that all of them took."""
    made = [
        subprocess.Popen(
            [sys.executable, __file__, "--ask", endpoint, plain, *map(str, (count, *size))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(number)
    ]
    for process in made:
        process.stdout.readline()  # it is ready
    began_s = time.perf_counter()
    for process in made:
        process.stdin.write("\n")
        process.stdin.flush()
    found = [json.loads(process.stdout.readline()) for process in made]
    taken_s = time.perf_counter() - began_s
    for process in made:
        process.communicate()
    return found, taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=STREET)
    parser.add_argument("--device", default="", help="as `serve` takes it")
    parser.add_argument("--count", type=int, default=1000, help="requests of a client")
    parser.add_argument(
        "--short", action="store_true", help="an empty YOLO, two clients, 20 requests: proves that it works"
    )
    parser.add_argument("--ask", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        endpoint, plain, *numbers = options.ask
        ask(endpoint, plain, *map(int, numbers))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.short:
            options.model, options.count = write_tiny_yolo(folder / "tiny.onnx"), 20
        settings = Settings([options.model], device=options.device)
        pipeline, bundle = stack.enter_context(opened_pipeline(options.model, settings, Listener()))
        found, endpoint = interpretation(bundle), f"ipc://{folder}/frigate"
        right = direct(pipeline, Detector(found, "direct"), found.preprocessing.size)
        server = threading.Thread(target=serve, args=(pipeline, found, [endpoint]), kwargs={"model": "benchmark"})
        server.start()
        stack.callback(server.join)
        stack.callback(pipeline.stop)
        run(options, bundle.graph.name, pipeline, right, found.preprocessing.size, endpoint)


def direct(pipeline, detector, size) -> list[str]:
    """Return the rows of each picture by direct calls."""
    rows = []
    for image in pictures(*size):
        header = json.dumps({"shape": image.shape, "dtype": "uint8"}).encode()
        pipeline.submit(detector.prepared([header, image.tobytes()]))
        rows.append(detector.answer(pipeline.result().outputs)[1].hex())
    return rows


def run(options, name, pipeline, right, size, endpoint) -> None:
    began_s, inside_s = [time.perf_counter()], []
    prepared, answer = Detector.prepared, Detector.answer

    def timed_prepared(self, parts):
        began_s.append(time.perf_counter())
        return prepared(self, parts)

    def timed_answer(self, outputs):
        message = answer(self, outputs)
        inside_s.append(time.perf_counter() - began_s[-1])
        return message

    Detector.prepared, Detector.answer = timed_prepared, timed_answer
    plain, ended, context = f"{endpoint}-plain", threading.Event(), zmq.Context()
    other = threading.Thread(target=multiply, args=(plain, context, ended))
    other.start()
    [one], _ = clients(1, endpoint, options.count, size, plain)
    ended.set()
    other.join()
    context.term()
    Detector.prepared, Detector.answer = prepared, answer
    of_request = {"inside": np.array(inside_s[-options.count :]), "Frigate's": np.array(one["seconds"])}
    of_request["added"] = of_request["Frigate's"] - of_request["inside"]
    of_request["added to multiplying matrices"] = np.array(one["added"])
    CONSOLE.print(f"{name} {size[0]}x{size[1]}, {options.count} pictures, plan: {describe(pipeline.plan)}")
    for what, seconds in of_request.items():
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        CONSOLE.print(f"{what}: {p50:.2f} ms p50, {p99:.2f} p99")
    for count in (2,) if options.short else (1, 2, 4):
        found, taken_s = clients(count, endpoint, options.count, size)
        equal = sum(answers == [right[int(key)]] for one in found for key, answers in one["answers"].items())
        asked, rate = sum(len(one["answers"]) for one in found), count * options.count / taken_s
        CONSOLE.print(
            f"{count} clients: {rate:.1f} pictures a second; {equal} of {asked} pictures answered as directly"
        )


if __name__ == "__main__":
    main()
