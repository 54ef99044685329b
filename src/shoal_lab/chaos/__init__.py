"""A real swarm on this machine under faults from a seed, and the verdict on what it has made of them.

plan_faults(seed, ...)     plan        which faults come when: pure
Chaos                      session     starts the swarm, does what the plan says, measures, ends it
judge(evidence)            verdict     all checks of a run that has ended; each finds what is violated, or nothing
"""
