"""All nets, by name."""

from typing import Final

from tests.nets.daemons import DAEMONS
from tests.nets.decisions import DECISIONS
from tests.nets.lives import LIVES
from tests.nets.net import Net
from tests.nets.simulated import SIMULATED

NETS: Final[dict[str, Net]] = {net.name: net for net in (DECISIONS, LIVES, SIMULATED, DAEMONS)}
