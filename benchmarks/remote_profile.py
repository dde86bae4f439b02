"""A profile of a board over its connection against a profile of the same machine: both are measured here, in turns.

    python benchmarks/remote_profile.py
    python benchmarks/remote_profile.py --model mobilenet --rounds 9

The board is a server of this machine on loopback, whose session is a process of its own. Printed for each device: the
seconds of the whole model remotely over locally, the median of the rounds and the least of each side, and how far apart
two local profiles of the same run are, which is the noise of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.workflow.machine import HERE, Machine
from tvm_pipeline.workflow.steps import REPEATS, Compiled, compile_source, measured_profile
from tvm_pipeline_hosts.remote.address import Address
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.remote_machine import RemoteMachine
from tvm_pipeline_hosts.remote.serving import BoardServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="squeezenet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="a tiny network, one round: proves that it works")
    arguments = parser.parse_args()
    rounds, repeats = (1, 4) if arguments.short else (arguments.rounds, REPEATS)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(BoardServer(Address("127.0.0.1", 0), Path(folder))) as server,
    ):
        tiny = Path(folder) / "net.onnx"
        model = str(write_picture_net(tiny)) if arguments.short else arguments.model
        threading.Thread(target=server.serve, daemon=True).start()
        with Board.connect(str(server.address)) as board:
            machine = RemoteMachine(board)
            own, there = compile_source(model), compile_source(model, machine=machine)
            found: dict[str, list[Profile]] = {"local": [], "again": [], "remote": []}
            for index in range(rounds):
                for kind in sorted(found, reverse=bool(index % 2)):
                    print(f"round {index + 1} of {rounds}: {kind}", file=sys.stderr, flush=True)
                    is_remote = kind == "remote"
                    made = there if is_remote else own
                    found[kind].append(_measured(made, machine if is_remote else HERE, repeats))
    _print(own.platform, found)


def _measured(made: Compiled, machine: Machine, repeats: int) -> Profile:
    return measured_profile(made, None, repeats=repeats, machine=machine)


def _print(platform: Platform, found: dict[str, list[Profile]]) -> None:
    print(
        f"{'device':10} {'local ms':>9} {'remote ms':>9} {'remote/local':>13} {'least/least':>12} {'local/local':>12}"
    )
    for device in platform.devices:
        seconds = {
            kind: [profile.devices[device.name].whole_s for profile in profiles] for kind, profiles in found.items()
        }
        ratios, noise = (
            [other / one for one, other in zip(seconds["local"], seconds[kind], strict=True)]
            for kind in ("remote", "again")
        )
        local, remote = min(seconds["local"]), min(seconds["remote"])
        print(
            f"{device.name:10} {local * 1e3:9.3f} {remote * 1e3:9.3f} {statistics.median(ratios):13.3f} "
            f"{remote / local:12.3f} {statistics.median(noise):12.3f}"
        )


if __name__ == "__main__":
    main()
