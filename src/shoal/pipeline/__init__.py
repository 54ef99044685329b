"""Both ends of a training step: the trainer's driver, the server's worker, a stage's computation."""
