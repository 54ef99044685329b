"""What a data server is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart
from shoal.ids import PeerId


class DataServerSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a data server.

    Attributes:
        client: The only peer that may plan, record and release; None where peers only read, as the baseline does.
    """

    client: PeerId | None
