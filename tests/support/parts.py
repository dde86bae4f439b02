"""The optional parts that tests need: how a test asks for one, and the command that installs it.

    needs("tvm")                        # at the head of a file, or in a fixture or a test: skip without it
    @pytest.mark.needs("mosquitto")     # the same as a mark of one test

A part is a module of Python, a program, a library of the system, or a second core. Every skip for a missing part comes
from here.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

_SBIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/opt/homebrew/sbin"
MOSQUITTO = shutil.which("mosquitto", path=_SBIN)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
FRIGATE = Path(os.environ.get("FRIGATE", "frigate"), "frigate/detectors/plugins/zmq_ipc.py")


def _module(name: str) -> Callable[[], object]:
    def is_here() -> bool:
        parent = name.rpartition(".")[0]
        return (not parent or find_spec(parent) is not None) and find_spec(name) is not None

    return is_here


def _program(*names: str) -> Callable[[], object]:
    """Return whether one of several programs is on the PATH."""
    return lambda: any(map(shutil.which, names))


def _opencl_platforms() -> list[bytes]:
    """Return the names of the platforms of OpenCL."""
    try:
        loader = ctypes.CDLL("libOpenCL.so.1")
    except OSError:
        return []
    platforms, count = (ctypes.c_void_p * 16)(), ctypes.c_uint()
    if loader.clGetPlatformIDs(16, platforms, ctypes.byref(count)):
        return []
    names = []
    for platform in platforms[: count.value]:
        name = ctypes.create_string_buffer(256)
        loader.clGetPlatformInfo(
            ctypes.c_void_p(platform), 0x0902, ctypes.c_size_t(256), name, None
        )  # CL_PLATFORM_NAME
        names.append(name.value)
    return names


def nvidia_file(name: str) -> Path | None:
    """Return a file of NVIDIA's packages of PyPI, if it is installed."""
    spec = find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(folder) / name for folder in folders if (Path(folder) / name).exists()), None)


def _swiftshader() -> bool:
    """Return whether Vulkan's loader is here, and the GPU in software that comes with Chromium."""
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return False
    return SWIFTSHADER.exists()


def _litert_openvino() -> bool:
    """Return whether the OpenVINO is here that LiteRT's compiler for Intel's NPUs is linked with."""
    found = find_spec("ai_edge_litert"), find_spec("openvino")
    if not all(found):
        return False
    litert, openvino = (Path(str(spec and spec.origin)).parent for spec in found)
    compiler = litert / "vendors/intel_openvino/compiler/libLiteRtCompilerPlugin_IntelOpenvino.so"
    named = re.search(rb"libopenvino\.so\.\d+", compiler.read_bytes()) if compiler.exists() else None
    return named is not None and (openvino / "libs" / named[0].decode()).exists()


def _gstreamer() -> bool:
    """Return whether GStreamer's loader of Python elements is here, and of this version of Python."""
    code = "import sys, gi; gi.require_version('GstVideo', '1.0'); print('%d.%d' % sys.version_info[:2])"
    for command in (["gst-inspect-1.0", "python"], ["/usr/bin/python3", "-c", code]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return False
    return done.stdout.strip() == ".".join(map(str, sys.version_info[:2]))


# part -> whether it is here, and how to install it
_PARTS: dict[str, tuple[Callable[[], object], str]] = {
    "two cores": (lambda: len(os.sched_getaffinity(0)) > 1, "a machine of one core has one plan for its CPU"),
    "tvm": (_module("tvm"), "pip install '.[tvm]'"),
    "Relax": (lambda: _module("tvm")() and not _module("tvm.relay")(), "pip install '.[tvm]' in another environment"),
    "Relay": (_module("tvm.relay"), "pip install '.[relay]' in another environment"),
    "kernels": (_module("tvm_pipeline_kernels"), "pip install ."),  # for layouts and rules that are the guest's
    "onnx": (_module("onnx"), "pip install '.[tvm]'"),
    "ml_dtypes": (_module("ml_dtypes"), "pip install ml_dtypes"),
    "onnxruntime": (_module("onnxruntime"), "pip install '.[onnxruntime]'"),
    "openvino": (_module("openvino"), "pip install '.[openvino]'"),
    "onnxslim": (_module("onnxslim"), "pip install '.[simplify]'"),
    "tflite": (_module("tflite"), "pip install '.[edgetpu]'"),
    "flatbuffers": (_module("flatbuffers"), "pip install '.[edgetpu]'"),
    "ai_edge_litert": (_module("ai_edge_litert"), "pip install '.[edgetpu]'"),
    "OpenVINO of LiteRT": (_litert_openvino, "pip install ai-edge-litert-sdk-intel, in an environment of its own"),
    "SwiftShader": (_swiftshader, "apt install chromium libvulkan1"),
    "av": (_module("av"), "pip install '.[video]'"),
    "tvm_pipeline_boards": (_module("tvm_pipeline_boards"), "pip install ."),
    "tvm_pipeline_video": (_module("tvm_pipeline_video"), "pip install '.[video]'"),
    "PIL": (_module("PIL"), "pip install '.[video]'"),
    "matplotlib": (_module("matplotlib"), "pip install '.[plot]'"),
    "prometheus_client": (_module("prometheus_client"), "pip install '.[watch]'"),
    "paho-mqtt": (_module("paho.mqtt.client"), "pip install '.[mqtt]'"),
    "tritonclient": (_module("geventhttpclient"), "pip install '.[kserve]' 'tritonclient[http]'"),
    "zmq": (_module("zmq"), "pip install '.[frigate]'"),
    "Frigate": (FRIGATE.exists, "git clone https://github.com/blakeblackshear/frigate, pip install pydantic"),
    "griffe": (_module("griffe"), "pip install '.[docs]'"),
    "ray": (_module("ray"), "pip install '.[fleet]'"),
    "jax": (_module("jax"), "pip install '.[train]'"),
    "mlperf_loadgen": (_module("mlperf_loadgen"), "pip install '.[loadgen]'"),
    "tracking": (lambda: find_spec("trackers") and find_spec("supervision"), "pip install '.[tracking]'"),
    "NVRTC": (lambda: nvidia_file("cuda_nvrtc/lib/libnvrtc.so.12"), "pip install '.[relay-cuda]'"),
    "ptxas": (lambda: nvidia_file("cuda_nvcc/bin/ptxas"), "pip install '.[relay-cuda]'"),
    "C compiler": (_program("cc", "gcc"), "apt install gcc"),
    "git": (_program("git"), "apt install git"),
    "g++": (_program("g++"), "apt install g++"),
    "pyopencl": (_module("pyopencl"), "pip install '.[opencl]'"),
    "OpenCL": (_opencl_platforms, "apt install ocl-icd-libopencl1 pocl-opencl-icd"),
    "PoCL": (lambda: b"Portable Computing Language" in _opencl_platforms(), "apt install pocl-opencl-icd"),
    "mosquitto": (lambda: MOSQUITTO, "apt install mosquitto"),
    "Chromium": (lambda: CHROMIUM, "apt install chromium, or name one by CHROMIUM"),
    "GStreamer": (
        _gstreamer,
        "apt install gstreamer1.0-tools gstreamer1.0-plugins-base python3-gst-1.0 gir1.2-gst-plugins-base-1.0 "
        "gstreamer1.0-python3-plugin-loader, with an environment of the system's version of Python",
    ),
    "openssl": (_program("openssl"), "apt install openssl"),
    "aarch64-linux-gnu-ld": (_program("aarch64-linux-gnu-ld"), "apt install binutils-aarch64-linux-gnu"),
    "x86_64-linux-gnu-ld": (_program("x86_64-linux-gnu-ld"), "apt install binutils-x86-64-linux-gnu"),
    "ld.lld": (_program("ld.lld"), "apt install lld"),
    "qemu-aarch64-static": (_program("qemu-aarch64-static"), "apt install qemu-user-static"),
    "ziglang": (_module("ziglang"), "pip install '.[cross]'"),
    "linker for AArch64": (
        lambda: _program("aarch64-linux-gnu-ld", "ld.lld")() or find_spec("ziglang"),
        "apt install binutils-aarch64-linux-gnu, or pip install '.[cross]'",
    ),
}


@cache
def _is_here(part: str) -> bool:
    return bool(_PARTS[part][0]())


def needs(part: str) -> None:
    """Skip the test, or the whole file, if a part is missing; the reason says how to install it."""
    if not _is_here(part):
        pytest.skip(f"{part} missing: {_PARTS[part][1]}", allow_module_level=True)
