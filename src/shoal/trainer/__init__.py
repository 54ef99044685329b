"""The trainer: leases a batch, drives it through a path, commits, reports. Holds no model."""
