"""A family that is not the same when it is cut, by what is installed on this host."""

from __future__ import annotations

from shoal.model.gpt import GptFamily


class InexactFamily(GptFamily):
    """A gpt that says so."""

    def exactness_problem(self) -> str | None:
        return "the version that is installed here reads what another stage keeps"
