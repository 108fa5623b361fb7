"""``scripts/docs``: writes or checks the reference pages, builds the site."""

import logging
import sys
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = ArgumentParser(
        prog="scripts/docs", description="The reference pages from the code, the site from all pages."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say what is stale and change nothing")
    what.add_argument("--site", type=Path, metavar="DIR", help="build the site into DIR; what is there goes")
    args = parser.parse_args()
    if args.site is not None:
        return site(args.site)
    from scripts import page_tables, reference_pages

    if not args.check:
        reference_pages.write()
        page_tables.write()
        return 0
    stale = [*reference_pages.stale(), *page_tables.stale()]
    for path in stale:
        print(f"{path} is stale: run scripts/docs", file=sys.stderr)
    return 1 if stale else 0


def site(folder: Path) -> int:
    """Build the site into ``folder``. A link of a page to a page or a heading that is not there fails."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder.resolve())))
    except Abort as fault:
        print(f"scripts/docs: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
