"""The files by which an agent and a service speak with one another, in the folder of the service.

    service.json    the model, the bundle, the settings of the model and the duties: what the agent wants
    service.toml    the same as settings of `tvm-pipeline run --config`, read at the start and on SIGHUP
    labels.txt, preprocessing.toml      what these settings name, where the model has such files
    status.json     what the process says of itself
    results-*.jsonl, events.jsonl, service.log, tmp/

Read next: service_process.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline_hosts.fleet.host_results import RESULTS
from tvm_pipeline_hosts.fleet.messages import Duty, ModelSettings
from tvm_pipeline_hosts.fleet.model_settings import TEXTS

CONFIG, OWN, STATUS, LOG = "service.toml", "service.json", "status.json", "service.log"
SEGMENT_S = 600.0
LEAST_FPS = 1e-6  # that a policy has digits for


class SourceStatus(msgspec.Struct, frozen=True):
    """A source as its service tells it; `gone`: it gives no frames any more."""

    opened: bool = False
    problem: str = ""
    frames: int = 0
    dropped: Mapping[str, int] = {}
    ended: bool = False
    gone: bool = False


class ServiceStatus(msgspec.Struct, frozen=True):
    """What a service writes of itself every second."""

    pid: int
    tags: Mapping[str, SourceStatus] = {}
    ready: bool = False
    frames: int = 0
    statistics: Mapping[str, Any] = {}


class ServiceRecord(msgspec.Struct):
    """What a service's folder tells the next agent; `bundle` is named as `Duty.bundle`, and `path` is its file."""

    model: str
    bundle: str
    path: str
    duties: list[Duty] = []
    settings: ModelSettings = ModelSettings()


def tag_of(duty: Duty) -> str:
    """Return what the lines of a duty carry: CAMERA@EPOCH."""
    return f"{duty.camera}@{duty.epoch}"


def folder_name(model: str, bundle: str) -> str:
    """Return the name of the folder of a service."""
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", model)[:40]
    return f"{word}-{hashlib.sha256(f'{model}/{bundle}'.encode()).hexdigest()[:12]}"


def settings_text(bundle: Path, duties: Mapping[str, Duty], settings: ModelSettings) -> bytes:
    """Return the settings of a service with these duties, as TOML; the texts of its model lie beside it."""
    values: dict[str, object] = {
        **settings.values,
        **{key: TEXTS[key] for key in settings.texts},
        "bundle": str(bundle),
        "wait": True,
        "source": [duty.source for duty in duties.values()],
        "tag": list(duties),
        "policy": [policy_of(duty) for duty in duties.values()],
        "results": RESULTS,
        "segment": SEGMENT_S,
        "status": STATUS,
        "events": "events.jsonl",
    }
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value != []]
    return ("\n".join(lines) + "\n").replace("\x7f", "\\u007f").encode()


def policy_of(duty: Duty) -> str:
    """Return the policy of a duty's source: the newest frames at its rate; without a rate all that can be had."""
    if duty.rate_fps is not None:
        return f"fps={max(duty.rate_fps, LEAST_FPS):.6f}"
    from tvm_pipeline_video.service.video_extra import source_kind  # 30 MB, which an agent seldom needs

    return "latest" if source_kind(duty.source).live else "block"


def is_exclusive(spec: str) -> bool:
    """Return whether a source can be opened only once at a time; also where that cannot be known here."""
    try:
        from tvm_pipeline_video.service.video_extra import source_kind
    except PipelineError:  # without the video extra no service opens a source, which its own log says
        return True
    return source_kind(spec).exclusive


def added(one: SourceStatus, other: SourceStatus) -> SourceStatus:
    """Return the later of two states of a source, with the counts of both."""
    reasons = one.dropped.keys() | other.dropped.keys()
    dropped = {reason: one.dropped.get(reason, 0) + other.dropped.get(reason, 0) for reason in sorted(reasons)}
    return SourceStatus(other.opened, other.problem, one.frames + other.frames, dropped)
