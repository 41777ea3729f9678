"""A job in virtual time: the real participants and the real store model over a network that misbehaves.

Nothing here reads a clock or the outside world; all chance comes from one seeded generator, so a
seed is a run. `Simulation` is the mechanism; `chaos` (in chaos.py) decides what goes wrong.

The network: each agent has one connection at a time. What the store sends on a connection stays in
order (TCP), what agents send may be delayed past each other and delivered twice, also on
connections that the agent has long given up. A cut holds messages back until it heals, in one
direction or both. A connection that an agent closes is closed for the store a little later. One may
break at any message, on both sides at once, or pass nothing from then on, which no side is told. An address
may refuse connections while the store lives. A connection that does not answer is replaced by another one
beside it, as the client does it: it is not closed before.

The store may be killed and come back with its journal, or with a journal that has lost its tail. Other
programs, and nodes of other versions, write where the job's records are.

Checked all the time (`Broken` is raised at the first violation):
- two nodes never run workers of different rounds at the same moment, whether their agents are stopped or not;
- the numbers of the rounds that a node starts only grow, and so does their count of restarts;
- all nodes start a round with the same members, each rank once, ranks 0..n-1;
- the store never gives up the lease of a node that runs workers;
  In both, one case is excused: an agent is stopped, *and* its connection breaks meanwhile. The store cannot
  tell that from the end of the agent and shortens the lease, the agent does not learn of it, and its helpers
  only know the time until which the lease was proved.
- a quarantined host is in a round only if its leader saw too few others, and then with no more than needed;
- the group of every node can take each event that its participant reports, in that order: none is illegal;
- the jobs that use one id follow each other: a later round is never of an earlier job, and no node runs
  workers of two of them.
"""

from __future__ import annotations

import copy
import heapq
import json
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from phalanx.core.group import events as group_events
from phalanx.core.group.events import PeerFailed, RoundFailed, RoundOver
from phalanx.core.group.group import GroupPolicy, GroupState, IllegalMove, Phase, step
from phalanx.core.group.ranks import offsets
from phalanx.core.group.restarts import RestartPolicy
from phalanx.core.rounds.causes import HOSTS
from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant import Participant
from phalanx.core.rounds.participant_events import (
    Action,
    Answer,
    ClockTick,
    Connected,
    Disconnected,
    End,
    Event,
    LeaseMissed,
    LeaveRequested,
    Noticed,
    Remark,
    RoundEnd,
    Send,
    StartRound,
    StoreWentBack,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from phalanx.core.rounds.quarantine import restore
from phalanx.core.rounds.records import (
    ACTIVE,
    Member,
    NodeInfo,
    decode_host,
    decode_members,
    decode_round,
)
from phalanx.core.rounds.store_commands import Command, Delete, Notice, Put, Reply, Txn, Watch
from phalanx.core.rounds.verdicts import job_over
from phalanx.store.embedded.answer_time import AnswerTime
from phalanx.store.embedded.client_session import Request, Session
from phalanx.store.model import Model

POLICY = GroupPolicy(RestartPolicy(max_restarts=1_000_000))


class Broken(AssertionError):
    """An invariant does not hold."""


class Connection:
    """One TCP connection: each side may think it open or closed."""

    def __init__(self, agent: Agent, epoch: int) -> None:
        self.agent, self.epoch = agent, epoch
        self.client_open = self.server_open = True
        self.silent = False  # it passes nothing any more, in either direction
        self.queue: deque[tuple[float, Callable[[], None]]] = deque()  # from the store, in order


class Agent:
    """A node: the real participant and session, and pretended workers."""

    def __init__(
        self, name: str, node_id: str, options: Options, running_in: dict[int, set[Agent]], **info: Any
    ) -> None:
        self.name, self.id = name, node_id
        self.participant = Participant(NodeInfo(node_id, name, **info), options)
        self.session = Session()
        self.tags: dict[int, int] = {}
        self.connection: Connection | None = None
        self.alive, self.asleep, self.asleep_until = True, False, 0.0
        self.inbox: list[Callable[[], None]] = []
        self.running_in = running_in
        self._workers: int | None = None
        self.ended: End | None = None
        self.cut_up = self.cut_down = 0.0  # until when nothing goes to / comes from the store
        self.version = 1  # of the package; another one writes fields that this one does not know
        self.history = 0  # how often the store had gone back when this node last spoke to it
        self.saved = 0  # the round in which its workers saved a checkpoint for a preemption
        self.unaware = (
            False  # its connection broke while it was stopped, so that its lease is shorter than it knows
        )
        self.last = 0  # the last round it started
        self.restarts = 0  # as counted in that round
        self.locked_out = 0.0  # until when it gets no new connection
        self.dialling = False
        self.missed = 0  # a request without an answer, for which another connection is looked for
        self.answer_time = AnswerTime(min(5.0, max(1.0, options.ttl / 2)))
        self.sent: dict[int, float] = {}
        self.timer = 0
        self.at_once = 0  # how often in a row it asked to be woken without any time passing
        self.run_number = 0
        self.group = GroupState()
        self.job = 0  # whose workers it has run

    @property
    def workers(self) -> int | None:
        """The round whose workers this node has."""
        return self._workers

    @workers.setter
    def workers(self, number: int | None) -> None:
        if self._workers is not None:
            self.running_in[self._workers].discard(self)
            if not self.running_in[self._workers]:
                del self.running_in[self._workers]
        if number is not None:
            self.running_in.setdefault(number, set()).add(self)
        self._workers = number


class Simulation:
    """Virtual time, one store, any number of agents."""

    def __init__(self, seed: int, options: Options, *, latency: tuple[float, float] = (0.001, 0.03)) -> None:
        self.random = random.Random(seed)
        self.options, self.latency = options, latency
        self.now = 0.0
        self.agents: dict[str, Agent] = {}
        self.running: dict[int, set[Agent]] = {}  # round -> who runs its workers
        self.store = Model(history=200)
        self.store_up, self.epoch, self.store_down_until = True, 1, 0.0
        self.current: dict[str, Connection] = {}
        self.duplicates = self.reorder = 0.0
        self.loss = 0.0  # how often a message breaks its connection
        self.silence = 0.0  # how often a message is the last one that its connection passes
        self.kill_time = 0.0  # the most that killing workers takes, as a part of lease or linger
        self.went_back = 0
        self.forgot = False  # the store has lost rounds: it went back, or another program wrote there
        self._tail: list[tuple[float, Any]] = []  # states that the store would go back to
        self.remarks: list[str] = []
        self.preempted: dict[int, set[str]] = {}  # round -> the nodes that had workers when it was preempted
        self.messages = {"requests": 0, "replies": 0, "notices": 0, "bytes": 0}
        self.rounds: dict[int, tuple[str, tuple[Member, ...]]] = {}  # round -> its stamp and members
        self.jobs: dict[int, int] = {}  # round -> the job it is of
        self.started: dict[tuple[int, int], str] = {}
        self.trace: list[str] = []
        self.tracing = False
        self.ended = 0
        self.last_resorts = 0  # rounds with a quarantined host
        self.on_start: Callable[[Agent, StartRound], None] = lambda agent, start: None
        self.stop_time: Callable[[], float] = lambda: 0.1
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._expiry = float("inf")
        self._back_to: Any = None

    # Time

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Call `what` at a virtual time."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, what))

    def run(self, until: float, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._heap and self._heap[0][0] <= until and not stop():
            self.now, _, what = heapq.heappop(self._heap)
            what()
        if not stop():
            self.now = max(self.now, until)

    def say(self, agent: str, text: str) -> None:
        """A line of the trace."""
        if self.tracing:
            self.trace.append(f"{self.now:8.3f}  {agent}: {text}")

    # Agents

    def join(self, name: str, *, node_id: str = "", **info: Any) -> Agent:
        """A new agent process on a host."""
        agent = Agent(name, node_id or name, self.options, self.running, **info)
        self.agents[agent.id] = agent
        self.say(agent.id, "process starts")
        self._follow(agent, group_events.Start())
        self._act(agent, agent.participant.start(self.now))
        self._connect(agent)
        return agent

    def crash(self, agent: Agent, *, host: bool = False) -> None:
        """SIGKILL: the workers die with the agent and the kernel closes its socket; or the host dies."""
        self.say(agent.id, "host lost" if host else "process killed")
        agent.alive, agent.workers = False, None
        if not host:
            self._close_from_client(agent)

    def _follow(self, agent: Agent, event: group_events.Event) -> None:
        """The group of this node takes an event; what it commands is played elsewhere here."""
        try:
            agent.group = step(agent.group, event, self.now, POLICY).state
        except IllegalMove as error:
            raise Broken(f"{agent.id}: {error}") from error

    def sleep(self, agent: Agent, seconds: float) -> None:
        """SIGSTOP now, SIGCONT later: the workers run on meanwhile, until the helpers find the lease over."""
        self.say(agent.id, f"process stopped for {seconds:.1f} s")
        agent.asleep, agent.asleep_until = True, max(agent.asleep_until, self.now + seconds)
        self.at(self.now + seconds, lambda: self._wake_up(agent))
        if agent.participant.lease.number:
            self.at(agent.participant.lease.ends, lambda: self._fence(agent))

    def _fence(self, agent: Agent) -> None:
        """The helpers of a stopped agent kill its workers when the time that it set last has come."""
        if agent.alive and agent.asleep and agent.workers is not None and agent.participant.lease.number:
            self.say(agent.id, "workers killed: the lease was not renewed in time")
            run, number = agent.run_number, agent.workers

            def gone() -> None:
                if agent.run_number == run and agent.workers is not None:
                    agent.workers = None
                    self._tell(agent, LeaseMissed(number))

            self.at(self.now + self._kill_time(), gone)

    def _kill_time(self) -> float:
        """How long killing workers takes now: within the tenth of a lease that is kept back for it."""
        return self.random.uniform(0, self.kill_time) * min(self.options.ttl, self.options.linger)

    def cut(self, agent: Agent, seconds: float, *, up: bool = True, down: bool = True) -> None:
        """Partition one host from the store."""
        self.say(agent.id, f"cut off for {seconds:.1f} s{'' if up and down else ' in one direction'}")
        agent.cut_up = self.now + seconds if up else agent.cut_up
        agent.cut_down = self.now + seconds if down else agent.cut_down

    def end_workers(self, agent: Agent, ok: bool, detail: str = "") -> None:
        """The workers of a node end: all of them well, or one fails and the others are stopped."""
        number, run = agent.workers, agent.run_number
        if number is None:
            return
        self.say(agent.id, f"workers {'succeeded' if ok else 'failed: ' + detail}")
        if agent.group.phase is Phase.RUNNING:
            ended = group_events.AllSucceeded() if ok else group_events.WorkerFailed(detail)
            self._follow(agent, ended)
        if ok:
            agent.workers = None
            self._tell(agent, WorkersSucceeded(number))
        else:
            self._tell(agent, WorkersFailed(number, NodeFailure(detail)))
            self._stop_workers(agent, number, run, self.stop_time())

    def _stop_workers(self, agent: Agent, number: int, run: int, seconds: float) -> None:
        def stopped() -> None:
            if agent.alive and agent.run_number == run:
                agent.workers = None
                if agent.group.phase in (Phase.REFORMING, Phase.CLEARING, Phase.ENDING):
                    self._follow(agent, group_events.Stopped())
                self._tell(agent, WorkersStopped(number))

        self.at(self.now + seconds, stopped)

    def leave(self, agent: Agent, reason: str, preempted: bool = False) -> None:
        """SIGTERM or a preemption notice."""
        self._tell(agent, LeaveRequested(reason, preempted))

    def unfit(self, agent: Agent, why: str) -> None:
        """The workers of a node could not be started: as the shell does, it reports that and leaves."""
        number, agent.workers = agent.workers, None
        if number is None or agent.participant.work.running != number:
            return
        self.say(agent.id, f"cannot start workers: {why}")
        self._tell(agent, WorkersFailed(number, NodeFailure(why), unfit=True))
        self.leave(agent, why)
        self._tell(agent, WorkersStopped(number))

    def refuse(self, agent: Agent, seconds: float, *, told: bool = True) -> None:
        """A firewall refuses this host's connections to a store that lives; `told`: the store sees it end."""
        self.say(agent.id, f"refused for {seconds:.1f} s")
        agent.locked_out = self.now + seconds
        connection = agent.connection
        if connection is not None and not told:
            agent.connection, connection.client_open = None, False
            self._tell(agent, Disconnected())
            self._connect(agent)
        else:
            self.break_connection(agent)

    def delete(self, key: str) -> None:
        """Another program deletes a key of the job."""
        self.forgot |= key.endswith(("ctl/round", "members"))
        _, notices = self.store.apply("operator", self._count, self._count, Delete(key), self.now)
        self._count += 1
        self._notify(notices)

    def put(self, key: str, value: bytes) -> None:
        """A write by somebody outside the job (a drain or close request, or another program)."""
        self.forgot |= key.endswith(("ctl/round", "members"))
        _, notices = self.store.apply("operator", self._count, self._count, Put(key, value), self.now)
        self._count += 1
        self._notify(notices)

    def _tell(self, agent: Agent, event: Event) -> None:
        if not agent.alive or agent.ended is not None:
            return
        if agent.asleep:
            agent.inbox.append(lambda: self._tell(agent, event))
            return
        before = (agent.participant.leading, agent.participant.reason)
        actions = agent.participant.step(self.now, event)
        if agent.participant.leading and not before[0]:
            self.say(agent.id, "leads")
        if agent.participant.leading and agent.participant.reason != before[1]:
            self.say(agent.id, f"({agent.participant.reason})")
        self._act(agent, actions)

    def _wake_up(self, agent: Agent) -> None:
        if agent.alive and agent.asleep and agent.asleep_until <= self.now:
            agent.asleep = False
            self.say(agent.id, "process continued")
            inbox, agent.inbox = agent.inbox, []
            self._tell(agent, ClockTick())
            self._check_one_round(agent)
            for deliver in inbox:
                deliver()

    def _act(self, agent: Agent, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(tag, command):
                    self._check_chosen(agent, command)
                    self._ask(agent, tag, command)
                case StartRound():
                    self._start(agent, action)
                case RoundOver() | PeerFailed() | RoundFailed():
                    self._follow(agent, action)
                    self._stop(agent, action)
                case Remark(text):
                    self.say(agent.id, f"tells: {text}")
                    self.remarks.append(text)
                case End(outcome, reason):
                    self.say(agent.id, f"ends: {outcome} ({reason})")
                    agent.ended, self.ended = action, self.ended + 1
                    self._follow(agent, job_over(action, reason))
                    if agent.workers is not None:
                        self.at(self.now + self.stop_time(), lambda: self._gone_after_end(agent))
                    # What is still to be said is said before the connection closes.
                    self.at(self.now + self.latency[1], lambda: self._close_from_client(agent))
        agent.timer += 1
        wake = agent.participant.wake_at()
        if wake is not None and agent.ended is None:
            timer = agent.timer
            agent.at_once = agent.at_once + 1 if wake <= self.now else 0
            if agent.at_once > 1000:
                raise Broken(f"{agent.id} asks to be woken at once, again and again")
            self.at(wake, lambda: self._tell(agent, ClockTick()) if agent.timer == timer else None)

    def _check_chosen(self, agent: Agent, command: Command) -> None:
        """A quarantined host is a member only as the last resort, by what its leader sees at that moment."""
        view, options = agent.participant.view, self.options
        if view is None or options.fixed or not isinstance(command, Txn):
            return
        values = {put.key.removeprefix(options.prefix): put.value for put in command.puts}
        found = decode_members(values.get("members", b""))
        if found is None or len(found.nodes) > options.batch:  # decided a while ago, before its places
            return
        state = view.hosts.state
        for key, value in values.items():
            if key.startswith(HOSTS):
                state = restore(state, key.removeprefix(HOSTS), decode_host(value), self.now)
        here = [seen for seen in view.staying().values() if seen.record.ready >= view.round.number]
        fit = {seen.record.info.id for seen in here if state.entry(seen.name, self.now) is None}
        members = {m.id for m in found.nodes}
        out = [m.name for m in found.nodes if m.id not in fit]
        if out and fit and (fit - members or not len(fit) < options.min_nodes == len(members)):
            raise Broken(f"round {found.number} has {out}, quarantined, of {here}")
        if not out and len(members) < min(len(fit), options.max_nodes):
            raise Broken(f"round {found.number} has {members}, of {fit}")
        self.last_resorts += bool(out)

    def _start(self, agent: Agent, start: StartRound) -> None:
        place, number = start.place, start.round.number
        stamp, members = self.rounds[number]
        self.say(agent.id, f"starts workers: round {number}, rank {place.rank} of {start.round.nodes}")
        if (start.round.stamp, start.round.nodes) != (stamp, len(members)):
            raise Broken(f"{agent.id} starts {start.round}, which the store never held")
        if members[place.rank][:2] != (agent.id, place.incarnation):
            raise Broken(f"{agent.id} starts as rank {place.rank} of {members}")
        if len(members) < 20 and place.offsets != offsets((m.role, m.slots) for m in members)[place.rank]:
            raise Broken(f"{agent.id} starts at {place}, which does not fit {members}")
        if self.options.fixed and place.rank != agent.participant.info.rank:
            raise Broken(
                f"{agent.id} was given rank {agent.participant.info.rank} and starts as {place.rank}"
            )
        if self.started.setdefault((number, place.rank), agent.id) != agent.id:
            raise Broken(f"rank {place.rank} of round {number} was started twice")
        # Where the store has forgotten rounds, only nodes that are left know their numbers and jobs.
        left = {a.last for a in self.agents.values() if a.alive and a.ended is None}
        before = left if self.forgot else self.jobs.keys()
        if max(self.jobs.get(n, 0) for n in (*before, 0) if n < number) > start.round.job:
            raise Broken(f"round {number} is of job {start.round.job}, an earlier one is not: {self.jobs}")
        if agent.job not in (0, start.round.job):
            raise Broken(f"{agent.id} of job {agent.job} starts a round of job {start.round.job}")
        agent.job = self.jobs[number] = start.round.job
        if number <= agent.last:
            raise Broken(f"{agent.id} starts round {number} after round {agent.last}")
        if start.round.restarts < agent.restarts:
            raise Broken(f"{agent.id} has seen {agent.restarts} restarts, and starts {start.round}")
        agent.last, agent.restarts = number, start.round.restarts
        if agent.workers is not None:
            raise Broken(f"{agent.id} starts round {number} over round {agent.workers}")
        agent.workers, agent.run_number, agent.unaware = number, agent.run_number + 1, False
        members_names, restarts = start.round.all_names(), start.round.restarts
        ready = group_events.GroupRound(number, members_names, place.rank, attempt=restarts, counted=True)
        self._follow(agent, group_events.RoundReady(ready))
        if agent.group.phase is Phase.WAITING:
            agent.group = step(agent.group, group_events.Tick(), agent.group.not_before, POLICY).state
        if agent.group.phase is Phase.STARTING:
            self._follow(agent, group_events.Started())
        if agent.group.phase not in (Phase.RUNNING, Phase.DONE):
            raise Broken(f"{agent.id} starts workers in phase {agent.group.phase} of its group")
        self._check_one_round(agent)
        self.on_start(agent, start)

    def _gone_after_end(self, agent: Agent) -> None:
        agent.workers = None
        if agent.alive:
            self._act(agent, agent.participant.step(self.now, WorkersStopped(agent.last)))

    def _stop(self, agent: Agent, end: RoundEnd) -> None:
        number, run = agent.last, agent.run_number
        at_once = isinstance(end, RoundOver) and end.at_once
        preempted = isinstance(end, RoundOver) and end.preempted
        if agent.workers is not None:
            how = " at once" if at_once else " when they have saved" if preempted else ""
            self.say(agent.id, f"stops workers{how}: {_why(end)}")
            if preempted:
                agent.saved = number
        if at_once and not self.kill_time:
            agent.workers = None
        self._stop_workers(agent, number, run, self._kill_time() if at_once else self.stop_time())

    def _check_one_round(self, agent: Agent) -> None:
        if agent.workers is None:
            return
        for number in self.running.keys() - {agent.workers}:
            others = sorted(other.id for other in self.running[number] if not other.unaware)
            if others and not agent.unaware:
                mine = f"at {self.now:.3f} {agent.id} runs round {agent.workers}"
                raise Broken(f"{mine}, {' '.join(others)} round {number}")

    # The agent's end of the network

    def _delay(self) -> float:
        return self.random.uniform(*self.latency)

    def _connect(self, agent: Agent) -> None:
        if agent.dialling:
            return
        agent.dialling = True

        def again(when: float) -> None:
            self.at(when, lambda: self.at(self.now + self._delay(), arrive))

        def arrive() -> None:
            answered = agent.connection is not None and agent.missed not in agent.tags
            if not agent.alive or agent.ended is not None or answered:
                agent.dialling = False
            elif agent.asleep:
                again(agent.asleep_until + 0.001)
            elif max(agent.cut_up, agent.cut_down, agent.locked_out) > self.now:
                again(self.now + 0.5)
            elif not self.store_up or self.random.random() < 1 - (1 - self.loss) ** 4:
                again(self.now + 0.2)
            elif self.silence and self.random.random() < 1 - (1 - self.silence) ** 6:
                if self.random.random() < 0.3:
                    self._greet(Connection(agent, self.epoch)).silent = True  # the Welcome was lost
                again(self.now + agent.answer_time.seconds)
                agent.answer_time.missed()
            else:
                agent.dialling = False
                if agent.connection is not None:
                    agent.connection.client_open = False
                agent.connection = self._greet(Connection(agent, self.epoch))
                if agent.history != self.went_back:
                    agent.history = self.went_back
                    self._tell(agent, StoreWentBack())
                for request in agent.session.resume():
                    self._transmit(agent, request)
                self._tell(agent, Connected())

        self.at(self.now + self._delay(), arrive)

    def _greet(self, connection: Connection) -> Connection:
        """The store takes this for the session's connection and drops the one before, whose leases stay."""
        name = connection.agent.id
        old = self.current.get(name)
        if old is not None:
            old.server_open = False
            self.store.hang_up(name)
        self.current[name] = connection
        return connection

    def break_connection(self, agent: Agent) -> None:
        """The agent finds its connection dead and makes a new one."""
        if agent.connection is not None and agent.alive and agent.ended is None:
            self.say(agent.id, "connection lost")
            self._close_from_client(agent)
            self._tell(agent, Disconnected())
            self._connect(agent)

    def _both_hang_up(self, connection: Connection) -> None:
        """The connection breaks, and each side learns of it at once."""
        agent = connection.agent
        if connection.server_open and self.store_up and connection.epoch == self.epoch:
            self._server_hears_close(connection)
        connection.server_open = False
        if agent.connection is connection:
            if agent.asleep:
                agent.inbox.append(lambda: self.break_connection(agent))
            else:
                self.break_connection(agent)

    def _close_from_client(self, agent: Agent) -> None:
        connection, agent.connection = agent.connection, None
        if connection is not None:
            connection.client_open = False
            self._up(agent, connection, lambda: self._server_hears_close(connection))

    def _ask(self, agent: Agent, tag: int, command: Command) -> None:
        request = agent.session.ask(command)
        agent.tags[request.number] = tag
        if agent.connection is not None:
            self._transmit(agent, request)

    def _transmit(self, agent: Agent, request: Request) -> None:
        connection = agent.connection
        assert connection is not None
        copies = 2 if self.random.random() < self.duplicates else 1
        for _ in range(copies):
            self.messages["requests"] += 1
            self._up(agent, connection, lambda: self._serve(connection, request))
        watched = request.number
        agent.sent[watched] = self.now
        self.at(self.now + agent.answer_time.seconds, lambda: self._miss(agent, connection, watched))

    def _miss(self, agent: Agent, connection: Connection, number: int) -> None:
        """No answer for long: the client makes another connection, and keeps this one open until then."""
        if agent.alive and agent.connection is connection and number in agent.tags:
            if agent.asleep:
                self.at(agent.asleep_until + 0.001, lambda: self._miss(agent, connection, number))
            else:
                agent.missed = number
                self._connect(agent)

    def _up(self, agent: Agent, connection: Connection, what: Callable[[], None]) -> None:
        delay = self._delay() + (self.random.uniform(0, 0.5) if self.random.random() < self.reorder else 0)

        def arrive() -> None:
            if self.loss and self.random.random() < self.loss:
                self._both_hang_up(connection)
            elif self._is_lost(connection):
                pass
            elif agent.cut_up > self.now:
                self.at(agent.cut_up + self._delay(), arrive)
            elif connection.server_open and connection.epoch == self.epoch and self.store_up:
                what()

        self.at(self.now + delay, arrive)

    def _is_lost(self, connection: Connection) -> bool:
        """Whether this message does not arrive, and none after it."""
        if self.silence and not connection.silent and self.random.random() < self.silence:
            self.say(connection.agent.id, "connection silent")
            connection.silent = True
        return connection.silent

    # The store's end

    def keep(self) -> None:
        """What the journal holds for certain now: the state that `stop_store(back=True)` goes back to."""
        self._tail.append((self.now, copy.deepcopy(self.store.dump())))

    def stop_store(self, seconds: float, *, back: bool = False) -> None:
        """Kill the store; it comes back with its journal, or `back` in the last state that was kept."""
        self.say("store", f"down for {seconds:.1f} s{', and loses the tail of its journal' if back else ''}")
        if back and self._tail:
            self._back_to = self._tail[-1][1]
        self.store_up, self.epoch = False, self.epoch + 1
        self.store_down_until = self.now + seconds
        for connection in list(self.current.values()):
            self.store.hang_up(connection.agent.id)
            agent = connection.agent
            self.at(self.now + self._delay(), lambda a=agent, c=connection: self._store_hung_up(a, c))
        self.current.clear()
        self.at(self.now + seconds, self._store_back)

    def _store_hung_up(self, agent: Agent, connection: Connection) -> None:
        if agent.connection is not connection or not agent.alive:
            return
        if agent.asleep or agent.cut_down > self.now:
            late = max(agent.cut_down, agent.asleep_until)
            self.at(late + 0.001, lambda: self._store_hung_up(agent, connection))
        else:
            self.break_connection(agent)

    def _store_back(self) -> None:
        if self.now >= self.store_down_until and not self.store_up:
            self.say("store", "up again")
            self.store_up = True
            if self._back_to is not None:
                # A new epoch: no revision and no lease number is given twice, and the history is void.
                now_used = self.store.dump()
                epoch = {"revision": now_used["revision"] + 1000, "next_lease": now_used["next_lease"] + 1000}
                epoch |= {"compacted": epoch["revision"], "history": []}
                self.store = Model(history=200)
                self.store.load(self._back_to | epoch, self.now)
                self._back_to, self.went_back, self.forgot = None, self.went_back + 1, True
            self.store.renew_all(self.now)
            self._watch_leases()

    def _server_hears_close(self, connection: Connection) -> None:
        connection.server_open = False
        if self.current.get(connection.agent.id) is connection:
            del self.current[connection.agent.id]
            self.store.hang_up(connection.agent.id)
            self.store.shorten(connection.agent.id, self.now + self.options.linger)
            connection.agent.unaware |= connection.agent.asleep
            self._watch_leases()

    def _serve(self, connection: Connection, request: Request) -> None:
        session = connection.agent.id
        if self.current.get(session) is not connection and isinstance(request.command, Watch):
            return
        command = of_version(connection.agent.version, request.command)
        reply, notices = self.store.apply(session, request.number, request.done, command, self.now)
        if reply.ok and isinstance(request.command, Txn):
            self._note_round(request.command)
        self._down(connection, lambda: self._answered(connection, request.number, reply), reply.entries)
        self.messages["replies"] += 1
        if isinstance(request.command, Watch):
            missed = self.store.replay(session, request.command)
            if missed is not None:
                notices = [(session, missed), *notices]
        self._notify(notices)
        self._watch_leases()

    def _note_round(self, txn: Txn) -> None:
        """Keep the members of a round that becomes active, to compare what nodes do with them."""
        values = {put.key.removeprefix(self.options.prefix): put.value for put in txn.puts}
        if "members" not in values:
            return
        current, found = decode_round(values["ctl/round"]), decode_members(values["members"])
        assert current is not None
        assert found is not None
        assert current.phase == ACTIVE
        if len({m.id for m in found.nodes}) != len(found.nodes):
            raise Broken(f"round {current.number} has a member twice: {found}")
        # A number may be used twice only if the store has forgotten the first use, and so have the nodes that
        # it can ask: those that started it are gone, stopped, or have not come back to it. They bring the
        # number along when they do, and until then none of them may have workers.
        known = [
            a
            for a in self.agents.values()
            if a.alive and a.ended is None and a.last >= current.number
            if a.workers is not None or (not a.asleep and a.history == self.went_back)
        ]
        if self.forgot and not known and self.rounds.get(current.number, found[:2]) != found[:2]:
            del self.rounds[current.number]
            for rank in range(len(self.agents)):
                self.started.pop((current.number, rank), None)
        if self.rounds.setdefault(current.number, found[:2]) != found[:2]:
            raise Broken(
                f"round {current.number} has two sets of members: {self.rounds[current.number]}, {found}"
            )

    def _notify(self, notices: list[tuple[str, Notice]]) -> None:
        for session, notice in notices:
            connection = self.current.get(session)
            if connection is not None:
                self.messages["notices"] += 1
                told = lambda c=connection, n=notice: self._noticed(c, n)  # noqa: E731 - bound here
                self._down(connection, told, [c.entry for c in notice.changes])

    def _down(self, connection: Connection, what: Callable[[], None], entries: Any = ()) -> None:
        self.messages["bytes"] += sum(len(e.value) for e in entries)
        ready = self.now + self._delay()
        connection.queue.append((ready, what))
        self.at(ready, lambda: self._pump(connection))

    def _pump(self, connection: Connection) -> None:
        """Hand over what has arrived, in order, unless the way is cut or the agent sleeps."""
        agent, queue = connection.agent, connection.queue
        while queue and queue[0][0] <= self.now and connection.client_open and agent.alive:
            if agent.asleep or agent.cut_down > self.now:
                self.at(max(agent.cut_down, agent.asleep_until) + 0.001, lambda: self._pump(connection))
                return
            arrived = queue.popleft()[1]
            if not self._is_lost(connection):
                arrived()

    def _answered(self, connection: Connection, number: int, reply: Reply) -> None:
        agent = connection.agent
        if not connection.client_open or agent.ended is not None:
            return
        agent.answer_time.answered(self.now - agent.sent.pop(number, self.now))
        requests, result = agent.session.answered(number, reply)
        for request in requests:
            self._transmit(agent, request)
        tag = agent.tags.pop(number, None)
        if isinstance(result, Notice):
            self._tell(agent, Noticed(result))
        elif result is not None and tag is not None:
            self._tell(agent, Answer(tag, result))

    def _noticed(self, connection: Connection, notice: Notice) -> None:
        if connection.client_open and connection.agent.ended is None:
            fresh = connection.agent.session.noticed(notice)
            if fresh is not None:
                self._tell(connection.agent, Noticed(fresh))

    def _watch_leases(self) -> None:
        due = self.store.next_expiry(self.now)
        if due is not None and due < self._expiry:
            self._expiry = due
            self.at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = float("inf")
        if self.store_up:
            for number in self.store.expired(self.now):
                notices = self.store.revoke(number)
                self._check_lease(number)
                self._notify(notices)
            self._watch_leases()

    def _check_lease(self, number: int) -> None:
        for agent in self.agents.values():
            if agent.workers is None or agent.unaware or agent.participant.lease.number != number:
                continue
            raise Broken(
                f"at {self.now:.3f} the lease of {agent.id} ended while it ran round {agent.workers}"
            )


def _why(end: RoundEnd) -> str:
    match end:
        case PeerFailed(node, summary=summary):
            return f"{node}: {summary}"
        case RoundFailed(message=message):
            return message
        case RoundOver(reason=reason):
            return reason


def of_version(version: int, command: Command) -> Command:
    """What a node of a later version writes: fields that this one does not know, and a newer format."""
    if version == 1 or not isinstance(command, Txn):
        return command
    return command._replace(puts=tuple(put._replace(value=_with_more(put)) for put in command.puts))


def _with_more(put: Put) -> bytes:
    if not put.value.startswith(b"{"):
        return put.value
    record = json.loads(put.value)
    if "info" in record:
        record["info"]["colour"], record["format"] = "green", 2
    return json.dumps(record | {"of": ["a", "later", "version"]}).encode()
