"""Sources against real files, folders and servers: what comes out, and what is said when they are broken."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from tvm_pipeline.errors import OptionError
from tvm_pipeline_video import Frame, open_source
from tvm_pipeline_video.errors import VideoError

FRAMES = 40


def encode(
    path: Path, frames: int = FRAMES, size: tuple[int, int] = (160, 120), gop: int = 250, **options: str
) -> Path:
    """A noisy clip (large packets) whose red channel rises with the frame."""
    noise = np.random.default_rng(0)
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.gop_size = gop
        for number in range(frames):
            image = noise.integers(0, 60, (size[1], size[0], 3), dtype=np.uint8)
            image[:, :, 0] += np.uint8(number * 4)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
        container.mux(stream.encode(None))
    return path


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    encode(folder / "clip.mp4", movflags="faststart")
    for name in ("clip.ts", "clip.avi", "clip.mkv"):
        encode(folder / name)
    encode(folder / "small.ts", frames=10, size=(96, 64))
    return folder


def middle_of_packet(path: Path, number: int) -> int:
    """Where in the file half of a compressed picture has passed."""
    with av.open(str(path)) as container:
        starts = sorted(packet.pos for packet in container.demux(video=0) if packet.size)
    return (starts[number] + starts[number + 1]) // 2


def read_until_broken(spec: str | Path) -> tuple[list[Frame], str]:
    frames = []
    with open_source(str(spec)) as source, pytest.raises(VideoError) as caught:
        frames.extend(source)
    return frames, str(caught.value)


def failure(spec: str | Path, **options: float) -> str:
    with pytest.raises((VideoError, OptionError)) as caught:
        list(open_source(str(spec), **options))  # type: ignore[arg-type]
    return str(caught.value)


# Files


@pytest.mark.parametrize("name", ["clip.mp4", "clip.ts", "clip.avi", "clip.mkv"])
def test_a_video_gives_every_frame_in_order(clips: Path, name: str) -> None:
    with open_source(str(clips / name)) as source:
        assert (source.width, source.height, source.fps) == (160, 120, 25)
        assert source.frames in (FRAMES, None)
        frames = list(source)
    assert [frame.index for frame in frames] == list(range(FRAMES))
    assert [frame.time_s for frame in frames] == pytest.approx([n / 25 for n in range(FRAMES)], abs=0.002)
    assert all(frame.image.shape == (120, 160, 3) and frame.image.dtype == np.uint8 for frame in frames)
    reds = [int(frame.image[:, :, 0].mean()) for frame in frames]
    assert reds == sorted(reds)
    assert reds[-1] - reds[0] == pytest.approx(4 * (FRAMES - 1), abs=4)
    assert source.damaged == 0


def test_mp4_says_its_length_and_a_limit_shortens_it(clips: Path) -> None:
    with open_source(str(clips / "clip.mp4")) as source:
        assert source.frames == FRAMES
    with open_source(str(clips / "clip.mp4"), limit=7) as source:
        assert source.frames == 7
        assert len(list(source)) == 7
    with open_source(str(clips / "clip.mp4"), limit=1000, thread_count=2) as source:
        assert source.frames == FRAMES
        assert len(list(source)) == FRAMES


@pytest.mark.parametrize(("start", "first"), [(0.0, 0), (0.2, 0), (0.6, 18), (0.99, 36)])
def test_a_file_begins_at_the_key_frame_before_a_share_of_it(tmp_path: Path, start: float, first: int) -> None:
    """Every ninth picture of this clip is a key frame."""
    path = encode(tmp_path / "clip.mp4", gop=10)
    with open_source(str(path)) as source:
        whole = [frame.image for frame in source]
    with open_source(str(path), start=start) as source:
        frames = list(source)
    assert [frame.index for frame in frames] == list(range(FRAMES - first))
    assert frames[0].time_s == 0
    np.testing.assert_array_equal(frames[0].image, whole[first])


def test_what_cannot_be_searched_gives_all_its_frames(tmp_path: Path) -> None:
    path = encode(tmp_path / "clip.h264", gop=10)
    for spec in (str(path), f"synthetic:32x24@25:{FRAMES}"):
        with open_source(spec, start=0.6) as source:
            assert len(list(source)) == FRAMES


def test_a_closed_source_has_ended(clips: Path) -> None:
    with open_source(str(clips / "clip.mp4")) as source:
        next(source)
    assert list(source) == []
    source.close()


def test_closing_from_another_thread_ends_the_iteration() -> None:
    source = open_source("synthetic")
    threading.Timer(0.1, source.close).start()
    assert sum(1 for _ in source) > 0


@pytest.mark.parametrize("name", ["clip.mp4", "clip.ts", "clip.avi"])
@pytest.mark.parametrize("number", [5, 29])
def test_a_file_cut_short_gives_the_sound_frames_then_says_where_it_broke(
    clips: Path, tmp_path: Path, name: str, number: int
) -> None:
    content = (clips / name).read_bytes()
    cut = tmp_path / name
    cut.write_bytes(content[: middle_of_packet(clips / name, number)])
    frames, message = read_until_broken(cut)
    assert number - 3 <= len(frames) <= number
    assert str(cut) in message
    assert f"frame {len(frames)}:" in message
    with open_source(str(clips / name)) as whole:
        for frame, same in zip(frames, whole, strict=False):
            assert np.array_equal(frame.image, same.image)


@pytest.mark.parametrize("name", ["clip.ts", "clip.avi", "clip.mp4"])
def test_damage_in_the_middle_is_counted_and_does_not_stop_the_video(clips: Path, tmp_path: Path, name: str) -> None:
    content = bytearray((clips / name).read_bytes())
    middle = int(len(content) * 0.4)
    content[middle : middle + 1500] = np.random.default_rng(1).bytes(1500)
    damaged = tmp_path / name
    damaged.write_bytes(content)
    with open_source(str(damaged)) as source:
        frames = list(source)
    assert source.damaged >= 1
    assert FRAMES - 3 <= len(frames) <= FRAMES
    assert [frame.index for frame in frames] == list(range(len(frames)))


def test_a_mp4_without_its_index_garbage_text_and_sound_are_refused(clips: Path, tmp_path: Path) -> None:
    no_index = encode(tmp_path / "recording.mp4", frames=5)
    no_index.write_bytes(no_index.read_bytes()[:5000])
    (tmp_path / "garbage.mp4").write_bytes(np.random.default_rng(0).bytes(50_000))
    (tmp_path / "text.avi").write_text("not a video\n" * 500)
    for name in ("recording.mp4", "garbage.mp4", "text.avi"):
        message = failure(tmp_path / name)
        assert name in message
        assert "check that it is a video" in message
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
    assert "no video stream, only audio" in failure(tmp_path / "sound.wav")


def test_a_title_in_another_encoding_and_a_codec_without_a_decoder(tmp_path: Path) -> None:
    path = tmp_path / "titled.mkv"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "Gr__e aus Koeln"
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))
        container.mux(stream.encode(None))
    sound = path.read_bytes()
    path.write_bytes(sound.replace(b"Gr__e", "Grüße".encode("latin-1")))
    assert len(list(open_source(str(path)))) == 1
    path.write_bytes(sound.replace(b"V_MPEG4/ISO/AVC", b"V_MPEG9/ISO/AVC"))
    assert "titled.mkv has a video stream that this FFmpeg has no decoder for; check" in failure(path)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    assert f"{tmp_path}/empty.mp4 is an empty file" in failure(tmp_path / "empty.mp4")
    assert f"no file or folder {tmp_path}/missing.mp4" in failure(tmp_path / "missing.mp4")


def test_a_file_name_that_looks_like_an_address_is_a_file(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("http:clip %d.ts").write_bytes((clips / "clip.ts").read_bytes())
    assert len(list(open_source("http:clip %d.ts"))) == FRAMES


def test_the_picture_may_change_size_midway(clips: Path, tmp_path: Path) -> None:
    joined = tmp_path / "joined.ts"
    joined.write_bytes((clips / "clip.ts").read_bytes() + (clips / "small.ts").read_bytes())
    with open_source(str(joined)) as source:
        shapes = [frame.image.shape for frame in source]
    assert shapes == [(120, 160, 3)] * FRAMES + [(64, 96, 3)] * 10


def test_a_telephone_video_stored_lying_down_is_turned_upright(tmp_path: Path) -> None:
    path = tmp_path / "upright.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        image = np.zeros((96, 160, 3), np.uint8)
        image[:, :40] = 255  # the left side as stored is the top once turned clockwise
        container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
        container.mux(stream.encode(None))
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    content[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 96 << 16, 0, 1 << 30)
    path.write_bytes(content)
    with open_source(str(path)) as source:
        assert (source.width, source.height) == (96, 160)
        turned = next(source).image
    assert turned[:30].mean() > 240
    assert turned[50:].mean() < 15


# Pictures


def test_a_folder_gives_its_pictures_in_natural_order(tmp_path: Path) -> None:
    for number, extension in ((2, "png"), (10, "bmp"), (1, "webp"), (9, "JPG"), (11, "jpeg")):
        Image.new("RGB", (32, 24), (number * 20, 0, 0)).save(tmp_path / f"shot %d {number}.{extension}")
    (tmp_path / "notes.txt").write_text("not a picture")
    with open_source(str(tmp_path)) as source:
        assert (source.fps, source.frames) == (None, 5)
        frames = list(source)
    reds = [frame.image[..., 0].mean() / 20 for frame in frames]
    assert reds == pytest.approx([1, 2, 9, 10, 11], abs=0.2)
    assert [frame.index for frame in frames] == [0, 1, 2, 3, 4]
    assert frames[1].time_s > frames[0].time_s


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_a_picture_is_read_exactly_whatever_its_kind(tmp_path: Path, mode: str) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (33, 47, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels).convert(mode)
    picture.save(tmp_path / "one.png")
    (frame,) = open_source(str(tmp_path / "one.png"))
    assert np.array_equal(frame.image, np.asarray(picture.convert("RGB")))


def test_broken_pictures_and_empty_folders_are_named(tmp_path: Path) -> None:
    assert "holds no pictures" in failure(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    (tmp_path / "2.png").write_bytes(b"no picture")
    frames, message = read_until_broken(tmp_path)
    assert len(frames) == 1
    assert "2.png" in message


def test_damaged_pictures_are_counted_and_the_folder_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1, 6):
        Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(tmp_path / f"{number}.png")
    content = bytearray((tmp_path / "2.png").read_bytes())
    content[content.index(b"IEND") - 9] ^= 1  # in the checksum that ends the packed pixels
    (tmp_path / "2.png").write_bytes(content)
    (tmp_path / "3.png").write_bytes(b"no picture")
    with open_source(str(tmp_path)) as source:
        frames = list(source)
    assert [int(frame.image[0, 0, 0]) for frame in frames] == [20, 80, 100]
    assert [frame.index for frame in frames] == [0, 1, 2]
    assert source.damaged == 2
    assert all(f"{name}.png" in message for name, message in zip((2, 3), caplog.messages, strict=True))
    assert "2.png is a damaged picture; copy it again" in failure(tmp_path / "2.png")


# Addresses


@contextmanager
def serving(send: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            send(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://user:secret@127.0.0.1:{server.server_port}/live.ts"
    finally:
        server.shutdown()
        server.server_close()


def answer(handler: BaseHTTPRequestHandler, content: bytes, length: int | None = None) -> None:
    handler.send_response(200)
    if length is not None:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(content)


def test_a_stream_over_http(clips: Path) -> None:
    content = (clips / "clip.ts").read_bytes()
    with serving(lambda handler: answer(handler, content, len(content))) as url, open_source(url) as source:
        assert len(list(source)) == FRAMES
        assert "secret" not in source.name
        assert "user:***@127.0.0.1" in source.name


@pytest.mark.thorough
def test_a_stream_that_stalls_is_given_up_after_the_timeout(clips: Path) -> None:
    content = (clips / "clip.ts").read_bytes()
    done = threading.Event()

    def stall(handler: BaseHTTPRequestHandler) -> None:
        answer(handler, content[: len(content) * 3 // 4])
        done.wait(20)

    with serving(stall) as url:
        frames = []
        with open_source(url, timeout_s=1) as source, pytest.raises(VideoError) as caught:
            frames.extend(source)
        done.set()
    assert len(frames) > FRAMES / 2
    assert "no data came for 1 s" in str(caught.value)
    assert f"frame {len(frames)}:" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_connection_that_breaks_is_an_error_and_not_an_end(clips: Path) -> None:
    content = (clips / "clip.ts").read_bytes()
    half = content[: len(content) // 2]
    with serving(lambda handler: answer(handler, half, len(content))) as url:
        frames, message = read_until_broken(url)
    assert 0 < len(frames) < FRAMES
    assert "breaks off" in message
    steps = np.diff([frame.time_s for frame in frames])  # those that were still in the decoder have a time, too
    assert steps == pytest.approx([1 / 25] * len(steps), abs=0.002)


@pytest.mark.thorough
def test_addresses_that_cannot_be_opened() -> None:
    with serving(lambda handler: handler.send_error(404)) as url:
        message = failure(url)
        assert "404" in message
        assert "secret" not in message
    assert "refused" in failure("http://127.0.0.1:9/live.ts").lower()
    assert "refused" in failure("rtsp://127.0.0.1:9/live").lower()
    start = time.monotonic()
    assert "no data came for 0.5 s" in failure("udp://127.0.0.1:50123", timeout_s=0.5)
    assert time.monotonic() - start < 5
    assert "ftp:// is not supported" in failure("ftp://127.0.0.1/clip.ts")


# Cameras


def test_a_missing_camera_says_what_to_check() -> None:
    for spec in ("camera:99", "/dev/video99"):
        message = failure(spec)
        assert "no camera /dev/video99" in message
        assert "cameras present" in message
        assert "plugged in" in message


def test_a_device_that_is_no_camera_is_refused() -> None:
    assert "V4L2 camera" in failure("/dev/null")


# Synthetic


def test_the_synthetic_pattern_moves_and_is_always_the_same() -> None:
    first, second = (list(open_source("synthetic:64x48@10:30")) for _ in range(2))
    assert len(first) == 30
    assert [frame.time_s for frame in first] == pytest.approx([n / 10 for n in range(30)])
    for one, other, following in zip(first, second, first[1:], strict=False):
        assert np.array_equal(one.image, other.image)
        assert not np.array_equal(one.image, following.image)
    assert first[0].image.shape == (48, 64, 3)


def test_synthetic_sources_without_a_count_are_endless() -> None:
    with open_source("synthetic", limit=3) as source:
        assert (source.width, source.height, source.fps, source.frames) == (640, 480, 30, 3)
        assert len(list(source)) == 3
    with open_source("synthetic:8x4") as source:
        assert source.frames is None


@pytest.mark.parametrize("spec", ["synthetic:", "synthetic:0x4", "synthetic:8x8@0", "synthetic:8x8:0", "synthetic:a"])
def test_a_malformed_synthetic_source_shows_the_form(spec: str) -> None:
    assert "WIDTHxHEIGHT@FPS:FRAMES" in failure(spec)


@pytest.mark.parametrize("option", ["limit", "timeout_s", "thread_count"])
def test_options_out_of_range_are_refused(option: str) -> None:
    assert f"{option} is 0" in failure("synthetic", **{option: 0})
