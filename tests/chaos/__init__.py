"""A campaign of random faults against real agents on one machine (`make chaos`; docs/chaos.md).

`schedule` and `invariants` are pure: a seed gives a plan, recorded life signs give violations. `campaign`
runs one against the other with `job` (agents, store, helpers) and `private_network` (namespaces, links).
"""
