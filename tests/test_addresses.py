"""Addresses are shown without what may be a secret, in whichever of the forms that cameras take it."""

from __future__ import annotations

import pytest

from tvm_pipeline.addresses import shown, without_secrets

FORMS = """
rtsp://admin:§@10.0.0.2/1  rtsp://admin:§@10.0.0.2:554/Streaming/Channels/101  RTSP://admin:§@cam/1  rtsp://admin:§@p@cam/1
rtsp://admin:§/x@cam/1  rtsp://admin:1/§@cam/1  rtsp://admin:8080/§@cam/1  rtsp://a:§#1@cam/1  rtsp://a:§?1@cam/1
rtsp://a:§%40b@cam/1  rtsp://:§@cam/1  rtsp://§@cam/1  rtsp://cam:554/user=admin&password=§&channel=1&stream=0.sdp
rtsp://cam:554/user=admin_password=§_channel=1_stream=0.sdp  rtsp://cam:554/user=admin_password=x_§_channel=1_stream=0.sdp
rtsp://cam:554/user=admin_password=§_channel=1_stream=0.sdp?real_stream  rtsp://cam/live?username=admin&password=§
http://cam/videostream.cgi?user=admin&pwd=§  http://cam/videostream.cgi?loginuse=admin&loginpas=§  http://cam/a?u=a&p=§
http://cam/mjpg?usr=admin&psw=§  http://cam/x?user=admin&pswd=§  http://cam/x?auth=§  http://cam/x?Authorization=§
http://cam/cgi-bin/CGIProxy.fcgi?cmd=snapPicture2&usr=admin&pwd=§  http://h/a.m3u8?token=§  http://h/a.m3u8?hdnts=§
http://h/a.m3u8?Signature=§&Key-Pair-Id=1&Policy=x  https://b.s3.amazonaws.com/v.mp4?X-Amz-Credential=A&X-Amz-Signature=§
https://acct.blob.core.windows.net/v.mp4?sv=1&sig=§  http://h/a;password=§  http://h/a;password=x/§/y  http://h/a.m3u8?jwt=§
http://h/a?session=§  http://h/a?sid=§  http://h/a?access=§  http://h/a?code=§  http://h/a?§  rtmp://h/live/§
rtmp://h/live/key?passphrase=§  srt://h:1?passphrase=§  http://h/x#access_token=§  http://h/x?a=1;pwd=§  http://h/x?pass%77ord=§
http://h/x?password%3D§  rtsp://cam/h264?username=admin&passwd=§  rtsp://cam/11?credential=§  rtsp://cam/ch0_0.h264?basic=§
mqtt://gate:§@host/topic  mqtts://gate:§@host:8883/a/b  mqtt://gate:§/x@host/topic  http://u:pw@host/x?mail=a@b&pwd=§
"""


@pytest.mark.parametrize("form", FORMS.split())
def test_no_form_of_a_secret_is_shown(form):
    assert "§" in form
    address = form.replace("§", "k3y9q")
    assert "k3y9q" not in shown(address)
    text = f"av.error.HTTPError: [Errno 1] refused: '{address}'; last read"
    assert "k3y9q" not in without_secrets(text)
    assert without_secrets(text).endswith("'; last read")


@pytest.mark.parametrize(
    "address",
    [
        *("camera:0", "a:b@c.mp4", "synthetic:64x48@30:5", "/videos/my=file?.mp4", "file:///srv/k=v/a.mp4"),
        *(
            "http://gate/?channel=1",
            "rtsp://[fe80::1]:554/h264/ch1/main",
            "http://h:80/videos/bikes.mp4",
            "rtsp://gate/a@c",
        ),
        *("srt://h:1?mode=listener&pkt_size=1316", "http://gate/snapshot.cgi?resolution=1280x720&fps=10"),
    ],
)
def test_what_is_no_secret_stays(address):
    assert shown(address) == address


def test_a_camera_stays_recognisable():
    seen = shown("rtsp://cam:554/user=admin_password=hush_channel=2_stream=1.sdp")
    assert seen == "rtsp://cam:554/user=***_password=***_channel=2_stream=1.sdp"
    assert shown("rtsp://gate:hush@10.0.0.2:554/live?token=1") == "rtsp://gate:***@10.0.0.2:554/live?token=***"
