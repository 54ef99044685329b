"""Section `notify`: who else hears of a run."""

from pydantic import Field

from shoal.config.base import Section, Words


class NotifyConfig(Section):
    """A program of the user's that hears of warnings."""

    command: Words = Field(
        default=(),
        description="A program and its arguments, started on the client's host for each event of level WARNING or "
        "worse, which it reads as a line of JSON from its standard input; no shell reads them. Empty: none. A "
        "password belongs into a file that it reads: the configuration is written to the logs.",
    )
