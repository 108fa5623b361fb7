"""``python -m agent`` is ``pairmesh``."""

import sys

from agent.cli import main

sys.exit(main())
