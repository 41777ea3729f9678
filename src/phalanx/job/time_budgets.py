"""Times whose order matters between processes or modules, in seconds.

docs/design.md has the order, with a reason for each relation; tests/unit/test_time_budgets.py checks it.
Times of core, of the helpers, and of modules on the way to the first line of user code stay where they are
used: an import costs more there than it gives. The table refers to them.
"""

# A node's lease and its store
LEASE = 6.0  # of a node's key: the longest silence of a node that keeps its place
LINGER = 1.0  # what is left of a lease when the node's connection ends: a killed agent is noticed this soon
STORE_GRACE = 60.0  # without an answer of the store, or without a connection to the ssh starter
RETURN = 60.0  # for node 0 of a static job to come back, once a round has run
REFUSED = 3.0  # a store without a journal that refuses connections for so long is gone
STORE_ANSWER = 5.0  # for an answer of the store at most; half a lease where that is less
BLOB_POLL = 1.0  # between two reads of a store that is a plug-in's value, while nothing is asked
REDIAL = 1.0  # the longest pause before another attempt to connect
HANDSHAKE_TIME = 5.0  # for each step of a stranger, of the time in which the server waits for its peers
CONNECT_TIME = 5.0  # for each step of a client: a store that a thousand nodes join at once answers, but late

# The end of a node's part in a job
LAST_WORD = 5.0  # for this node and the leader to exchange how the job ended
END_SEEN = 2.0  # for the other nodes to see how it ended; a lease, if that is more, on the store's host
GOODPUT_PART = 1.0  # for the figures of a node that leaves a running job
GOODPUT_SUM = 2.0  # for the last figures of the other nodes, on the node of rank 0
GOODPUT_TOTAL = 2.5  # for the sum, on the others

# Requests, from the innermost to the client
DEVICES = 1.0  # a question for fresh figures of the devices
FIND = 2.0  # the states of all agents of this machine together
WORK = 8.0  # a request that waits for other nodes, workers or devices
REMOTE = 10.0  # a request through the store of a job elsewhere
PAGE = 25.0  # a request of the page
METRICS = 5.0  # a sample of the agent for /metrics
HTTP_TOTAL = 10.0  # one HTTP request

# A hang
NCCL_ASKED = 0.3  # for NCCL's own report
TRACES_SAVED = 0.3  # for the traces to be on the disk
REPORTS_MARGIN = 0.1  # by which the fetching of reports ends before they are given up: its end has to arrive
NATIVE_STACKS_TIME = 8.0  # for py-spy
VERDICT = 10.0  # of another node, before this one checks again

# The end of the launcher
NOTIFIED = 5.0  # for a server that gets a message
OUTBOX_END = 10.0  # for everything that is to be sent
TRAIN_SAMPLE = 5.0  # for the owner's thread, which may be busy
TRAIN_END = 6.0  # for the last report of the progress
PAGE_PARTING = 4.0  # for the last messages to viewers
PAGE_END = 5.0  # for the process of the page
KEPT_ANSWER = 2.0  # for a kept zygote; one that still imports, or is stopped, does not answer

# Beyond the grace period, for everything but the workers' own saving
STEWARD_KILL = 30.0  # for the agent of a host without its starter
OTHER_HOSTS = 10.0  # for the other hosts, when the job cannot go on
SRUN_END = 30  # for srun, which waits for the tasks of a lost node for ever
NOTICE_LEFT = 20  # of Slurm's notice
POD_LEFT = 10  # of a pod's termination grace

# Checks
COLLECTIVE = 8.0  # one collective of a pair
PAIR = 12.0  # one pair
TORCH_IMPORT = 60.0  # the import of torch
ARRIVAL = 90.0  # for the slowest node
DEVICE_LIMIT = 30.0  # for one GPU to answer, each way of asking
COMPUTE_LIMIT = 120.0  # for all GPUs of a machine
