"""What a mirror is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart


class MirrorSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a mirror: those of every role."""
