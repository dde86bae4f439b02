"""Edge TPUs found and opened, on device trees and a libedgetpu that stand in for the real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from ai_edge_litert.interpreter import Interpreter

from tests.edgetpu.fakes import libedgetpu, usb_device
from tests.edgetpu.networks import random_feeds, random_network, run
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_edgetpu import delegate
from tvm_pipeline_edgetpu.delegate import absence, edge_tpus, load
from tvm_pipeline_edgetpu.model import read_model


def test_devices_are_found_in_the_kernels_tree(tmp_path):
    usb, dev = tmp_path / "usb", tmp_path / "dev"
    assert edge_tpus(usb, dev) == []  # neither folder is there
    usb_device(usb, "1-1", "1a6e", "089a")  # an Edge TPU before its first use
    usb_device(usb, "1-2", "1d6b", "0002")  # a hub
    usb_device(usb, "2-1", "18d1", "9302")  # an Edge TPU after it
    usb_device(usb, "2-2", "18d1", "4ee1")  # another device of Google's
    (usb / "usb1").mkdir()
    dev.mkdir()
    for name in ("apex_0", "apex_1", "apex_info", "apex"):
        (dev / name).touch()
    assert edge_tpus(usb, dev) == ["usb:0", "usb:1", "pci:0", "pci:1"]


@pytest.mark.parametrize("address", ["usb:0", "usb:1", "pci:0", "usb", "pci", ":2", ""])
def test_a_delegate_runs_a_model(tmp_path, plug, address):
    plug("usb:0,usb:1,pci:0")
    assert absence(address) is None
    content = random_network(1)
    (tmp_path / "model.tflite").write_bytes(content)
    feeds = random_feeds(read_model(tmp_path / "model.tflite").graph)
    interpreter = Interpreter(model_content=content, experimental_delegates=[load(address)])
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], feeds[detail["name"]])
    interpreter.invoke()
    want = run(content, feeds, xnnpack=True)
    for detail in interpreter.get_output_details():
        np.testing.assert_array_equal(interpreter.get_tensor(detail["index"]), want[detail["name"]])


@pytest.mark.parametrize(("listed", "address"), [("", ""), ("usb:0", "usb:1"), ("usb:0", "pci"), ("pci:0", ":1")])
def test_a_device_that_is_not_there(plug, listed, address):
    plug(listed)
    with pytest.raises(
        PlatformError, match=r"libedgetpu.so.1 cannot open it .*no such device.*; plugged in: .*; plug it in"
    ):
        load(address)
    reason = absence(address)
    assert (address or "any") in reason
    assert "\n" not in reason


@pytest.mark.parametrize("address", ["usb:", "usb:x", "pcie:0", "usb:-1", "usb:0\n", "0", "usb:0 Performance=low"])
def test_no_address(address):
    with pytest.raises(PlatformError, match="no address of an Edge TPU; write usb:0"):
        load(address)


def test_a_device_unplugged_between_two_uses(plug):
    plug("usb:0")
    load("usb:0")
    plug("")
    assert "cannot open it" in absence("usb:0")


@pytest.mark.parametrize("cycle", range(5))
@pytest.mark.parametrize(("left", "right"), [(True, True), (True, False), (False, True), (False, False)])
def test_two_addresses_are_two_sticks_whichever_is_cold(desk, cycle, left, right):
    """20 power cycles. An open stick has other numbers, so each address meant the other stick at the next use."""
    opened = desk(left=left, right=right)
    assert [absence("usb:0"), absence("usb:1")] == [None, None]  # as `settle` does
    for address in ("usb:0", "usb:1"):
        load(address)
    looked_at, used = opened()[-4:-2], opened()[-2:]
    assert sorted(used) == ["left", "right"]
    assert used == looked_at


@pytest.mark.parametrize("gone", ["left", "right"])
def test_a_stick_that_came_back_keeps_its_address(desk, tmp_path, gone):
    """It comes back with its boot loader and as the last one on the bus. The other stick is held meanwhile."""
    opened = desk(left=True, right=True)
    held = {address: load(address) for address in ("usb:0", "usb:1")}
    sticks = dict(zip(held, opened()[-2:], strict=True))
    [address] = [address for address, stick in sticks.items() if stick == gone]
    del held[address]
    for name, text in (("idVendor", "1a6e"), ("idProduct", "089a"), ("devnum", "9")):
        (tmp_path / "usb" / gone / name).write_text(f"{text}\n")
    load(address)
    assert opened()[-1] == gone


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("address", ["usb:0", "usb:1"])
def test_another_process_means_the_same_stick_while_one_is_away(desk, tmp_path, address):
    """So does the process of a stage that starts after a fault: `usb:0` must not be the stick that is left."""
    opened = desk(left=True, right=True)
    for each in ("usb:0", "usb:1"):
        load(each)
    shutil.rmtree(tmp_path / "usb" / "left")
    told, _ = in_a_process(f"print(absence({address!r}))")
    if address == "usb:0":
        assert "there is no device at /sys/bus/usb/devices/left any more" in told
    else:
        assert (told, opened()[-1]) == ("None\n", "right")


@pytest.mark.parametrize("cycle", range(20))
def test_cold_sticks_are_the_same_devices_in_each_process(desk, cycle):
    """As in each of 20 starts, whichever of the two has been opened first."""
    opened = desk(left=True, right=True)
    first, second = ("usb:0", "usb:1") if cycle % 2 else ("usb:1", "usb:0")
    load(first)
    os.environ[delegate.PATHS] = "{}"  # another process that was started by somebody else
    load(second)
    load(first)
    assert opened() == (["left", "right", "left"] if cycle % 2 else ["right", "left", "right"])


def in_a_process(code, **environment):
    """Run code in a new process; return its output and its errors."""
    code = "from tvm_pipeline_edgetpu.delegate import *\nfrom tvm_pipeline.errors import *\n" + code
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_without_the_library(tmp_path):
    code = "print(absence('usb:0'))"
    told, errors = in_a_process(code, LD_LIBRARY_PATH=str(tmp_path))
    assert told.startswith("Edge TPU usb:0: the library libedgetpu.so.1 cannot be loaded (libedgetpu.so.1: ")
    assert "libedgetpu1-std of https://github.com/feranick/libedgetpu" in told
    assert len(told.splitlines()) == 1
    assert errors == ""  # TFLite's own loader leaves an AttributeError behind


def test_a_library_that_is_another_one(tmp_path):
    (tmp_path / "libedgetpu.so.1").write_text("no library")
    told, errors = in_a_process("print(absence('usb'))", LD_LIBRARY_PATH=str(tmp_path))
    assert "cannot be loaded" in told
    assert errors == ""


def test_the_library_is_found_on_the_library_path():
    environment = {"LD_LIBRARY_PATH": str(libedgetpu().parent), "FAKE_EDGETPUS": "pci:0"}
    told, errors = in_a_process("print(absence('pci:0'), absence('usb'))", **environment)
    assert told.startswith("None Edge TPU usb: ")
    assert errors == ""


@pytest.mark.thorough
def test_a_tflite_that_this_system_cannot_load(tmp_path):
    """As ai-edge-litert 2.3.0 on JetPack 5, whose wheel pip installs although it needs a newer glibc."""
    folder = tmp_path / "ai_edge_litert"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "interpreter.py").write_text(
        'raise ImportError("/lib/aarch64-linux-gnu/libc.so.6: version `GLIBC_2.34\' not found (required by a.so)")'
    )
    code = """
from tvm_pipeline_edgetpu.edgetpu import EdgeTpuBackend
from tvm_pipeline_edgetpu.interpreter import make_interpreter
EdgeTpuBackend().detect()
try:
    make_interpreter(b"")
except PlatformError as error:
    print(error)
"""
    told, _ = in_a_process(code, PYTHONPATH=str(tmp_path))
    assert told.startswith("TFLite cannot be loaded: /lib/aarch64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found")
    assert told.endswith(". Where glibc is older than 2.34, run `pip install ai-edge-litert==2.1.0`\n")


USE = """
from tvm_pipeline_edgetpu.interpreter import make_interpreter
from tests.edgetpu.networks import random_network
for _ in range(2):
    try:
        make_interpreter(random_network(1), "usb:0").invoke()
        print("ran")
    except PlatformError as error:
        print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["TF_2_5", "TODAY"])
def test_a_library_of_another_tensorflow_ends_no_process(layout):
    """Both layouts of TfLiteRegistration: that of TensorFlow 2.5 ends a process whose delegate takes an operator."""
    environment = {"LD_LIBRARY_PATH": str(libedgetpu("KERNEL", layout).parent), "FAKE_EDGETPUS": "usb:0"}
    told, _ = in_a_process(USE, **environment)
    if layout == "TODAY":
        assert told == "ran\nran\n"
        return
    first, second = told.splitlines()  # it is tried again, since somebody may install another library
    assert first == second
    assert "Edge TPU usb:0: a copy of this process that used libedgetpu.so.1 (BuildLabel(FAKE), RuntimeVer" in first
    assert "ended by SIG" in first
    assert first.endswith("Install the newest one of https://github.com/feranick/libedgetpu/releases")


def test_an_open_does_not_hold_the_interpreters_lock(desk, tmp_path):
    """libedgetpu takes seconds for it; other stages of the process go on meanwhile."""
    desk(left=False)
    os.mkfifo(tmp_path / "usb" / "left" / "slow")
    code = """
import threading
opening = threading.Thread(target=load, args=["usb:0"])
opening.start()
open(sys.argv[1], "wb").write(b"!")  # which lets it end
opening.join()
print("opened")
"""
    told, _ = in_a_process(f"import sys; sys.argv[1:] = [{str(tmp_path / 'usb' / 'left' / 'slow')!r}]\n{code}")
    assert told == "opened\n"


@pytest.mark.thorough
@pytest.mark.parametrize("aborts", [1, 2])
def test_a_fault_in_the_copy_is_tried_again_before_the_library_is_blamed(desk, tmp_path, aborts):
    desk(left=False)
    (tmp_path / "usb" / "left" / "aborts").write_text(f"{aborts}")
    told, _ = in_a_process(USE, LD_LIBRARY_PATH=str(libedgetpu("KERNEL").parent))
    first, second = told.splitlines()
    assert second == "ran"
    if aborts == 1:
        assert first == "ran"
    else:
        assert "a copy of this process that used libedgetpu.so.1" in first
        assert "ended by SIGABRT" in first


PYCORAL = """
from ai_edge_litert.interpreter import load_delegate

def list_edge_tpus():
    return [{"type": "pci", "path": "/dev/apex_0"}, {"type": "usb", "path": "/sys/bus/usb/devices/2-1"}]

def load_edgetpu_delegate(options=None):
    print("pycoral opens", options)
    return load_delegate("libedgetpu.so.1", options)
"""


def test_pycoral_is_asked_where_it_is_installed(tmp_path):
    folder = tmp_path / "pycoral" / "utils"
    folder.mkdir(parents=True)
    (folder / "edgetpu.py").write_text(PYCORAL)
    environment = {"LD_LIBRARY_PATH": str(libedgetpu().parent), "FAKE_EDGETPUS": "usb:0", "PYTHONPATH": str(tmp_path)}
    told, _ = in_a_process("print(edge_tpus(), absence('usb:0'), sep='\\n')\nprint(absence('pci:0'))", **environment)
    listed, opened, absent, missing = told.splitlines()
    assert (listed, opened, absent) == ("pycoral opens {'device': 'usb:0'}", "['pci:0', 'usb:0']", "None")
    assert "plugged in: pci:0, usb:0" in missing


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "text",
    ["import tflite_runtime_of_2021", 'raise ImportError("generic_type: InterpreterWrapper is already registered")'],
)
def test_a_pycoral_that_cannot_be_loaded_is_named(tmp_path, text):
    """Its wheels need tflite_runtime 2.5, which is not there, or clashes with ai-edge-litert."""
    folder = tmp_path / "pycoral" / "utils"
    folder.mkdir(parents=True)
    (folder / "edgetpu.py").write_text(text)
    code = "from pathlib import Path\nprint(edge_tpus(Path('/no'), Path('/no')))"
    told, errors = in_a_process(code, PYTHONPATH=str(tmp_path))
    assert told == "[]\n"
    assert errors.startswith("pycoral is left out, since it cannot be loaded (")
    assert "https://github.com/feranick/pycoral" in errors


@pytest.mark.thorough
def test_the_other_package_called_pycoral_is_none(tmp_path):
    (tmp_path / "pycoral").mkdir()
    (tmp_path / "pycoral" / "__init__.py").write_text("")
    told, _ = in_a_process(
        "from pathlib import Path\nprint(edge_tpus(Path('/no'), Path('/no')))", PYTHONPATH=str(tmp_path)
    )
    assert told == "[]\n"
