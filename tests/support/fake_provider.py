"""An execution provider that claims operators and computes them on the CPU, but for those that its option names.

It follows what `onnxruntime-ggml` 0.2.0 does as a plug-in, with its words: it claims every Conv, and fails at run time
where one is not 1-D. `test_providers.py` has that one itself, where it can be installed.

    FakeExecutionProvider fail=Conv    raises where a node of the file is a Conv, in the words of ggml
    FakeExecutionProvider nan=Conv     gives NaN there
    FakeExecutionProvider half=Conv    gives values that are off by half a percent, as those of float16 are
    FakeExecutionProvider die=Conv     ends the process there
    FakeExecutionProvider leave=Conv   does not claim it
"""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

NAME = "FakeExecutionProvider"
_SESSION, _AVAILABLE = onnxruntime.InferenceSession, onnxruntime.get_available_providers
_STRICT = "session.disable_cpu_ep_fallback"
_WORDS = "[ONNXRuntimeError] : 10 : INVALID_GRAPH : Non-zero status code returned: only 1-D convolutions"


class FakeSession(_SESSION):  # type: ignore[misc, valid-type]
    """A session of onnxruntime, of which a provider may have a part."""

    def __init__(self, content: bytes, options: Any, providers: list[Any], **kwargs: Any) -> None:
        [provider] = providers
        self.fault, self.kind, self.hit = "", "", False
        if isinstance(provider, tuple):
            [(self.fault, self.kind)] = provider[1].items()
            self.hit = self.kind in {node.op_type for node in onnx.load_from_string(content).graph.node}
            with suppress(RuntimeError):
                options.get_session_config_entry(_STRICT)
                if self.fault == "leave" and self.hit:
                    raise ValueError("[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes of the CPU")
                options.add_session_config_entry(_STRICT, "0")
        super().__init__(content, options, providers=["CPUExecutionProvider"])

    def get_providers(self) -> list[str]:
        return [NAME, "CPUExecutionProvider"]

    def run(self, *arguments: Any) -> list[Any]:
        self._meet_fault()
        found = super().run(*arguments)
        factor = {"nan": np.nan, "half": 1.005}.get(self.fault if self.hit else "", 1.0)
        return [array * array.dtype.type(factor) for array in found] if factor != 1.0 else found

    def run_with_iobinding(self, *arguments: Any) -> None:
        self._meet_fault()
        super().run_with_iobinding(*arguments)

    def end_profiling(self) -> str:
        """Return the profile, in which the nodes that it claims are one of its own, as ggml's are."""
        path = Path(super().end_profiling())
        if self.fault:
            left = self.kind if self.fault == "leave" else ""
            events = json.loads(path.read_text())
            kept = [each for each in events if each["cat"] != "Node" or each["args"].get("op_name") == left]
            path.write_text(json.dumps(kept))
        return str(path)

    def _meet_fault(self) -> None:
        if self.fault == "die" and self.hit:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "fail" and self.hit:
            raise RuntimeError(_WORDS)


def install(set_: Any = setattr) -> None:
    """Give this process's onnxruntime the provider."""
    set_(onnxruntime, "InferenceSession", FakeSession)
    set_(onnxruntime, "get_available_providers", lambda: [NAME, *_AVAILABLE()])


def serve(order: bytes, channel: socket.socket) -> None:
    """Be the child that tries providers, with this one."""
    install()
    from tvm_pipeline_onnxruntime import sessions

    sessions.serve(order, channel)
