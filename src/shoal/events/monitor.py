"""The monitor and where it writes numbers."""

from __future__ import annotations

from logging import WARNING

from shoal.events.base import Event


class WandbOnline(Event, frozen=True, tag="wandb.online"):
    """The run's curves are at W&B."""

    says = "wandb: {url}"
    url: str


class WandbOffline(Event, frozen=True, tag="wandb.offline"):
    """The run's curves are in files; W&B cannot be reached, knows no user here, or is told to stay offline."""

    says = "wandb: offline; to upload this run: wandb sync {parts}"
    parts: str
    reason: str | None = None


class WandbMissing(Event, frozen=True, tag="wandb.missing"):
    """The package of W&B is not installed."""

    level = WARNING
    do = "install it with `pip install 'shoal[wandb]'`, or say --no-wandb"
    says = "wandb: not installed, so nothing is logged there"


class WandbStopped(Event, frozen=True, tag="wandb.stopped"):
    """W&B has failed, and gets no numbers any more."""

    level = WARNING
    why = "W&B has refused the numbers, or its files could not be written"
    says = "wandb: stopped logging ({reason}); the run goes on without it"
    reason: str


class PeersMeasured(Event, frozen=True, tag="monitor.peers"):
    """What each peer has measured, as the monitor has heard it last; written when the monitor ends.

    Attributes:
        measured: by what the peer is called, and by the name of the number.
    """

    measured: dict[str, dict[str, float]]


class ExportUnfinished(Event, frozen=True, tag="export.unfinished"):
    """One of the ways out, as W&B, had not written everything when the monitor ended."""

    level = WARNING
    exporter: str
    timeout_s: float


class NotifyFailed(Event, frozen=True, tag="notify.failed"):
    """The program of `notify.command` could not be told of a warning."""

    level = WARNING
    do = "try it with a line of events.jsonl on its standard input"
    says = "notify.command: {command} failed ({reason})"
    command: str
    reason: str


class DashboardOpen(Event, frozen=True, tag="dashboard.open"):
    """The dashboard is served here, for browsers of this host; the token that lets one in is in no log."""

    address: str


class DashboardAway(Event, frozen=True, tag="dashboard.away"):
    """The dashboard is not at the port that was wanted: it takes another one."""

    port: int
    reason: str


class DashboardMissing(Event, frozen=True, tag="dashboard.missing"):
    """The packages of the dashboard's web server are not installed."""

    level = WARNING
    do = "install it with `pip install 'shoal[dashboard]'`, or say --no-dashboard.enable"
    says = "dashboard: not installed, so there is none"


class DashboardStopped(Event, frozen=True, tag="dashboard.stopped"):
    """The dashboard cannot be served, or not any more."""

    level = WARNING
    why = "its files in the run's folder cannot be read or written, or it has no port"
    says = "dashboard: there is none ({reason}); the run goes on without it"
    reason: str
