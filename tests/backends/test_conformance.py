"""`check_backend` passes a backend that keeps the contract, and says what is wrong with one that does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.fake_backend import chain_model, fake_platform, random_model
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.testing import ContractError, FakeBackend, FakeModel, check_backend
from tvm_pipeline.testing.fake import FakeRunner


def model_of(fake: FakeModel) -> Model:
    return Model(fake.graph.name, "onnx", b"")


@pytest.mark.parametrize("seed", range(5))
def test_the_fake_backend_keeps_the_contract(seed: int) -> None:
    fake = random_model(np.random.default_rng(seed), 6)
    square = {t.name: "AB2a2b" for o in fake.graph.operators for t in o.outputs}
    fake.layouts = {"d1": square}
    backend = FakeBackend(fake_platform("d0", "d1").devices, [fake], cuts=("onnx",))
    check_backend(backend, model_of(fake))
    assert not fake.open_stages


@pytest.mark.parametrize("seed", range(3))
def test_a_device_may_leave_operators_to_others(seed: int) -> None:
    fake = random_model(np.random.default_rng(seed), 6, refused={"d0": ["op2", "op4"]})
    check_backend(FakeBackend(fake_platform("d0", "d1").devices, [fake], cuts=("onnx",)), model_of(fake))
    assert not fake.open_stages


def test_one_device_has_to_compute_all() -> None:
    fake = chain_model(4, refused={"d0": ["op1"]})
    with pytest.raises(ContractError, match="no device computes every operator"):
        check_backend(FakeBackend(fake_platform("d0").devices, [fake]), model_of(fake))


# What is wrong with a model whose device d1 does not compute op1: a method, the change, and the message.
PARTIAL_FAULTS: dict[str, tuple[str, Any, str]] = {
    "unknown names": (
        "computes",
        lambda self, device: ["op9"],
        r"computes\(\) names \['op9'\], which are no operators",
    ),
    "nothing": ("computes", lambda self, device: [], r"computes\(\) names no operator"),
    "stages of all": (
        "stage",
        lambda self, names, device: (
            check_stage(self.graph, names),
            FakeRunner(self, [o for o in self.graph.operators if o.name in names], device),
        )[1],
        r"a stage of op1, which computes\(\) lacks, is made",
    ),
    "times of all": ("time_operators", lambda self, device, repeats: np.ones((repeats, 4)), "the contract says NaN"),
    "is not saved": (
        "save",
        lambda self, folder, stages, platform: FakeModel.save(chain_model(4), folder, stages, platform),
        "device d1 computes other operators of a model that was loaded",
    ),
}


@pytest.mark.parametrize("fault", PARTIAL_FAULTS)
def test_what_is_wrong_with_computes_is_said(fault: str) -> None:
    name, wrong, message = PARTIAL_FAULTS[fault]
    fake = chain_model(4, refused={"d1": ["op1"]})
    fake.__class__ = type("Changed", (FakeModel,), {name: wrong})
    with pytest.raises(ContractError, match=message):
        check_backend(FakeBackend(fake_platform("d0", "d1").devices, [fake]), model_of(fake))


def test_check_backend_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import tvm_pipeline.testing"
    subprocess.run([sys.executable, "-c", code], check=True)


def after(method: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *given, **named: change(method(*given, **named))


def run_that(change: Callable[[Any, Any], None]) -> Callable[..., None]:
    """Return a `run` after which something is done to the inputs and outputs."""
    plain = FakeRunner.run

    def run(self: FakeRunner, inputs: Any, outputs: Any) -> None:
        plain(self, inputs, outputs)
        change(inputs, outputs)

    return run


def add_one(array: Any) -> None:
    array += 1


calls = iter(range(10**6))

# A class, the method that is changed, the change, and the message of `check_backend`.
FAULTS: dict[str, tuple[type, str, Any, str]] = {
    "name of two words": (FakeBackend, "name", "two words", "a name is one word"),
    "settle is not stable": (
        FakeBackend,
        "settle",
        lambda self, device: replace(device, target=device.target + "x"),
        "turns a settled device",
    ),
    "settle renames": (FakeBackend, "settle", lambda self, device: replace(device, name="other"), "settle"),
    "order is lost": (FakeModel, "order", property(lambda self: "listed", lambda self, order: None), "order='memory'"),
    "input is overwritten": (FakeRunner, "run", run_that(lambda i, o: add_one(i[0])), "writes into its input x"),
    "results change": (FakeRunner, "run", run_that(lambda i, o: o[0].fill(next(calls))), "in a later run"),
    "stages that are none": (
        FakeModel,
        "stage",
        lambda self, names, device: FakeRunner(self, [o for o in self.graph.operators if o.name in names], device),
        "a stage of no operators is made; the contract says PlanError",
    ),
    "times of another shape": (
        FakeModel,
        "time_operators",
        after(FakeModel.time_operators, lambda seconds: seconds.T),
        r"time_operators\(\) gives an array of shape \(4, 3\)",
    ),
    "times are zero": (
        FakeModel,
        "time_operators",
        after(FakeModel.time_operators, lambda seconds: seconds * 0),
        "times that are not positive",
    ),
    "one transfer": (
        FakeModel,
        "time_transfers",
        lambda self, device, sizes, repeats: (np.ones((repeats, len(sizes))), np.ones(repeats)),
        r"time_transfers\(\)\[1\] gives an array of shape \(3,\)",
    ),
    "nothing is saved": (FakeModel, "save", lambda self, folder, stages, platform: None, "load.. of what it saved"),
    "another error for what was not saved": (
        FakeBackend,
        "load",
        lambda self, folder, devices: self._models["chain"] if any(folder.iterdir()) else {}["model"],
        "load.. of an empty folder raises KeyError",
    ),
    "cuts a format in word only": (FakeModel, "slicer", lambda self: None, "slicer.. of a compiled chain gives None"),
    "closing twice": (
        FakeRunner,
        "close",
        lambda self: self._model.open_stages.remove(self),
        "to close a stage a second time raises KeyError",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_backend_does_wrong_is_said(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, wrong, message = FAULTS[fault]
    fake = chain_model(4)
    backend = FakeBackend(fake_platform("d0").devices, [fake], cuts=("onnx",))
    if isinstance(wrong, str):
        setattr(backend, name, wrong)
    else:
        monkeypatch.setattr(kind, name, wrong, raising=False)
    with pytest.raises(ContractError, match=message) as caught:
        check_backend(backend, model_of(fake))
    assert str(caught.value).startswith(f"backend {backend.name}: ")
