"""Where the laboratory takes hold of a role: what is measured, slowed down and killed there is not in its own code.

RoleStart -> role_hooks -> RoleHooks: the role as it is
                           or `shoal_lab.emulation`'s, if the section `emulation` is about this role
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from shoal.control.role_start import RoleStart
from shoal.transport.dispatch import Handler

if TYPE_CHECKING:
    from shoal.pipeline.device_operations import Operations

_LABORATORY: Final = "shoal_lab.emulation.hooks"


class RoleHooks:
    """Of a role that pretends nothing."""

    def handlers(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        """Return what takes the messages of a role instead of its own handlers."""
        return handlers

    def operations(self, plain: Operations) -> Operations:
        """Return what has a device compute instead of a replica's own operations."""
        return plain

    def reached(self, point: str, number: int) -> None:
        """A role has reached a point that no message and no operation shows, in this step or round."""


NO_HOOKS: Final = RoleHooks()


def role_hooks(start: RoleStart) -> RoleHooks:
    """Return the hooks of a role that starts."""
    if not start.config().emulation.is_about(start.role, start.index):
        return NO_HOOKS
    # By its name: the product has no need of the laboratory.
    laboratory = importlib.import_module(_LABORATORY)
    return cast(RoleHooks, laboratory.emulated(start))
