"""What is freed in a thread of its own, when the process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

LETS_GO = """
import threading, time
import tvm
from tvm_pipeline_tvm.devices import releasing

class Owner: pass
class Held:
    def __del__(self):
        {freed}

releasing.END_S = {limit_s}
owner = Owner()
releasing.release_with(owner, tvm.cpu(0), [Held()])
del owner
print("ends", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("freed", "limit_s", "said"),
    [
        ("time.sleep(0.3); print('freed')", 30, "ends\nfreed\n"),  # TVM, cut off here, would abort the process
        ("threading.Event().wait()", 0.2, "ends\n"),
    ],
)
def test_the_process_ends_after_what_was_let_go(freed: str, limit_s: float, said: str) -> None:
    """A device that hangs does not keep it."""
    code = LETS_GO.format(freed=freed, limit_s=limit_s)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
