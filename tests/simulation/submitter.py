"""The submitter's side in one process, from one seed: its links and clock, supervisors that die,
hosts with processes that ignore signals, and agents that are cut off from each other.

`Reconciler` is the real one. An agent is a small model here, of what a supervisor sees of it; how
agents decide among themselves is in `world`. Time goes on by the second.
"""

import contextlib
import hashlib
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

from clusterkit.backends.base import Observation
from clusterkit.lifecycle import evidence, reconcile
from clusterkit.lifecycle.evidence import Terms, Verdict
from clusterkit.lifecycle.outcome import without_spares
from clusterkit.lifecycle.reconcile import (
    Ended,
    Finish,
    Look,
    Next,
    Reconciler,
    Stage,
    Start,
    Stop,
)
from clusterkit.run.begun import Begun, since
from clusterkit.run.status import AttemptStatus, NodeStatus, RunStatus, State, overall
from tests.simulation.agents import Broken
from tests.simulation.shrinking import attempted, shrunk

LOST_AFTER, GRACE, SHRINK = 10, 2, 7
LEASE = LOST_AFTER + GRACE + evidence.LEASE_MARGIN
BOUND = 6000
WATCHERS = ("cut", "offline", "die", "pause", "disk", "error")
"""Faults of the submitter's side, which harm no rank."""
HOSTS = ("rank", "agent", "crash", "partition", "island", "stuck")
KINDS = (*WATCHERS, *HOSTS, "cancel")


@dataclass(frozen=True)
class Fault:
    """What happens to a host or to the submitter.

    ``cut``: the submitter does not reach the host for ``seconds``. ``offline``: it reaches none.
    ``die``: the supervisor is killed, after ``node`` more steps if it starts nodes; the next one
    comes ``seconds`` later. ``pause``: it stands still. ``disk``: nothing can be recorded but which
    attempt has begun, by a rename; with ``node`` it is read-only and takes no rename either.
    ``error``: whatever it does next raises. ``rank``: one fails. ``agent``: it is killed, and its
    ranks live on. ``crash``: the host is off for ``seconds``. ``partition``: it reaches no other
    host. ``island``: nor the submitter. ``stuck``: its ranks cannot be killed.
    ``cancel``: by the user.
    """

    kind: str
    node: int = 0
    at: int = 5
    seconds: int = 0


@dataclass(frozen=True)
class Schedule:
    seed: int
    nodes: int = 2
    least: int = 2
    spare_hosts: int = 0
    restarts: int = 1
    work: int = 30
    stubborn: bool = False  # ranks ignore SIGTERM
    orphans: bool = False  # ranks live on whose agent was killed: then there is no lease
    faults: tuple[Fault, ...] = ()

    @property
    def kind(self):
        """Whether nothing harms the ranks."""
        return all(fault.kind in WATCHERS and fault.at >= 3 for fault in self.faults)


def make(seed):
    rng = random.Random(f"submitter {seed}")
    nodes = rng.choice((1, 1, 2, 2, 3))
    only = rng.random() < 0.25
    faults = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))):
        kind = rng.choice(WATCHERS if only else KINDS)
        seconds = rng.choice((rng.randrange(1, 8), rng.randrange(5, 40), rng.randrange(20, 200)))
        at = rng.randrange(3 if only else 0, rng.choice((6, 60)))
        if faults and rng.random() < 0.6:  # troubles never come singly
            at = faults[-1].at + rng.choice((0, 1, 2, LOST_AFTER, LOST_AFTER + 3))
        faults.append(Fault(kind, rng.randrange(nodes), at, seconds))
    least = rng.choice((nodes, nodes, 1))
    return Schedule(
        seed, nodes, least, rng.choice((0, 0, 1)) if nodes > 1 else 0, rng.choice((0, 1, 3)),
        rng.choice((3, 30, 90)), rng.random() < 0.3, rng.random() < 0.5, tuple(faults),
    )  # fmt: skip


class Host:
    def __init__(self, name):
        self.name = name
        self.up_at = self.cut_until = self.apart_until = self.stuck_until = 0
        self.nodes = []  # of all attempts


class Node:
    """An agent of one attempt, its ranks and its record."""

    def __init__(self, world, host, attempt, number):
        self.world, self.host, self.attempt, self.number = world, host, attempt, number
        self.agent = self.ranks = True
        self.record = None
        self.ending = None  # the exit code, and when the ranks are gone
        self.heard = world.now

    def end(self, code, *, kill=False):
        if self.ranks and (self.ending is None or kill):
            world = self.world
            seconds = GRACE if world.schedule.stubborn else world.rng.randrange(GRACE + 1)
            self.ending = (self.ending[0] if self.ending else code, world.now + seconds)

    def tick(self):
        now = self.world.now
        if self.ending is not None and self.ranks:
            if now >= self.ending[1] and now >= self.host.stuck_until:
                self.ranks = False
                if self.agent:
                    self.record, self.agent = self.ending[0], False
        elif self.agent:
            self.world.groups[self.attempt].tick(self)


class Group:
    """The nodes of one attempt, as node 0's agent decides about them."""

    def __init__(self, world):
        self.world, self.nodes, self.members = world, {}, set()
        self.work, self.waits_until, self.stop, self.done = 0, 0, False, False

    def connected(self, one, other):
        now = self.world.now
        apart = max(one.host.apart_until, other.host.apart_until) > now
        return one.host is other.host or not apart

    def tick(self, node):
        world, now, head = self.world, self.world.now, self.nodes.get(0)
        if self.done:
            return node.end(0)
        if node.number:
            if node.number not in self.members:
                return node.end(143)
            if head is not None and head.agent and self.connected(node, head):
                node.heard = now
                if self.stop:
                    node.end(143)
            elif now - node.heard > LOST_AFTER:
                node.end(143)
            return None
        for number in sorted(self.members - {0}):
            other = self.nodes.get(number)
            if other is None:
                if now - head.heard > 60:
                    self.lose(number)
            elif other.record not in (None, 143):
                self.stop = True
            elif other.agent and self.connected(head, other):
                other.met = now
            elif now - getattr(other, "met", head.heard) > LOST_AFTER:
                self.lose(number)
        if self.stop:
            return head.end(1)
        ready = all(n in self.nodes and self.nodes[n].ranks and self.nodes[n].ending is None
                    for n in self.members)  # fmt: skip
        if ready and now >= self.waits_until:
            self.work += 1
            self.done = self.work >= world.schedule.work
        return None

    def lose(self, number):
        self.members.discard(number)
        if len(self.members) < self.world.schedule.least:
            self.stop = True
        else:  # ranks of the lost node have ended before the others start again
            self.work, self.waits_until = 0, self.world.now + GRACE + SHRINK


class Supervisor:
    """A model of `clusterkit.lifecycle.supervisor` around the real decisions."""

    def __init__(self, world, machine):
        self.world, self.machine = world, machine
        self.clock, self.busy_until, self.paused_until = 0.0, 0, 0
        self.pending = None  # a stop whose answer is awaited
        self.away = set()  # hosts that the next attempt does without
        self.heard = {}
        self.views = {}

    def tick(self):
        world = self.world
        if world.now < self.paused_until:
            return  # its clock stands still, too
        self.clock += 1.0
        if world.now < self.busy_until:
            return
        if self.pending is not None:
            hosts, self.pending = self.pending, None
            done = all(world.reachable(h) and not any(n.ranks for n in h.nodes) for h in hosts)
            world.leftovers = not done
            self.machine.stopped(self.clock, acknowledged=done)
            return
        if world.error:
            world.error = False
            return  # tried again
        seen = self.observe() if self.machine.stage is Stage.WATCH else None
        for action in self.machine.decide(seen, self.clock, world.cancelled):
            self.perform(action)

    def observe(self):
        world, attempt = self.world, self.machine.attempt
        nodes = []
        for number, host in enumerate(world.hosts_of(attempt)):
            if world.reachable(host):
                self.heard[number] = self.clock
                self.views[number] = world.truth(attempt, number, host)
            silence = self.clock - self.heard.setdefault(number, self.clock)
            view = self.views.get(number) or NodeStatus(
                node=number, host=host.name, state=State.PENDING
            )
            if silence >= LOST_AFTER and view.exit_code is None:
                view = NodeStatus(node=number, host=host.name, state=State.UNKNOWN)
            nodes.append(view)
        seen = Observation(state=overall({n.state for n in nodes}), nodes=tuple(nodes))
        world.save(state=State.RUNNING)
        return without_spares(
            SimpleNamespace(nodes_with_ranks=len(nodes), min_nodes=world.schedule.least), seen
        )

    def perform(self, action):
        world, machine = self.world, self.machine
        world.log(f"{action}")
        match action:
            case Start():
                if (self.away and world.now < world.disk_until) or not world.begin(machine.attempt):
                    return None  # tried again
                if self.away:
                    others = [h for h in world.hosts if h not in self.away]
                    world.plan, self.away = others[: len(world.plan)], set()
                    machine.terms = world.terms()
                world.plans[machine.attempt] = list(world.plan)
                world.save(state=State.PENDING)
                self.heard, self.views = {}, {}
                for number, host in enumerate(world.hosts_of(machine.attempt)):
                    if world.dies_in == number + 1:
                        return world.kill(self)
                    if not world.reachable(host):
                        return machine.not_started(self.clock, "refused")
                    world.start(host, machine.attempt, number)
                world.begin(machine.attempt, whole=True)
                machine.started(self.clock)
            case Stop(why):
                world.may_stop(why, machine.attempt)
                hosts = [*world.hosts]
                for host in hosts:
                    if world.reachable(host):
                        for node in host.nodes:
                            node.end(143, kill=True)
                self.pending, self.busy_until = hosts, world.now + GRACE + 1
            case Look():
                seen = world.asked(machine.attempt)
                if seen is not None or not machine.starts_again:
                    machine.looked_at(seen)
            case Ended():
                for following in machine.judged(self.clock, cancelled=world.cancelled):
                    self.perform(following)
            case Next():
                ended = AttemptStatus(attempt=action.attempt - 1, state=State.FAILED, failure=None,
                                      started_at=0.0, finished_at=0.0)  # fmt: skip
                if all(each.attempt != ended.attempt for each in world.saved.attempts):
                    world.save(attempts=(*world.saved.attempts, ended))
                world.save(state=State.RESTARTING, restarts_left=machine.restarts_left)
                self.away = {world.plan[n] for n in action.without}
                names = {host.name: action.attempt for host in self.away}
                world.left_out = names | world.left_out
            case Finish(state):
                if world.now < world.disk_until:
                    return None
                world.finish(state)
        return None


class World:
    def __init__(self, schedule):
        self.schedule = schedule
        self.rng = random.Random(hashlib.sha256(repr(schedule).encode()).digest())
        self.now, self.trace = 0, []
        self.hosts = [Host(f"h{n}") for n in range(schedule.nodes + schedule.spare_hosts)]
        self.plan = self.hosts[: schedule.nodes]
        self.plans = {1: list(self.plan)}
        self.groups = {}
        self.saved = RunStatus(run="r", job="j", cluster="c", backend="b", state=State.PENDING,
                               restarts_left=schedule.restarts)  # fmt: skip
        self.cancelled = self.error = self.leftovers = False
        self.disk_until, self.dies_in, self.comes_at = 0, None, None
        self.readonly_until, self.begun = 0, None
        self.end = None
        self.left_out = {}
        """The first attempt that was decided on without a host, as that was out of sight."""
        self.supervisor = Supervisor(self, Reconciler(self.terms(), schedule.restarts))
        self.faults = sorted(schedule.faults, key=lambda fault: fault.at)

    def log(self, text):
        self.trace.append(f"{self.now:5d}  {text}")

    def terms(self):
        schedule, nodes = self.schedule, len(self.plan)
        changes = schedule.spare_hosts > 0 or schedule.least < schedule.nodes
        return Terms(
            nodes=nodes, places=nodes, least=min(schedule.least, nodes),
            replaces_lost=schedule.restarts > 0, stop_grace=GRACE,
            lease=LEASE if nodes > 1 and not self.schedule.orphans else None,
            dispensable=len(self.hosts) - schedule.least if changes else 0,
        )  # fmt: skip

    def hosts_of(self, attempt):
        return self.plans.get(attempt, self.plan)

    def reachable(self, host):
        return self.now >= host.up_at and self.now >= host.cut_until

    def truth(self, attempt, number, host):
        """What the host says of a node."""
        node = self.groups[attempt].nodes.get(number) if attempt in self.groups else None
        given = {"node": number, "host": host.name}
        if node is None:
            return NodeStatus(state=State.PENDING, **given)
        if node.record is not None:
            ends = {0: State.SUCCEEDED, 143: State.CANCELLED}
            return NodeStatus(
                state=ends.get(node.record, State.FAILED), exit_code=node.record, **given
            )
        return NodeStatus(state=State.RUNNING if node.agent else State.FAILED, **given)

    def save(self, **fields):
        if self.now >= self.disk_until:
            attempt = self.supervisor.machine.attempt
            if fields.get("state") is not State.RESTARTING and "attempts" not in fields:
                fields["attempt"] = attempt
            self.saved = replace_status(self.saved, **fields)

    @property
    def record(self):
        """What the next supervisor, or `status` without one, finds on the submitter's disk."""
        return since(self.saved, self.begun)

    def begin(self, attempt, whole=False):
        if self.now >= self.readonly_until:
            self.begun = Begun(attempt, whole)
        return self.now >= self.readonly_until

    def start(self, host, attempt, number):
        for other in self.hosts:
            for node in other.nodes:
                # What is in state D runs no more once it was killed; such a host must not say so,
                # or not have said so when it was decided to start without it.
                killed = node.ending is not None and self.now >= node.ending[1]
                frozen = killed and (
                    not self.reachable(other)
                    or self.left_out.get(other.name, attempt + 1) <= attempt
                )
                again = node.attempt != attempt or node.number == number
                if node.ranks and again and not frozen:
                    raise Broken(f"attempt {attempt} starts beside attempt {node.attempt}")
        group = self.groups.setdefault(attempt, Group(self))
        if not group.members:
            group.members = set(range(len(self.hosts_of(attempt))))
        node = group.nodes[number] = Node(self, host, attempt, number)
        host.nodes.append(node)

    def healthy(self, attempt):
        """Whether all nodes of an attempt run or have succeeded, and some run."""
        group = self.groups.get(attempt)
        if group is None or len(group.nodes) < len(self.hosts_of(attempt)):
            return False
        good = all(n.record == 0 or (n.agent and n.ending is None) for n in group.nodes.values())
        return good and any(n.agent for n in group.nodes.values()) and not group.stop

    def may_stop(self, why, attempt):
        if why == reconcile.OTHER_ENDED and self.healthy(attempt) and not self.groups[attempt].done:
            raise Broken(f"attempt {attempt} runs well and is stopped")
        if why == reconcile.CANCELLED and not self.cancelled:
            raise Broken("nobody has cancelled the run")

    def kill(self, supervisor):
        self.log("the supervisor is killed")
        self.supervisor, self.dies_in = None, None
        self.dead = supervisor

    def attach(self):
        self.log("another supervisor")
        made = Reconciler.adopt(self.terms(), self.record, self.begun, self.schedule.restarts)
        self.supervisor = Supervisor(self, made)

    def finish(self, state):
        """The end is recorded: there must be evidence of it, and it must be true."""
        attempt = self.supervisor.machine.attempt
        group = self.groups.get(attempt)
        codes = [node.record for node in group.nodes.values()] if group else []
        if state is State.SUCCEEDED and codes.count(0) < self.schedule.least:
            raise Broken(f"it has not succeeded: {codes}")
        if state is State.FAILED and self.healthy(attempt):
            raise Broken(f"attempt {attempt} runs well and is recorded as failed")
        if state is State.FAILED and len(codes) == codes.count(0) > 0:
            raise Broken("it has succeeded and is recorded as failed")
        if state is State.CANCELLED and not self.cancelled:
            raise Broken("nobody has cancelled the run")
        living = any(node.ranks and node.ending is None for h in self.hosts for node in h.nodes)
        if living and not self.leftovers and state is not State.SUCCEEDED:
            raise Broken("ranks live on, and nobody says so")
        self.end = state
        self.log(f"recorded: {state}")

    def strike(self, fault):
        self.log(f"{fault}")
        until, host = self.now + fault.seconds, self.plan[fault.node % len(self.plan)]
        group = self.groups.get(max(self.groups, default=0))
        node = group.nodes.get(fault.node) if group else None
        match fault.kind:
            case "cut":
                host.cut_until = max(host.cut_until, until)
            case "offline":
                for each in self.hosts:
                    each.cut_until = max(each.cut_until, until)
            case "die":
                self.comes_at = until
                if self.supervisor is None or self.supervisor.machine.stage is not Stage.START:
                    self.kill(self.supervisor)
                else:
                    self.dies_in = 1 + fault.node
            case "pause" if self.supervisor is not None:
                self.supervisor.paused_until = until
            case "disk":
                self.disk_until = max(self.disk_until, until)
                if fault.node:
                    self.readonly_until = max(self.readonly_until, until)
            case "error":
                self.error = True
            case "rank" if node is not None and node.agent:
                node.end(1)
            case "agent" if node is not None:
                node.agent = False
                if not self.schedule.orphans:
                    node.end(137)
            case "crash":
                host.up_at = max(host.up_at, until)
                for each in host.nodes:
                    each.agent = each.ranks = False
            case "partition" | "island":
                host.apart_until = max(host.apart_until, until)
                if fault.kind == "island":
                    host.cut_until = max(host.cut_until, until)
            case "stuck":
                host.stuck_until = max(host.stuck_until, until)
            case "cancel":
                self.cancelled = True

    def asked(self, attempt):
        """What the hosts of an attempt say; None: not all are reached."""
        hosts = self.hosts_of(attempt)
        if not all(map(self.reachable, hosts)):
            return None
        nodes = tuple(self.truth(attempt, n, host) for n, host in enumerate(hosts))
        found = Observation(state=overall({n.state for n in nodes}), nodes=nodes)
        return without_spares(
            SimpleNamespace(nodes_with_ranks=len(nodes), min_nodes=self.schedule.least), found
        )

    def look(self):
        """What `status` on another machine says, which reaches the same hosts."""
        attempt = self.record.attempt
        found = self.asked(attempt)
        if attempt not in self.groups or found is None:
            return
        nodes = found.nodes
        if found.state in (State.RUNNING, State.PENDING):
            return
        said = evidence.verdict(self.terms(), found, restarts_left=0, cancelled=self.cancelled)
        if said is Verdict.SUCCEEDED and sum(n.exit_code == 0 for n in nodes) < self.schedule.least:
            raise Broken("status says that it has succeeded")
        if said is Verdict.FAILED and self.healthy(attempt):
            raise Broken("status says that it has failed")

    def run(self):
        while self.end is None:
            if self.now > BOUND:
                raise Broken(f"it has not ended within {BOUND} s")
            while self.faults and self.faults[0].at <= self.now:
                self.strike(self.faults.pop(0))
            order = [node for host in self.hosts for node in host.nodes if node.ranks]
            self.rng.shuffle(order)
            for node in order:
                node.tick()
            if self.supervisor is not None:
                self.supervisor.tick()
            elif self.comes_at is not None and self.now >= self.comes_at:
                self.attach()
            if self.now % 7 == 0:
                self.look()
            self.now += 1
        if self.schedule.kind and (self.end is not State.SUCCEEDED or len(self.groups) > 1):
            raise Broken(f"nothing harmed the run, and it is {self.end} in {len(self.groups)}")
        return self


def replace_status(status, **fields):
    import msgspec

    return msgspec.structs.replace(status, **fields)


@contextlib.contextmanager
def short_waits():
    """Minutes that only make a simulation longer are seconds."""
    before = {name: getattr(reconcile, name) for name in ("LOST_SECONDS", "LONGEST_PAUSE")}
    reconcile.LOST_SECONDS, reconcile.LONGEST_PAUSE = 90.0, 20.0
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(reconcile, name, value)


def tried(schedule):
    """The world after it, and what is wrong there, if anything is."""
    with short_waits():
        return attempted(World(schedule))


def fails(schedule):
    return tried(schedule)[1]


def shrink(schedule):
    """A smaller schedule that fails in the same way."""
    return shrunk(schedule, fails, _simpler)


def _simpler(schedule):
    return [replace(schedule, stubborn=False)] if schedule.stubborn else []
