"""No command that was not asked to use the network uses it, whichever engine it runs.

Commands run in a separate network namespace. A name server listens at its loopback, and the test counts the
packets.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.support.onnx_models import write_pooling_net
from tests.support.parts import needs

NAMESPACE = ["unshare", "--mount", "--net"]
pytestmark = pytest.mark.skipif(
    subprocess.call([*NAMESPACE, "true"], stderr=subprocess.DEVNULL) != 0, reason="a network of its own takes root"
)

WATCH = """
import fcntl, socket, struct, subprocess, sys
with socket.socket() as any_one:
    fcntl.ioctl(any_one, 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS: the loopback is up
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
names.bind(("127.0.0.1", 53))
status = subprocess.call(sys.argv[1:])
packets.setblocking(False)
count = 0
try:
    while packets.recv(2048):
        count += 1
except BlockingIOError:
    print("packets:", count)
sys.exit(status)
"""

OURS = """
import ast, sys
import tvm_pipeline_command
for arguments in ast.literal_eval(sys.argv[1]):  # one after the other, as a process takes seconds to import engines
    sys.argv[1:] = arguments
    try:
        tvm_pipeline_command.main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
"""


def packets(folder, *command: object) -> int:
    """Return how many packets a command sends; it must succeed."""
    resolver = folder / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    watched = shlex.join([sys.executable, "-c", WATCH, *map(str, command)])
    script = f"mount --bind {resolver} /etc/resolv.conf; exec {watched}"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([*NAMESPACE, "bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("packets:")[2])


def test_a_query_is_seen(tmp_path):
    ask = "import socket, contextlib\nwith contextlib.suppress(OSError): socket.getaddrinfo('example.org', 80)"
    assert packets(tmp_path, sys.executable, "-c", ask) > 0


@pytest.mark.thorough
def test_compile_bench_and_run_send_nothing(tmp_path):
    engines = {"host": "tvm", "onnxruntime": "onnxruntime", "openvino": "openvino"}
    for package in engines.values():
        needs(package)
    write_pooling_net(tmp_path / "net.onnx")
    devices = (f'[[device]]\nname = "by-{engine}"\nbackend = "{engine}"\ncores = [0]\n' for engine in engines)
    (tmp_path / "p.toml").write_text('name = "p"\n' + "".join(devices))
    needs("tvm_pipeline_video")
    model, bundle, platform = tmp_path / "net.onnx", tmp_path / "net.tar", ("--platform", tmp_path / "p.toml")
    commands = (
        ("compile", model, "-o", bundle, "--verify", "0", *platform),
        ("bench", bundle, "--seconds", "0.05", "--rounds", "1"),
        ("run", bundle, "--source", "synthetic:64x48@30:5", "--verify", "0"),
    )
    assert packets(tmp_path, sys.executable, "-c", OURS, repr([[*map(str, command)] for command in commands])) == 0
    assert not list(tmp_path.rglob("Microsoft"))
