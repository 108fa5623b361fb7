"""The rooms that know the fleet, learn about it and place requests."""

from agent.assembly.ground import Ground
from agent.authority.asking import Authority
from agent.board import Board
from agent.effects.entropy import new_rng, random_bytes, random_u32
from agent.node.routing.learning import Learning, store_at
from agent.node.routing.placement import Placing
from agent.node.state.view import Viewing
from agent.node.state.work import WatchedWork
from agent.observe.instruments import DecisionMetrics
from agent.observe.journal import Journal
from agent.settings.policy import PolicyRead, load_policy
from agent.store.folders import RefuseToStart
from router_core.errors import LocalMisuse
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.ids import DecisionIds
from router_core.policy.authority import AuthorityMode, AuthorityPolicy
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.placement import PlacementPolicy
from router_core.record.membership import Member
from router_core.router.router import Router
from router_core.view.fold import empty


class PlacementRooms:
    """Everything that placement needs, built from the policy."""

    def __init__(self, ground: Ground, journal: Journal) -> None:
        """Raises ``RefuseToStart`` if the policy or what it names cannot be had."""
        self._ground = ground
        own, clock, name = ground.own, ground.clock, ground.settings.name
        self.read = self._read_policy()
        self.policy = self.read.policy
        self._token = self._token_of(self.policy.authority)
        self.exchange_policy = ExchangePolicy()
        self.work = WatchedWork()
        self.board = Board(empty(own.id32, name))
        rng = new_rng()
        self.router = Router(
            self.board.current,
            rng=rng,
            now=clock.boot_ms(),
            inst=random_u32(),
            policy=self.policy,
            exchange=self.exchange_policy,
            local=self.work,
            session_secret=random_bytes(32),
            started_ms=clock.boot_ms(),
            ids=DecisionIds(rng),
        )
        self.viewing = Viewing(
            self.board,
            own=Member(
                id32=own.id32, der=own.der, roles=own.mesh.roles, admission=own.mesh.admission, name=name
            ),
            router=self.router,
            clock=clock,
        )
        self.learning = Learning(
            self.router, store_at(ground.folders.state, ground.log, ground.newer), clock, ground.log
        )
        self.learning.restore()
        self.decisions = DecisionMetrics()
        self.placing = Placing(
            self.router,
            clock=clock,
            journal=journal,
            metrics=self.decisions,
            authority=self._authority(self.policy.authority, self._token),
        )

    def fleet(self) -> Fleet:
        """The fleet as it is known now."""
        return self.router.fleet

    def adopt(self, policy: PlacementPolicy) -> None:
        """Put ``policy`` in force, whole; if it is already, with the key that its authority is to be asked with now.
        Raises ``RefuseToStart`` and changes nothing if its authority cannot be had."""
        token = self._token_of(policy.authority)
        if (policy.authority, token) != (self.policy.authority, self._token):
            self.placing.authority = self._authority(policy.authority, token)
            self._token = token
        self.policy = policy
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
