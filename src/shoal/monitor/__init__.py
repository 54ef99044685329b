"""The monitor: the first DHT peer, and the one place where the numbers of a run come together."""
