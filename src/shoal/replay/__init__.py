"""A run once more, in one process, from the files that it has left: every round has to come to the same hashes."""
