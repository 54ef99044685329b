"""Samples: from a source through shared memory to the trainers, each exactly once per pass."""
