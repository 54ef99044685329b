"""Endpoints that exchange framed messages with peers: over Unix sockets, or within one process for tests."""
