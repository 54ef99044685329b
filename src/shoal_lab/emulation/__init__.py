"""What the section `emulation` of a configuration asks for: slow devices, and deaths at a chosen point.

A role that is to pretend something takes its hooks from here; see `shoal.pipeline.role_hooks`.
"""
