"""Measure what a second host brings to a pipeline, behind a link of a given rate.

The second host is a network namespace of this machine, with one of its cores, behind a pair of virtual network cards
whose rate the kernel limits (`tc`, token bucket filter). `serve-rpc` runs there, the pipeline here on another core. The
model is measured and planned on both hosts. Three plans then run in turns: the best plan, the best plan with
`concurrent_copies`, by which tensors travel while the other host computes, and the best plan of this host alone.
Asked: a plan that gains at least 1.2 times. The namespace takes root and the commands `ip` and `tc`; without them the
link is the loopback, whose rate nothing limits, and it says so. It first holds the backend `remote` to its contract.

    python benchmarks/several_hosts.py             # about six minutes
    python benchmarks/several_hosts.py --short     # for CI
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from networks import HAS_RELAY, exported
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import load
from tvm_pipeline.core.plan import Plan, shown_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline.runtime.comparison import Run, in_turn, runner
from tvm_pipeline.runtime.verification import VERIFY_S
from tvm_pipeline.testing import check_backend
from tvm_pipeline.workflow.steps import decide, planned
from tvm_pipeline_hosts.remote.remote_backend import RemoteBackend

NETWORKS, RATES = ("resnet-18", "mobilenet", "squeezenet"), ("10gbit", "1gbit", "100mbit")
NAMESPACE, NEAR, FAR = "tvmp-barn", "10.77.9.1", "10.77.9.2"
LOOPBACK = "loopback, not limited"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one tiny network, one rate, one turn")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("it takes two cores, one for each host")
    rates = RATES[1:2] if arguments.short else RATES
    with tempfile.TemporaryDirectory() as folder, other_host() as (address, limit):
        if arguments.short:
            networks = [str(write_picture_net(Path(folder) / "net.onnx"))]
        else:
            networks = [name if HAS_RELAY else str(exported(name)) for name in NETWORKS]
            check(address, cores[1], networks[-1])
        table = Table(title="Two hosts of one core each, frames a second; the gain is the median of turns side by side")
        of_plan = "best plan, predicted, measured", "gain"
        for column in ("network", "link", "there", "back", "one host", *of_plan, "copies beside computing", "gain"):
            table.add_column(column)
        for rate in rates if limit else [LOOPBACK]:
            if limit:
                limit(rate)
            for network in networks:
                table.add_row(Path(network).stem, rate, *figures(network, address, cores, arguments.short))
    Console(width=150).print(table)


def check(address: str, core: int, network: str) -> None:
    """Hold the backend to its contract, with a core of the other host."""
    with closing(RemoteBackend()) as backend:
        check_backend(backend, load(network), [Device("barn", "remote", target=f"{address}/cpu{core}")])
    print("the backend remote keeps the contract")


def figures(network: str, address: str, cores: list[int], short: bool) -> list[str]:
    """Return a row: how long a megabyte travels, the best plan of both hosts, and what it gains.

    Args:
        short: with the plan that is predicted to be the best, which then runs once.
    """
    platform = f"""name = "two-hosts"
[[device]]
name = "here"
cores = [{cores[0]}]
[[device]]
name = "barn"
backend = "remote"
target = "{address}/cpu{cores[1]}"
"""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(platform)
        file.flush()
        with planned(network, platform=Path(file.name)) as subject:
            assert subject.compiled is not None
            problem = subject.problem()
            here, barn = subject.platform.devices
            beside = replace(subject.platform, devices=(here, replace(barn, concurrent_copies=True)))
            runs: list[tuple[Plan, Run]] = []
            for platform in (subject.platform, beside):
                asked = replace(problem, platform=platform)
                decision, _ = decide(asked, compiled=subject.compiled, verify_s=0.0 if short else VERIFY_S)
                run = runner(subject.compiled, platform)
                runs.append((decision.plan, run))
            runs.append((next(plan for plan in decision.candidates if plan.devices == ("here",)), run))
            fps: list[list[float]] = [[] for _ in runs]
            for round_ in range(1 if short else 9):
                for index in in_turn(range(len(runs)), round_):
                    plan, run = runs[index]
                    fps[index].append(run(plan, 0.1 if short else 1.0).throughput_fps)
            moved = subject.profile.devices["barn"]
            assert moved.receive is not None
            assert moved.send is not None
            return [
                f"{moved.receive.seconds(1_000_000) * 1e3:.1f} ms/MB",
                f"{moved.send.seconds(1_000_000) * 1e3:.1f} ms/MB",
                f"{statistics.median(fps[-1]):.1f}",
                *(text for (plan, _), own in zip(runs[:-1], fps, strict=False) for text in gained(plan, own, fps[-1])),
            ]


def gained(plan: Plan, fps: list[float], alone: list[float]) -> tuple[str, str]:
    """Return a plan with its frames a second, predicted and measured, and its gain over one host, turn by turn."""
    ratios = [best / one for best, one in zip(fps, alone, strict=True)]
    figures = f"{plan.predicted.throughput_fps:.1f}, {statistics.median(fps):.1f}"
    return (
        f"{shown_stages(plan.stages)}, {figures}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
    )


@contextmanager
def other_host() -> Iterator[tuple[str, Callable[[str], None] | None]]:
    """Yield the address of `serve-rpc` on the other host, and what limits the link's rate; None where nothing can."""
    with ExitStack() as stack:
        limit: Callable[[str], None] | None = None
        enter: list[str] = []
        try:
            stack.enter_context(namespace())
            address, limit, enter = f"{FAR}:9190", limit_rate, ["ip", "netns", "exec", NAMESPACE]
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no network namespace ({error}): the link is the loopback", file=sys.stderr)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                address = "{}:{}".format(*listener.getsockname())
        serve = [sys.executable, "-m", "tvm_pipeline.cli", "serve-rpc", "--listen", address, "--allow-others"]
        process = stack.enter_context(
            subprocess.Popen([*enter, *serve], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
        stack.callback(process.terminate)
        assert process.stdout is not None
        if not any(b"listens on" in line for line in process.stdout):
            sys.exit("the other host's serve-rpc ended")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # what it says of its clients
        yield address, limit


@contextmanager
def namespace() -> Iterator[None]:
    """Make the namespace of the other host, with a pair of network cards between it and this one."""
    calls(f"ip netns add {NAMESPACE}")
    try:
        calls(f"ip link add tvmp0 type veth peer name tvmp1 netns {NAMESPACE}")
        calls(f"ip address add {NEAR}/24 dev tvmp0", "ip link set tvmp0 up")
        inside = f"ip netns exec {NAMESPACE}"
        calls(f"{inside} ip address add {FAR}/24 dev tvmp1", f"{inside} ip link set tvmp1 up")
        calls(f"{inside} ip link set lo up")
        yield
    finally:
        calls(f"ip netns delete {NAMESPACE}")


def limit_rate(rate: str) -> None:
    """Limit the link to this rate in both directions."""
    for enter, card in (("", "tvmp0"), (f"ip netns exec {NAMESPACE} ", "tvmp1")):
        calls(f"{enter}tc qdisc replace dev {card} root tbf rate {rate} burst 256k latency 50ms")


def calls(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
