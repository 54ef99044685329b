"""What a run's model is on a disk: written stage by stage, read back as the model in one piece; and its checkpoints."""
