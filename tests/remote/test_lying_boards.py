"""A client reads what a lying board says as one error."""

from __future__ import annotations

import pytest

from tests.remote.lying_board import answering, lying_board, raw
from tvm_pipeline.errors import OptionError, StageError
from tvm_pipeline.remote.board import Board
from tvm_pipeline.service.option_names import explained

TIMES = {"silent_s": 1.0, "keep_s": 3.0}


@pytest.mark.parametrize("facts", [{}, {"option": "listen", "device": "cpu0"}])
@pytest.mark.parametrize("expected", [OptionError("no"), StageError(-1, "", -1, ValueError())])
def test_an_error_without_its_facts_has_others(expected, facts):
    value = {"name": type(expected).__name__, "text": "no", "facts": facts}
    answer = answering(lambda call: raw({"kind": "error", "number": 1, "call": call.call, "value": value}))
    with lying_board(answer) as address, pytest.raises(type(expected)) as error:
        Board.connect(address, **TIMES)
    assert explained(error.value, str).endswith("no")
    assert vars(error.value) == vars(expected) | {name: facts[name] for name in facts if hasattr(expected, name)}
