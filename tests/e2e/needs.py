"""Marks of tests that need what not every machine has; asked once, since it is asked by making it."""

from __future__ import annotations

import pytest
from tests.e2e.namespaces import why_impossible
from tests.e2e.ssh_hosts import why_no_sshd

_NO_NAMESPACES = why_impossible()
_NO_SSH = _NO_NAMESPACES or why_no_sshd()
needs_namespaces = pytest.mark.skipif(_NO_NAMESPACES is not None, reason=str(_NO_NAMESPACES))
needs_ssh_hosts = pytest.mark.skipif(_NO_SSH is not None, reason=str(_NO_SSH))
