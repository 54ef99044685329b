"""A run once more, from the files that it has left: every round has to come to the same hashes."""
