"""ssh: one command starts an agent on every host, and ends them all.

    phalanx run --hosts a,b       starter ── ssh ──► sshd ── steward ──► agent (phalanx run …)    on each host

The steward is the agent's parent on its host. It relays output and signals, and outlives a lost connection:
the starter comes back over a new one, and reads on where it was. A steward to which the starter does not come
back in time stops its agent: the starter is dead, as far as it can tell.
"""
