"""The server: hosts one replica of one stage."""
