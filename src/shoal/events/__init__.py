"""Everything that can happen in a run, as typed events: see `events.base`."""
