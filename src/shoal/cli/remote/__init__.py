"""`shoal up` and `shoal hosts`: a swarm on many machines from one file, over the system's own ssh.

hosts.yaml --> hosts_file --> bring_up --probe--> ssh --> install --> unit (`unit`, on the host) --> a run that trains

Nothing of it stays on a host but an installation and the units: there is no agent and no daemon.
"""
