"""The rooms that know the fleet, learn about it and place requests."""

from agent.assembly.ground import Ground
from agent.authority.asking import Authority
from agent.board import Board
from agent.effects.entropy import new_rng, random_bytes, random_u32
from agent.node.learning import Learning, store_at
from agent.node.placing import Placing
from agent.node.viewing import Viewing
from agent.node.work import WatchedWork
from agent.observe.instruments import DecisionMetrics
from agent.observe.journal import Journal
from agent.settings.policy import PolicyRead, load_policy
from agent.store.folders import RefuseToStart
from router_core.errors import LocalMisuse
from router_core.ids import id8_of
from router_core.placement.demand import Demand
from router_core.placement.fleet import Fleet, Live
from router_core.placement.hold import Hold
from router_core.placement.holding import Holding
from router_core.placement.ledger import Ledger
from router_core.placement.request import RequestClass
from router_core.placement.sessions import Sessions
from router_core.policy.authority import AuthorityMode, AuthorityPolicy
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy
from router_core.profile.profiles import Profiles
from router_core.record.membership import Member
from router_core.router.breaker import Breakers
from router_core.router.lateness import Lateness
from router_core.view.fold import empty


class PlacementRooms:
    def __init__(self, ground: Ground, journal: Journal) -> None:
        """Raises ``RefuseToStart`` if the policy or what it names cannot be had."""
        self._ground = ground
        own, clock, name = ground.own, ground.clock, ground.settings.name
        self.read = self._read_policy()
        self.policy = self.read.policy
        self._token = self._token_of(self.policy.authority)
        self.exchange_policy = ExchangePolicy()
        self.work = WatchedWork()
        self.ledger = Ledger(id8_of(own.id16), random_u32(), self.work)
        self.breakers = Breakers(self.exchange_policy)
        self.lateness = Lateness(self.exchange_policy)
        self.leaving: set[tuple[str, str]] = set()
        self.demand = Demand()
        self.hold = Hold(self.policy)
        self.holding = Holding(self.hold)
        spilling: set[RequestClass] = set()
        profiles = Profiles(ProfilePolicy())
        self.board = Board(empty(own.id32, name))
        self.viewing = Viewing(
            self.board,
            own=Member(
                id32=own.id32, der=own.der, roles=own.mesh.roles, admission=own.mesh.admission, name=name
            ),
            profiles=profiles,
            policy=self.policy,
            live=Live(
                ledger=self.ledger,
                started_ms=clock.boot_ms(),
                breakers=self.breakers,
                hold=self.hold,
                suspects=self.lateness.suspects,
                late=self.lateness.costs,
                leaving=self.leaving,
                spilling=spilling,
            ),
            reborn=self.breakers.reborn,
            clock=clock,
        )
        self.learning = Learning(
            profiles,
            store_at(ground.folders.state, ground.log, ground.newer),
            self.fleet,
            clock,
            ground.log,
        )
        self.learning.restore()
        self.decisions = DecisionMetrics()
        self.placing = Placing(
            fleet=self.fleet,
            ledger=self.ledger,
            sessions=Sessions(),
            session_secret=random_bytes(32),
            rng=new_rng(),
            clock=clock,
            journal=journal,
            metrics=self.decisions,
            authority=self._authority(self.policy.authority, self._token),
            demand=self.demand,
            spilling=spilling,
        )

    def fleet(self) -> Fleet:
        """The fleet as it is known now."""
        return self.viewing.fleet

    def adopt(self, policy: PlacementPolicy) -> None:
        """Put ``policy`` in force, whole; if it is already, with the key that its authority is to be asked with now.
        Raises ``RefuseToStart`` and changes nothing if its authority cannot be had."""
        token = self._token_of(policy.authority)
        if (policy.authority, token) != (self.policy.authority, self._token):
            self.placing.authority = self._authority(policy.authority, token)
            self._token = token
        self.policy = self.hold.policy = policy
        self.viewing.adopt(policy)

    def _read_policy(self) -> PolicyRead:
        read = load_policy(self._ground.folders.config)
        if isinstance(read, PolicyRead):
            return read
        raise RefuseToStart("policy_refused", "; ".join(map(str, read)))

    def _token_of(self, policy: AuthorityPolicy) -> str | None:
        if policy.mode is AuthorityMode.OFF or policy.credential is None:
            return None
        try:
            return self._ground.secret(policy.credential)
        except RefuseToStart as refused:
            raise _unusable(refused) from None

    def _authority(self, policy: AuthorityPolicy, token: str | None) -> Authority | None:
        if policy.mode is AuthorityMode.OFF:
            return None
        try:
            return Authority(policy, token=token, clock=self._ground.clock, log=self._ground.log)
        except LocalMisuse as misuse:
            raise _unusable(misuse) from None


def _unusable(misuse: LocalMisuse) -> RefuseToStart:
    return RefuseToStart("credential_unusable", f"policy.toml: authority.credential: {misuse}")
