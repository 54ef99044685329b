"""The monitor and where it writes numbers."""

from __future__ import annotations

from logging import WARNING

from shoal.events.base import Event


class WandbOnline(Event, frozen=True, tag="wandb.online"):
    """The run's curves are at W&B."""

    url: str

    def say(self) -> str:
        return f"wandb: {self.url}"


class WandbOffline(Event, frozen=True, tag="wandb.offline"):
    """The run's curves are in files; W&B cannot be reached, knows no user here, or is told to stay offline."""

    parts: str
    reason: str | None = None

    def say(self) -> str:
        return f"wandb: offline; to upload this run: wandb sync {self.parts}"


class WandbMissing(Event, frozen=True, tag="wandb.missing"):
    """The package of W&B is not installed."""

    level = WARNING
    do = "pip install 'shoal[wandb]', or --no-wandb"

    def say(self) -> str:
        return "wandb: not installed, so nothing is logged there"


class WandbStopped(Event, frozen=True, tag="wandb.stopped"):
    """W&B has failed, and gets no numbers any more."""

    level = WARNING
    why = "W&B has refused the numbers, or its files could not be written"
    reason: str

    def say(self) -> str:
        return f"wandb: stopped logging ({self.reason}); the run goes on without it"


class WandbUnfinished(Event, frozen=True, tag="wandb.unfinished"):
    """W&B had not sent everything when the monitor ended."""

    level = WARNING
    timeout_s: float
