"""Simulated agents: their threads, connections and launchers around real decisions."""

import time

from clusterkit.agent import limits
from clusterkit.agent.clock import PauseAwareClock
from clusterkit.agent.member import RestartPolicy
from clusterkit.agent.membership import Membership
from clusterkit.agent.messages import AgentState, Directive, EndLauncher, Finish, Start
from clusterkit.agent.peer import Peer
from tests.simulation.schedule import LATE, LOST_AFTER, WAIT


class Broken(AssertionError):
    """What must never happen did."""


class Ranks:
    """A launcher and all it started."""

    def __init__(self, agent):
        self.agent = agent
        self.rank, self.nodes = agent.rank, agent.nodes
        self.group = None
        self.ending = False


class Group:
    """Ranks that found each other, and compute together."""

    def __init__(self, ranks):
        self.ranks, self.done, self.broken = ranks, False, False


class Link:
    """A connection between an agent and that of node 0."""

    def __init__(self, world, client, server):
        self.world, self.client, self.server = world, client, server
        self.open = {client: True, server: True}
        if client is server:
            self.open = {"client": True, "server": True}

    def side(self, is_client):
        if self.client is self.server:
            return "client" if is_client else "server"
        return self.client if is_client else self.server

    def send(self, from_client, message):
        world = self.world
        if not self.open[self.side(from_client)]:
            return
        world.messages += 1
        rng, copies = world.rng, 1
        if world.faulty and self.client is not self.server:
            if rng.random() < world.schedule.lost:
                return
            copies += rng.random() < world.schedule.doubled
        for _ in range(copies):
            delay = rng.uniform(0.0002, 0.005)
            if world.faulty and rng.random() < world.schedule.late:
                delay = rng.uniform(0, LATE)
            self.world.after(delay, self.arrive, from_client, message)

    def cut_until(self, from_client):
        if self.server.zombie and self.client is not self.server:
            return float("inf")
        return self.world.cut_until(self.client, to=from_client)

    def arrive(self, from_client, message):
        world = self.world
        until = self.cut_until(from_client)
        if until > world.now:
            if until < float("inf") and world.rng.random() < 0.5:
                world.after(until - world.now + 0.01, self.arrive, from_client, message)
            return
        agent = self.server if from_client else self.client
        if agent.gone:
            return  # nobody answers there
        if agent.ended is not None or not self.open[self.side(not from_client)]:
            return world.after(0.001, self.breaks, from_client)
        if world.now < agent.frozen:
            return world.after(agent.frozen - world.now, self.arrive, from_client, message)
        world.strike_by_step()
        if agent.ended is None:
            if from_client:
                agent.server_hears(self, message)
            else:
                agent.client_hears(self, message)

    def close(self, by_client):
        """One side does, and the other will see it."""
        if self.open[self.side(by_client)]:
            self.open[self.side(by_client)] = False
            self.world.after(0.002, self.breaks, not by_client)

    def breaks(self, is_client):
        """One side sees that the connection is gone."""
        agent, side = self.client if is_client else self.server, self.side(is_client)
        if not self.open[side] or agent.ended is not None:
            return
        if self.cut_until(not is_client) > self.world.now:
            return  # not even that gets through
        if self.world.now < agent.frozen:
            return self.world.after(agent.frozen - self.world.now, self.breaks, is_client)
        self.open[side] = False
        if is_client:
            agent.link_broke(self)
        else:
            agent.line_broke(self)


class Agent:
    """One agent: the threads around its `Peer`, on node 0 around a `Membership`, its launcher."""

    def __init__(self, world, node, *, joins=False):
        self.world, self.node = world, node
        schedule = world.schedule
        self.leap, self.frozen = 0.0, 0.0
        self.clock = PauseAwareClock(lambda: world.now + self.leap)
        self.wait = WAIT if schedule.back or schedule.least or schedule.spares else 0.0
        self.rank, self.nodes = node, schedule.nodes  # of the ranks that it starts
        self.again = bool(self.wait or schedule.restarts)
        spare = joins or node >= schedule.nodes
        self.peer = Peer(node, LOST_AFTER, self.wait, self.clock(), spare)
        self.ended = None  # its exit code
        self.gone = False  # vanished: nothing comes back from there
        self.zombie = False
        self.lost = False  # for good
        self.ranks = None
        self.code = None  # of the last launcher
        self.finished = self.left = False
        self.closing = None
        self.stillborn = 0  # how many of its next launchers fail at once
        self.link, self.beat, self.connecting = None, 0.0, False
        self.lines, self.told, self.server_beat = {}, 0, 0.0
        self.server, self.verdict, self.look, self.due = None, None, 0.0, False
        if node == 0:
            terms = RestartPolicy(
                schedule.nodes, LOST_AFTER, self.wait, schedule.restarts,
                min_nodes=schedule.least or None, spares=schedule.spares,
            )  # fmt: skip
            self.server = Membership(terms)
        world.after(world.rng.uniform(0, 0.05), self.tick)

    # -- the thread of `Client`

    def tick(self):
        world = self.world
        if self.ended is not None:
            return
        if world.now < self.frozen:
            return world.after(self.frozen - world.now, self.tick)
        world.after(limits.PEER_AGAIN_SECONDS, self.tick)
        if self.server is not None:
            self.server_turn()
        if self.ended is None and not self.connecting and not self.peer.done:
            if self.link is None:
                self.connect()
            elif self.peer.is_silent(self.clock()):
                self.drop()
            if not self.connecting:
                self.turn()
        self.maybe_exit()

    def connect(self):
        world, node0 = self.world, self.world.place[0]
        cut = max(world.cut_until(self, True), world.cut_until(self, False))
        if self.zombie or cut > world.now or node0 is None or node0.gone:
            self.connecting = True
            seconds = limits.FIRST_SECONDS if self.peer.undecided else limits.PEER_SECONDS
            return world.after(seconds, self.no_connection, "timed out", False)
        if node0.ended is not None or node0.server_closed:
            return self.no_connection("Connection refused", True)
        self.link = Link(world, self, node0)
        self.peer.connected(self.clock())
        self.speak()
        return None

    def no_connection(self, trouble, refused):
        self.connecting = False
        if self.ended is None and not self.peer.done:
            self.peer.disconnected(self.clock(), trouble, refused)
            self.turn()

    def drop(self):
        self.link.close(by_client=True)
        self.link = None
        self.peer.disconnected(self.clock())

    def link_broke(self, link):
        if link is self.link:
            self.link = None
            self.peer.disconnected(self.clock())
            self.turn()

    def client_hears(self, link, message):
        if link is self.link and not self.peer.done:
            self.peer.receive(Directive(**message), self.clock())
            self.turn()

    def speak(self):
        self.beat = self.clock() + limits.PEER_SECONDS
        self.link.send(True, self.peer.report())

    def turn(self):
        self.peer.tick(self.clock())
        orders, self.peer.orders = self.peer.orders, []
        for order in orders:
            self.world.log(f"node {self.node}: {order}")
            self.handle(order)
        if self.link is not None and (self.peer.report_due or self.clock() >= self.beat):
            self.speak()
        self.thread_ends()
        self.maybe_exit()

    def thread_ends(self):
        if self.peer.done and self.link is not None:
            self.link.close(by_client=True)
            self.link = None

    # -- the main loop of `Node`

    def handle(self, order):
        match order:
            case Start():
                if order.rank is not None:
                    self.rank, self.nodes = order.rank, order.nodes
                self.start()
            case EndLauncher():
                self.stop()
            case Finish():
                self.world.verdicts.append((self.world.now, self.node, order))
                self.finished = True
                if order.stop:
                    self.stop()

    def start(self):
        if self.ranks is not None:
            raise Broken(f"node {self.node} starts a launcher beside another one")
        self.ranks, self.code = Ranks(self), None
        self.world.started(self.ranks)
        if self.stillborn:
            self.stillborn -= 1
            self.world.after(0.001, self.fail, self.ranks)

    def fail(self, ranks):
        if ranks is not None and ranks is self.ranks and not ranks.ending:
            ranks.ending = True
            self.die(ranks, 9)

    def stop(self):
        ranks = self.ranks
        if ranks is not None and not ranks.ending:
            ranks.ending = True
            self.world.after(self.world.rng.choice((0.0, 0.01, 0.5, 3.0)), self.die, ranks, 143)

    def die(self, ranks, code):
        """The launcher ends."""
        if ranks is not self.ranks:
            return
        if self.ended is None and self.world.now < self.frozen:
            # Its ranks have ended, and the agent will hear of it.
            self.world.leaves_group(ranks)
            return self.world.after(self.frozen - self.world.now, self.die, ranks, code)
        self.ranks, self.code = None, code
        self.world.leaves_group(ranks)
        if self.ended is not None:
            return
        if not self.again:
            self.finished = True
        if not self.peer.done:
            self.peer.launcher_ended(
                code, self.clock(), cannot_restart=self.world.port_taken and self.node == 0
            )
            if not self.connecting and self.link is not None:
                self.speak()
            if not self.again and self.server is None:
                self.peer.done = True
                self.thread_ends()
        self.maybe_exit()

    def leave(self):
        self.left = True
        self.peer.leave()
        if self.link is not None:
            self.speak()
        self.stop()
        self.maybe_exit()

    def late(self):
        self.finished = True
        self.peer.time_limit_reached()
        if self.link is not None:
            self.speak()
        self.stop()
        self.maybe_exit()

    def maybe_exit(self):
        if self.ended is not None or self.ranks is not None or not (self.finished or self.left):
            return
        if self.closing is None:
            self.closing = self.clock()
        if self.again:
            self.peer.done = True
            self.thread_ends()
        waited = self.clock() - self.closing
        if not self.peer.done and waited < limits.PEER_SECONDS:
            return
        last = self.server is not None and self.server.decided and not self.server_closed
        if last and waited < limits.PEER_SECONDS * (1 + (not self.peer.done)):
            return
        self.exit(143 if self.left else self.code or 0)

    def exit(self, code):
        self.ended = code
        self.world.log(f"node {self.node} ends with {code}")
        if self.link is not None:
            self.link.close(by_client=True)
        for link in self.lines.values():
            link.close(by_client=False)
        self.world.ended(self)

    # -- the thread of `Server`

    @property
    def server_closed(self):
        server = self.server
        return server.decided and not any(
            server.members.by_node[node].present for node in self.lines
        )

    def server_turn(self):
        server, self.due = self.server, False
        began = time.process_time()
        if self.clock() >= self.look:
            self.look = self.clock() + limits.PEER_AGAIN_SECONDS
            server.tick(self.clock())
        elif server.changed:
            server.advance(self.clock())
        self.world.thinking += time.process_time() - began
        if self.verdict and server.verdict != self.verdict:
            raise Broken(f"the verdict {self.verdict} was taken back for {server.verdict}")
        if server.decided and not self.verdict:
            self.world.decided(self, server.verdict)
        self.verdict = server.verdict
        if self.clock() >= self.server_beat or self.told < server.sequence:
            self.told, self.server_beat = server.sequence, self.clock() + limits.PEER_SECONDS
            for node, link in list(self.lines.items()):
                link.send(False, vars(server.directive(node, self.clock())))
        self.world.after_decision(self)

    def server_hears(self, link, message):
        node = link.client.node
        if self.server_closed:
            return link.close(by_client=False)
        began = time.process_time()
        taken = self.server.receive(node, AgentState.parse(message), self.clock())
        self.world.thinking += time.process_time() - began
        if not taken:
            link.send(False, vars(self.server.rejection(node)))
            link.close(by_client=False)
        elif self.lines.get(node) is not link:
            if node in self.lines:
                self.lines[node].close(by_client=False)
            self.lines[node] = link
            link.send(False, vars(self.server.directive(node, self.clock())))
        if not self.due:  # whatever else has come by then is heard first
            self.due = True
            self.world.after(0.0005, self.server_turns)

    def server_turns(self):
        if self.world.now < self.frozen:
            self.world.after(self.frozen - self.world.now, self.server_turns)
        elif self.ended is None:
            self.server_turn()
            self.maybe_exit()

    def line_broke(self, link):
        node = link.client.node
        if self.lines.get(node) is link:
            del self.lines[node]
            self.server.disconnected(node, self.clock())
            self.server_turn()
            self.maybe_exit()
