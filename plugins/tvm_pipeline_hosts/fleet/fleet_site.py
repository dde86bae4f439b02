"""A fleet over HTTP, beside its coordinator: a page, its state as JSON, metrics.

    with FleetSite(coordinator.status, port=9600) as site:
        print(site.url)

    /metrics   for Prometheus, with the label `host`
    /health    200, or 503 if a host is lost, a camera has none, or results cannot be written; JSON tells why
    /state     `FleetStatus` as JSON
    /          a page that draws it

Who may ask, and within which limits: `tvm_pipeline_video/http_server.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers

from tvm_pipeline_hosts.fleet.fleet_metrics import new_registry
from tvm_pipeline_hosts.fleet.messages import FleetStatus
from tvm_pipeline_video.watch.site import Reply, Site, json_reply, metrics_reply, page_reply, text_reply


class FleetSite(Site):
    """Answers requests about a fleet.

    Args:
        status: the fleet as it is now; it is called from threads, so it takes the lock of the coordinator.
        address, port, token: see `Site`.
    """

    def __init__(
        self,
        status: Callable[[], FleetStatus],
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
    ) -> None:
        self._status = status
        self._registry = new_registry(status)
        super().__init__(address, port, token=token)

    def answer(self, path: str, query: str, headers: Headers) -> Reply:
        match path:
            case "/":
                return page_reply(__package__, "fleet_page.html")
            case "/metrics":
                return metrics_reply(self._registry, headers)
            case "/state":
                return json_reply(HTTPStatus.OK, self._status())
            case "/health":
                why = unhealthy(self._status())
                status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
                return json_reply(status, {"healthy": not why, "why": "; ".join(why)})
        return text_reply(HTTPStatus.NOT_FOUND, "there are /metrics /health /state and /")


def unhealthy(status: FleetStatus) -> list[str]:
    """Return what is wrong with a fleet, in sentences; nothing if all is well."""
    lost = [name for name, host in status.hosts.items() if host.state in ("late", "unknown")]
    homeless = sorted({duty.camera for duty in status.duties if duty.host is None})
    why = [status.results] if status.results else []
    why += [f"no beat of {', '.join(lost)}"] if lost else []
    return why + ([f"no host has {', '.join(homeless)}"] if homeless else [])
