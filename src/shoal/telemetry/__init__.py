"""The numbers of a process and of a run: what there is, how a process keeps it, and a second of all of them."""
