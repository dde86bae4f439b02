"""Who belongs to a fleet: one file, `fleet.key`, which `fleet up` makes and each host is given.

It holds the address of the head, a token, and a certificate authority of the fleet's own. With it a host makes its own
certificate, so that all processes of Ray on all hosts speak TLS and know one another. Who has the file can run any code
on every host. It also tells with which versions the head runs, since Ray takes no others. Next: ray_node.py.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import secrets
import shutil
import socket
import ssl
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec

from tvm_pipeline import PipelineError, __version__
from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import read_bytes, replacing

MOST_KEY_BYTES = 1 << 20
VALID_DAYS = 3650
REACH_S = 5.0  # for a connection to the head
TOKEN, AUTHORITY, AUTHORITY_KEY = "token", "authority.pem", "authority.key"
CERTIFICATE, CERTIFICATE_KEY = "node.pem", "node.key"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class FleetKey(msgspec.Struct, frozen=True):
    """What a host needs to join a fleet.

    Attributes:
        address: IP:PORT of the head.
        token: which every call carries.
        authority, authority_key: the certificate authority of the fleet, as PEM.
        python, ray, tvm_pipeline: the versions on the head.
    """

    address: str
    token: str
    authority: str
    authority_key: str
    python: str
    ray: str
    tvm_pipeline: str

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def ray_version() -> str:
    """Return the version of Ray; raise PipelineError where it is missing. It imports nothing."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise PipelineError("a fleet runs on Ray, which is missing; pip install 'tvm-pipeline[fleet]'") from None


def make_key(folder: Path, address: str) -> FleetKey:
    """Return the key of the fleet whose head has this folder and address; its secrets are made once.

    Raises:
        PipelineError: Ray or openssl is missing, or the folder cannot be written.
    """
    ray = ray_version()
    _private_folder(folder)
    if not (folder / AUTHORITY).exists():
        _write(folder / TOKEN, secrets.token_hex(32))
        made = ("-keyout", str(folder / AUTHORITY_KEY), "-out", str(folder / AUTHORITY))
        _openssl(
            *("req", "-x509", *_CURVE, "-days", str(VALID_DAYS), "-subj", f"/CN=fleet {secrets.token_hex(4)}", *made)
        )
    texts = (read_bytes(folder / name, PipelineError).decode() for name in (TOKEN, AUTHORITY, AUTHORITY_KEY))
    token, authority, authority_key = texts
    return FleetKey(address, token, authority, authority_key, platform.python_version(), ray, __version__)


def write_key(path: Path, key: FleetKey) -> None:
    """Write the file that hosts are given; only its owner can read it."""
    _write(path, msgspec.json.format(msgspec.json.encode(key)).decode() + "\n")


def read_key(path: Path) -> FleetKey:
    """Read a key and check that this machine can use it.

    Raises:
        OptionError: the file cannot be read, or is no key.
        PipelineError: Ray is missing, or the head has another version of Python, Ray or tvm-pipeline.
    """
    content = read_bytes(path, OptionError, MOST_KEY_BYTES)
    try:
        key = msgspec.json.decode(content, type=FleetKey)
        ipaddress.ip_address(key.host)
        if not 0 < key.port < 1 << 16:
            raise ValueError(f"{key.address} has no port")
    except DAMAGED as error:
        raise OptionError(f"{path}: this is no key of a fleet ({error}); `fleet up` writes it, as fleet.key") from error
    check_versions(key)
    return key


def check_versions(key: FleetKey) -> None:
    """Raise PipelineError where this machine has other versions than the head: Ray would try for ever."""
    here = {"Python": platform.python_version(), "Ray": ray_version(), "tvm-pipeline": __version__}
    there = {"Python": key.python, "Ray": key.ray, "tvm-pipeline": key.tvm_pipeline}
    unlike = [f"{name} {here[name]} here and {there[name]} on the head" for name in here if here[name] != there[name]]
    if unlike:
        raise PipelineError(
            f"{', '.join(unlike)}: all machines of a fleet must have the same; install it here, or `fleet up` again on "
            "the head after an upgrade, which writes a new key"
        )


def unpack(key: FleetKey, folder: Path, address: str) -> dict[str, str]:
    """Put what Ray needs of a key into a folder; return the environment variables that tell it.

    Args:
        folder: of this machine; readable by its owner alone.
        address: the IP of this machine in the fleet, for which a certificate is made.
    """
    _private_folder(folder)
    for name, text in ((TOKEN, key.token), (AUTHORITY, key.authority), (AUTHORITY_KEY, key.authority_key)):
        _write(folder / name, text)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        wish, names = Path(made, "wish.pem"), Path(made, "names")
        names.write_text(f"subjectAltName=IP:{address}\n")
        _openssl(
            "req", *_CURVE, "-subj", "/CN=tvm-pipeline", "-keyout", str(folder / CERTIFICATE_KEY), "-out", str(wish)
        )
        signed = ("-in", str(wish), "-out", str(folder / CERTIFICATE), "-extfile", str(names))
        by = ("-CA", str(folder / AUTHORITY), "-CAkey", str(folder / AUTHORITY_KEY))
        serial = ("-set_serial", f"0x{secrets.token_hex(8)}")
        _openssl("x509", "-req", "-days", str(VALID_DAYS), *signed, *by, *serial)
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN),
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(folder / AUTHORITY),
        "RAY_TLS_SERVER_CERT": str(folder / CERTIFICATE),
        "RAY_TLS_SERVER_KEY": str(folder / CERTIFICATE_KEY),
    }


def check_reach(key: FleetKey, folder: Path) -> None:
    """Raise PipelineError where no head answers at the key's address, or that of another fleet; see `unpack`."""
    context = ssl.create_default_context(cafile=str(folder / AUTHORITY))
    context.load_cert_chain(str(folder / CERTIFICATE), str(folder / CERTIFICATE_KEY))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((key.host, key.port), REACH_S) as plain,
            context.wrap_socket(plain) as speaking,
        ):
            speaking.recv(1)  # the head refuses the certificate only after the handshake
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        raise PipelineError(
            f"the head at {key.address} belongs to another fleet, or is none ({why}); take the fleet.key that its "
            "`fleet up` has written, and look at the clock of this machine: certificates are not valid before they are "
            "made"
        ) from error
    except OSError as error:
        raise PipelineError(
            f"no head answers at {key.address} ({error.strerror or error}); run `tvm-pipeline fleet up --head` there, "
            "and let its ports through"
        ) from error


def own_address(towards: str) -> str:
    """Return the IP of this machine that speaks with another one; that one's own where it is this machine."""
    with socket.socket(_family(towards), socket.SOCK_DGRAM) as here:
        try:
            here.bind((towards, 0))
            return towards
        except OSError:
            pass
    with socket.socket(_family(towards), socket.SOCK_DGRAM) as here:
        try:
            here.connect((towards, 9))  # sends nothing
        except OSError as error:
            raise PipelineError(f"no network reaches {towards} ({error.strerror or error})") from error
        return str(here.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise PipelineError(
            f"cannot write {folder}: {error.strerror or error}; name another folder by `folder`"
        ) from error


def _write(path: Path, text: str) -> None:
    """Write a file whole that only its owner can read."""
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)


def _openssl(*arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise PipelineError("the program openssl is missing, which makes certificates; apt install openssl")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, umask=0o077)
    if done.returncode:
        raise PipelineError(
            f"openssl {arguments[0]} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
        )
