"""One simulated run from its scenario to the judge's word."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from mstar.sim.collective import Collective
from mstar.sim.front import Front
from mstar.sim.lockstep import Follower, Hint, Leader, Order
from mstar.sim.messages import Ended, LoadAnswer, ToRank
from mstar.sim.oracle import Oracle
from mstar.sim.rank import NODES, SimRank
from mstar.sim.scenario import Scenario
from mstar.sim.tiny import Generation
from mstar.sim.world import Channel, Violation, World


@dataclass(frozen=True)
class Outcome:
    """How a run went. `violation` is None where every promise held; `trace` has every event in order."""

    scenario: Scenario
    violation: Violation | None
    trace: tuple[tuple[float, str, str], ...]
    num_admits: int

    def lines(self) -> list[str]:
        """The trace as text."""
        return [f"{when:10.4f}  {who:<22} {what}" for when, who, what in self.trace]

    def digest(self) -> str:
        """A hash of the trace: equal exactly where the same events came in the same order."""
        return hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=8).hexdigest()


def simulate(scenario: Scenario, prepare: Callable[[list[SimRank]], None] = lambda ranks: None) -> Outcome:
    """Run `scenario`; `prepare` may break ranks before they start, to see that the oracle notices."""
    world = World(scenario)
    settings = scenario.settings
    nodes = NODES if settings.two_nodes else NODES[1:]
    collective = Collective(world, settings.num_ranks, settings.max_num_seqs)
    oracle = Oracle(world, nodes, collective)
    generations: dict[str, Generation] = {}
    front = Front(world, oracle, nodes, generations)
    leader = Leader(world, 0, collective, oracle, generations)
    followers = [Follower(world, tp_rank, collective, oracle, generations) for tp_rank in range(1, settings.num_ranks)]
    ranks: list[SimRank] = [leader, *followers]
    _connect(world, front, leader, followers)
    violation: Violation | None = None
    try:
        prepare(ranks)
        front.start()
        world.run()
        waiting = "; ".join([*collective.waiting(), *(rank.waiting() for rank in ranks)])
        oracle.finish(ranks, front.live(), waiting)
    except Violation as found:
        violation = found
    finally:
        for rank in ranks:
            rank.close()
    return Outcome(scenario, violation, tuple(world.trace), oracle.num_admits)


def _connect(world: World, front: Front, leader: Leader, followers: list[Follower]) -> None:
    settings = world.settings
    for rank in (leader, *followers):
        channel: Channel[ToRank] = Channel(world, f"front to rank {rank.tp_rank}", settings.front_delay_s, rank.from_front)
        front.channels.append(channel)
        answers: Channel[LoadAnswer] = Channel(world, f"rank {rank.tp_rank} to front", settings.front_delay_s, front.heard)
        rank.to_front = answers.send
    leader.ended = Channel[Ended](world, "leader to front", settings.front_delay_s, front.heard)
    for follower in followers:
        orders: Channel[Order] = Channel(world, f"leader to rank {follower.tp_rank}", settings.leader_delay_s, follower.from_leader)
        leader.to_followers.append(orders)
        follower.to_leader = Channel[Hint](world, f"rank {follower.tp_rank} to leader", settings.hint_delay_s, leader.heard)
