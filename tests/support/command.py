"""A command of the command line, run in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


def run_command(capture, monkeypatch, *arguments: object) -> Outcome:
    from tvm_pipeline.cli import main

    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["tvm-pipeline", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    out, err = capture.readouterr()
    return Outcome(code, out, " ".join(err.split()))
