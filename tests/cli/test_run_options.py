"""`run` with several sources, with events and watched; and what it refuses."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

WIDE, SMALL = "synthetic:64x48@30:20", "synthetic:32x32@30:10"


def test_several_sources_each_in_its_own_order(cli, bundle, tmp_path):
    lines = tmp_path / "lines.jsonl"
    outcome = cli("run", bundle, "--source", WIDE, "--source", SMALL, "--results", lines, "--json")
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    frames = {name: [row["frame"] for row in rows if row["source"] == name] for name in (WIDE, SMALL)}
    assert frames == {WIDE: list(range(20)), SMALL: list(range(10))}
    assert {name: found["delivered"] for name, found in outcome.json["sources"].items()} == {WIDE: 20, SMALL: 10}
    assert all(row["age_s"] >= 0 for row in rows)


def test_a_policy_lets_frames_go_and_counts_them(cli, bundle, tmp_path):
    outcome = cli("run", bundle, "--source", WIDE, "--policy", "every=4", "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json["sources"][WIDE]
    assert (found["read"], found["delivered"], found["dropped"]) == (20, 5, {"every": 15})
    assert outcome.json["measured"]["frames"] == 5


def test_a_limit_counts_the_frames_of_all_sources(cli, bundle):
    outcome = cli("run", bundle, "--source", WIDE, "--source", SMALL, "--limit", 7, "--json")
    assert outcome.json["measured"]["frames"] == 7, outcome.err


def test_what_was_decided_can_be_read_back(cli, bundle, tmp_path):
    events = tmp_path / "events.jsonl"
    for _ in range(2):  # a second run adds to it
        assert cli("run", bundle, "--source", WIDE, "--events", events, "--adapt", "off").code == 0
    kinds = [json.loads(line)["kind"] for line in events.read_text().splitlines()]
    assert [kind for kind, _ in groupby(kinds)] == ["start"]
    assert len(kinds) == 2


def test_a_watched_run_says_where(cli, bundle):
    pytest.importorskip("prometheus_client")
    outcome = cli("run", bundle, "--source", WIDE, "--watch", "0")
    assert outcome.code == 0
    assert "watch it at http://127.0.0.1:" in outcome.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--adapt", "sometimes"), "--adapt 'sometimes' is neither replan nor off"),
        (("--watchdog", "0"), "--watchdog 0: it must be positive"),
        (("--policy", "newest"), "--policy newest: cannot use 'newest'; it takes block"),
        (("--source", WIDE), "--source names one source twice"),
        (("--source", SMALL, "--output", "out.mp4"), "--output is a video of one source"),
        (("--events", "/nowhere/events.jsonl"), "--events /nowhere/events.jsonl: No such file or directory"),
        (("--watch", "here"), "--watch here: give it as PORT or ADDRESS:PORT"),
        (("--watch", "0.0.0.0:0"), "token"),
        (("--token", "secret"), "--token goes with --watch"),
    ],
)
def test_what_run_refuses(cli, bundle, options, said):
    pytest.importorskip("prometheus_client")
    outcome = cli("run", bundle, "--source", WIDE, *options)
    assert outcome.code in (1, 2)
    assert said in outcome.err
    assert "Traceback" not in outcome.err
