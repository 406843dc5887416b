"""The agents of a run, their network, clocks and ranks in one process, all from one seed.

`Peer` and `Membership` are the real ones; their threads, sockets, launchers and programs are
modelled. Connections are worse than TCP's: they lose, double and reorder messages as well.
"""

import hashlib
import heapq
import random
from dataclasses import replace

from tests.simulation.agents import Agent, Broken, Group
from tests.simulation.schedule import LOSSES, LOST_AFTER, MEET
from tests.simulation.shrinking import attempted, shrunk


class World:
    """Runs a schedule to its end, and raises `Broken` as soon as something is not as it must be."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.rng = random.Random(hashlib.sha256(schedule.text.encode()).digest())
        self.now, self.events, self.count = 0.0, [], 0
        self.messages = self.steps = 0
        self.thinking = 0.0  # seconds of processor time that coordinators took
        self.started_at = []  # when ranks were: the time, and the number of messages by then
        self.faulty = True
        self.trace = []
        self.lost_early = False  # whether one was before it had met node 0
        self.lost_late = False  # whether one was when all was done but for the telling
        self.complete_once = False
        self.port_taken = False  # rank 0's, by another program
        self.verdicts, self.rulings, self.failures = [], [], 0
        self.cuts = {}
        everyone = schedule.nodes + schedule.spares
        self.place = [None] * everyone  # by node, the agent that has it now
        self.agents = []
        self.back_at = {}  # nodes that somebody will replace
        self.last = []  # agents whose ranks found each other last, in their order
        self.own = True  # whether no spare ever had a rank
        self.grown = 0  # how often there were more of them than the last time
        self.by_step = {}
        for fault in schedule.faults:
            if fault.step:
                self.by_step.setdefault(fault.step, []).append(fault)
            else:
                self.after(fault.at, self.strike, fault)
        for node in range(everyone):
            self.after(self.rng.choice((0.0, 0.1, 3.0)) * self.rng.random(), self.spawn, node)

    def after(self, seconds, what, *given):
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, what, given))

    def log(self, text):
        self.trace.append(f"{self.now:9.4f}  {text}")

    def spawn(self, node, *, joins=False):
        before = self.place[node]
        if before is not None and before.ended is None and not before.zombie:
            return  # it was not lost after all, or another fault has it replaced
        self.back_at.pop(node, None)
        self.lost_late |= bool(self.rulings)
        self.log(f"node {node} comes")
        self.place[node] = agent = Agent(self, node, joins=joins)
        self.agents.append(agent)
        if not agent.wait:
            agent.start()  # and waits for nobody

    def ended(self, agent):
        """Where nodes come again, somebody starts them as long as there is a run."""
        if self.schedule.again and self.schedule.goes_on and agent.node and not self.rulings:
            self.back_at[agent.node] = self.now + self.schedule.again
            self.after(self.schedule.again, self.comes_again, agent.node)

    def comes_again(self, node):
        node0 = self.place[0]
        if self.rulings or node0 is None or node0.ended is not None:
            self.back_at.pop(node, None)  # there is nothing any more to take part in
        else:
            self.spawn(node, joins=True)

    def run(self):
        bound = self.schedule.bound
        while self.events:
            self.now, _, what, given = heapq.heappop(self.events)
            if self.now > bound:
                waiting = [agent.node for agent in self.agents if agent.ended is None]
                raise Broken(f"nodes {waiting} have not ended within {bound:.0f} s")
            what(*given)
            if not self.back_at and all(self.place) and all(
                agent.ended is not None for agent in self.agents if not agent.zombie
            ):  # fmt: skip
                break
        self.at_the_end()
        return self

    # -- faults

    def strike_by_step(self):
        self.steps += 1
        for fault in self.by_step.pop(self.steps, ()):
            self.strike(fault)

    def strike(self, fault):
        agent, kind = self.place[fault.node], fault.kind
        if kind in ("cut", "to", "from"):
            self.log(str(fault))
            for way in ("to", "from") if kind == "cut" else (kind,):
                key = fault.node, way
                self.cuts[key] = max(self.cuts.get(key, 0.0), self.now + fault.seconds)
            return
        if agent is None or agent.ended is not None:
            return
        self.log(str(fault))
        if kind in LOSSES:
            agent.lost = not self.schedule.back
            self.lost_late |= bool(self.rulings) or self.complete_once
            # Nobody knows that it was there before: what others fail of looks their own.
            others = self.place if agent.node == 0 else [agent]
            early = any(other is None or not other.peer.state.coordinator for other in others)
            self.lost_early |= early and not self.schedule.goes_on
        if kind == "rank":
            agent.fail(agent.ranks)
        elif kind == "start":
            agent.stillborn += 1
        elif kind == "freeze":
            agent.frozen = max(agent.frozen, self.now + fault.seconds)
        elif kind == "late":
            agent.late()
        elif kind == "port":
            self.port_taken = True
        elif kind == "leap":
            agent.leap += fault.seconds
        elif kind == "reset":
            if agent.link is not None:
                link = agent.link
                first = self.rng.random() < 0.5
                self.after(0.0, link.breaks, first)
                if self.rng.random() < 0.5:
                    self.after(0.0, link.breaks, not first)
        elif kind == "leave":
            agent.leave()
            self.replace(fault)
        elif kind == "zombie" and self.schedule.back:
            agent.zombie = True
            self.replace(fault)
        else:
            agent.gone = kind != "crash"
            agent.exit(137)
            if agent.ranks is not None:
                dies = 0.0 if agent.gone else self.rng.uniform(0, 1)
                agent.ranks.ending = True
                self.after(dies, agent.die, agent.ranks, 137)
            self.replace(fault)

    def replace(self, fault):
        if self.schedule.back:
            self.back_at[fault.node] = self.now + fault.seconds
            self.after(fault.seconds, self.come_back, fault.node)

    def come_back(self, node):
        agent = self.place[node]
        if agent.ended is None and not agent.zombie:
            if agent.left:  # nobody takes its place before it has ended
                return self.after(0.1, self.come_back, node)
            self.back_at.pop(node, None)
            return None
        return self.spawn(node)

    def cut_until(self, client, to):
        if client.node == 0:
            return 0.0
        if client.zombie:
            return float("inf")
        ways = [(client.node, "to" if to else "from"), (0, "from" if to else "to")]
        return max(self.cuts.get(way, 0.0) for way in ways)

    # -- ranks

    def started(self, ranks):
        self.log(
            f"node {ranks.agent.node} starts its ranks in round {ranks.agent.peer.state.round}"
        )
        self.started_at.append((self.now, self.messages))
        self.no_two_rounds()
        free = {}
        for agent in self.agents:
            mine = agent.ranks
            if mine is not None and not mine.ending and mine.group is None and not agent.zombie:
                free.setdefault(mine.nodes, {})[mine.rank] = mine
        found = free.get(ranks.nodes, {})
        if len(found) == ranks.nodes:
            if ranks.nodes < (self.schedule.least or self.schedule.nodes):
                raise Broken(f"{ranks.nodes} nodes go on")
            self.in_order([found[n].agent for n in sorted(found)])
            group = Group(list(found.values()))
            for one in group.ranks:
                one.group = group
            self.after(self.schedule.work, self.complete, group)
        else:
            self.after(MEET, self.not_met, ranks)

    def in_order(self, agents):
        """Those that had ranks before have them in the same order, and where there are as many
        ranks as before each its own; nodes of the beginning are in theirs, as long as no other one
        came in a place of them."""
        before, nodes = self.last, [agent.node for agent in agents]
        both = [[one for one in some if one in other]
                for some, other in ((agents, before), (before, agents))]  # fmt: skip
        same = len(agents) == len(before) and not self.schedule.again
        moved = same and any(agents.index(one) != before.index(one) for one in both[0])
        self.own &= max(nodes) < self.schedule.nodes
        if both[0] != both[1] or moved or (self.own and nodes != sorted(nodes)):
            raise Broken(f"the ranks are those of nodes {nodes}, after {[a.node for a in before]}")
        self.grown += bool(before) and len(agents) > len(before)
        self.last = agents

    def no_two_rounds(self):
        """Of agents that follow the same coordinator, all ranks are of the same round; where the
        run goes on without an agent, none are left."""
        rounds, servers = {}, {a.server.identity: a.server for a in self.agents if a.server}
        for agent in self.agents:
            if agent.ranks is None:
                continue
            met, number = agent.peer.state.coordinator, agent.peer.state.round
            here = agent.ended is None and agent is self.place[agent.node]
            if not (met and number and here):
                continue
            if agent.node in servers[met].members.ranks:
                rounds.setdefault(met, set()).add(number)
            elif not agent.ranks.ending and self.now > agent.frozen + LOST_AFTER:
                raise Broken(f"node {agent.node}, which is lost, runs beside the others")
        for found in rounds.values():
            if len(found) > 1:
                raise Broken(f"ranks of rounds {sorted(found)} run at once")

    def not_met(self, ranks):
        if ranks is ranks.agent.ranks and ranks.group is None and not ranks.ending:
            ranks.ending = True
            ranks.agent.die(ranks, 1)

    def complete(self, group):
        if not group.broken:
            group.done = self.complete_once = True
            for ranks in group.ranks:
                self.after(self.rng.uniform(0, 1), self.ends_well, ranks)

    def ends_well(self, ranks):
        if not ranks.ending:
            ranks.ending = True
            ranks.agent.die(ranks, 0)

    def leaves_group(self, ranks):
        self.log(f"the ranks of node {ranks.agent.node} end")
        group = ranks.group
        if group is None or group.done or group.broken:
            return
        group.broken = True
        for other in group.ranks:
            if other is not ranks and self.rng.random() < 0.7:
                self.after(self.rng.uniform(0, 3), self.echo, other)
            elif not self.schedule.kind:
                self.after(MEET, self.echo, other)  # else only an order ends it

    def echo(self, ranks):
        if not ranks.ending:
            ranks.ending = True
            ranks.agent.die(ranks, 1)

    # -- what must hold

    def decided(self, agent, verdict):
        self.log(f"node 0 decides {verdict.action}: {verdict.text}")
        if not agent.zombie:
            self.rulings.append(verdict)

    def after_decision(self, agent):
        server = agent.server
        used = server._retries.used
        if used > self.schedule.restarts:
            raise Broken(f"{used} restarts of {self.schedule.restarts}")

    def at_the_end(self):
        for agent in self.agents:
            if agent.ended is None and not agent.zombie:
                raise Broken(f"node {agent.node} has not ended")
        if self.schedule.kind and not self.lost_early:
            if not self.rulings or self.rulings[0].action != "exit":
                rulings = [(verdict.action, verdict.text) for verdict in self.rulings]
                raise Broken(f"the run did not succeed: {rulings or self.verdicts}")
            for agent in self.place:
                if agent.ended != 0 and not self.lost_late and not agent.lost:
                    raise Broken(f"node {agent.node} ended with {agent.ended}")


def tried(schedule):
    """It in a world, and what is wrong there, if anything is."""
    return attempted(World(schedule))


def fails(schedule):
    """What is wrong with it, if anything is."""
    return tried(schedule)[1]


def shrink(schedule):
    """A smaller schedule that fails in the same way."""
    return shrunk(schedule, fails, _simpler)


def _simpler(schedule):
    tries = [replace(schedule, **{name: 0.0}) for name in ("lost", "doubled", "late")
             if getattr(schedule, name)]  # fmt: skip
    if schedule.nodes > 1 and all(f.node < schedule.nodes - 1 for f in schedule.faults):
        least = min(schedule.least, schedule.nodes - 1)
        tries.append(replace(schedule, nodes=schedule.nodes - 1, least=least))
    last = schedule.nodes + schedule.spares - 1
    if schedule.spares and all(fault.node < last for fault in schedule.faults):
        tries.append(replace(schedule, spares=schedule.spares - 1))
    if schedule.again:
        tries.append(replace(schedule, again=0.0))
    elif schedule.least:
        tries.append(replace(schedule, least=0))
    return tries
