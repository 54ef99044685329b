"""What a scout is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart


class ScoutSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a scout: those of every role; `run_id` is empty as long as nobody knows it."""
