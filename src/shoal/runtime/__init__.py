"""Processes: the supervisor and its fork server, the lifeline, the control pipe, the one device thread."""
