"""`shoal benchmark NAME`: how fast shoal is on this machine, beside what others use for the same job."""
