"""The driver of the hold queue: whoever may try again is told so, in turn, each time there is news."""

from router_core.placement.queueing.hold import Hold, Waiting
from router_core.placement.queueing.holding import Holding
from router_core.placement.request.request import RequestClass
from router_core.policy.placement import PlacementPolicy


class Scene:
    """Requests that wait for ``places``, and who tried in which order. ``brings_news``: a try is news itself."""

    def __init__(self, *, brings_news: bool = False) -> None:
        self.holding = Holding(Hold(PlacementPolicy()))
        self.places = 0
        self.tried: list[int] = []
        self._brings_news = brings_news
        self._trying = False

    def join(self, *tickets: int, kind: str = "m") -> None:
        for ticket in tickets:
            waiting = Waiting(
                ticket=ticket,
                request_class=RequestClass.INTERACTIVE,
                caller="local",
                kind=kind,
                seconds=1.0,
                body_bytes=0,
                since_ms=0,
                deadline_ms=1_000,
            )
            self.holding.join(waiting, lambda ticket=ticket: self._retry(ticket), 0)  # type: ignore[misc]

    def _retry(self, ticket: int) -> None:
        assert not self._trying
        self._trying = True
        self.tried.append(ticket)
        if self._brings_news and len(self.tried) == 1:
            self.holding.news(0)
        if self.places:
            self.places -= 1
            self.holding.leave(ticket, 0)
        self._trying = False

    def news(self, places: int = 0) -> list[int]:
        self.places = places
        self.tried.clear()
        self.holding.news(0)
        return list(self.tried)


def test_news_where_nobody_waits_are_nothing() -> None:
    assert Scene().news() == []


def test_as_many_as_there_are_places_get_one_and_the_next_one_stays() -> None:
    scene = Scene()
    scene.join(0, 1, 2, 3)
    assert scene.news(places=2) == [0, 1, 2]
    assert len(scene.holding) == 2
    assert scene.news(places=2) == [2, 3]
    assert not scene.holding


def test_a_full_model_keeps_nobody_from_another_one() -> None:
    scene = Scene()
    scene.join(1, 2)
    scene.join(3, kind="other")
    assert scene.news() == [1, 3]


def test_who_leaves_of_its_own_makes_nobody_try() -> None:
    scene = Scene()
    scene.join(1, 2)
    scene.holding.leave(1, 0)
    scene.holding.leave(1, 0)
    assert scene.tried == []
    assert 1 not in scene.holding
    assert 2 in scene.holding
    assert scene.news(places=1) == [2]


def test_news_that_a_try_brings_are_looked_at_after_it() -> None:
    scene = Scene(brings_news=True)
    scene.join(1, 2)
    assert scene.news() == [1, 1]
    assert scene.news(places=2) == [1, 2]
