"""`shoal doctor`: what keeps this host from taking part in a swarm, and what to do about it.

    config, key, host, swarm --collect--> Facts --CHECKS--> a CheckResult each --> Diagnosis --> text or JSON

`host_facts` and `swarm_facts` look, all at once and for a few seconds at most; what a check makes of what they have
seen is a pure function (`host_checks`, `swarm_checks`). A check that does not apply is skipped, and says why.
"""
