"""``scripts/docs``: writes or checks the reference pages."""

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    parser = ArgumentParser(prog="scripts/docs", description="The reference pages from the code.")
    parser.add_argument("--check", action="store_true", help="say what is stale and change nothing")
    args = parser.parse_args()
    import reference_pages

    if not args.check:
        reference_pages.write()
        return 0
    stale = reference_pages.stale()
    for path in stale:
        print(f"{path} is stale: run scripts/docs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
