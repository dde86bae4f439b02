"""`tvm-pipeline deploy` on operator graphs: its table, its JSON, and what it says where models do not fit together."""

from __future__ import annotations

import pytest

from tests.support.command import run_command
from tests.support.memory_networks import PROFILES


def test_a_deployment_states_its_gap(capfd, monkeypatch) -> None:
    models = [f"{PROFILES / 'keras' / name}.json@10" for name in ("ResNet50", "MobileNetV2")]
    platform = PROFILES / "platforms/coral-usb-3.toml"
    found = run_command(
        capfd, monkeypatch, "deploy", *models, "--platform", platform, "--time-limit", "0", "--json"
    ).json
    most = max(found["utilisation"].values())
    assert found["status"] == "feasible"
    assert found["gap"] == pytest.approx(most / found["bound"] - 1)
    assert found["gap"] > 0
    said = run_command(capfd, monkeypatch, "deploy", *models, "--platform", platform, "--time-limit", "0").out
    assert "Deployment (feasible, gap" in said


def test_models_that_do_not_fit_together_are_named(capfd, monkeypatch, tmp_path) -> None:
    """ResNet50 needs 28.0 MB with its activations, and MobileNetV2 6.0 MB: either fits, and both do not."""
    device = '[[device]]\nname = "a"\nmemory_bytes = 30000000\n[device.model]\nmacs_per_s = 1e12\n'
    (tmp_path / "box.toml").write_text(f'name = "box"\n{device}')
    models = [f"{PROFILES / 'keras' / name}.json@10" for name in ("ResNet50", "MobileNetV2")]
    for model in models:
        alone = run_command(
            capfd, monkeypatch, "deploy", model, "--platform", tmp_path / "box.toml", "--time-limit", "0", "--json"
        ).json
        assert 0 < alone["memory_bytes"]["a"] <= 30000000
    both = run_command(capfd, monkeypatch, "deploy", *models, "--platform", tmp_path / "box.toml", "--time-limit", "0")
    assert both.code
    for words in ("ResNet50", "MobileNetV2", "device a would hold", "more than its memory_bytes 30000000", "use fewer"):
        assert words in both.err
