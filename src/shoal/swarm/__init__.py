"""Pure decisions of the swarm: step, round, lease, assignment, routing. Events in, effects out; no I/O, no clock, no
torch."""
