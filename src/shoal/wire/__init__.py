"""Bytes to typed messages and back, without I/O."""
