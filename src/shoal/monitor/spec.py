"""What a monitor is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart
from shoal.ids import PeerId


class MonitorSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a monitor.

    Attributes:
        client: of this host, which alone passes on what others have measured.
    """

    client: PeerId
