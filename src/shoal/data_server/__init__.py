"""The data server: reads and prepares each sample once and hands batches to the trainers of its host."""
