"""Where the numbers and events of a run go from the monitor, several ways at once."""
