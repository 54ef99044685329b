"""What a monitor is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart


class MonitorSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a monitor: those of every role."""
