"""A running model, watched over HTTP: its metrics, its health, its page. Read next: watch/server.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tvm_pipeline import PipelineError
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.service.video_extra import draw

if TYPE_CHECKING:
    from tvm_pipeline_video.service.running_model import RunningModel


@contextmanager
def watched(model: RunningModel, index: int, settings: Settings, listener: Listener) -> Iterator[None]:
    """Let others watch the model over HTTP while the block lasts, where the settings request it."""
    where = settings.watch_port(index)
    if where is None:
        yield
        return
    try:
        from tvm_pipeline_video.watch import LiveWatch, WatchServer
        from tvm_pipeline_video.watch.picture import Preview
    except ImportError as error:
        raise PipelineError(f"`watch` needs an extra: pip install 'tvm-pipeline[watch]' ({error})") from error

    with WatchServer(
        LiveWatch(
            model.pipeline, model.sources.summary, lambda: model.metering, awaited_s=lambda: model.sources.awaited_s
        ),
        *where,
        token=settings.token,
        unhealthy_after_s=settings.unhealthy_after,
        picture=Preview(lambda: model.last, lambda seen: draw(seen.frame.image, seen.annotations)),
    ) as server:
        listener.say(f"watch {model.label or 'it'} at {server.url}")
        yield
