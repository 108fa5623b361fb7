"""Compares what this tree does with the vectors that were recorded of it (tests/vectors/nets), net by net.

A difference that is meant is recorded with --record, in the commit that makes it, and named there. A name that changed
is no difference: tests/vectors/nets/names.toml maps names of today to those in the vectors.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.nets.all import NETS
from tests.nets.net import Net, compare, read, record

_SHOWN = 40


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/nets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="nets:\n" + "\n".join(f"  {net.name:12} {net.about}" for net in NETS.values()),
    )
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of: {', '.join(NETS)} (all)")
    parser.add_argument("--record", action="store_true", help="write the vectors anew from this tree")
    parser.add_argument("--show", metavar="NET:LINE/PLACE", help="print one document as this tree gives it")
    args = parser.parse_args()
    unknown = [name for name in args.nets if name not in NETS]
    if unknown:
        parser.error(f"no such net: {', '.join(unknown)}; there are {', '.join(NETS)}")
    if args.show:
        return show(args.show)
    chosen = [NETS[name] for name in args.nets or NETS]
    if args.record:
        for net in chosen:
            print(f"{net.name}: {record(net)} bytes written to {net.path}")
        return 0
    return 1 if sum([compared(net) for net in chosen]) else 0


def show(where: str) -> int:
    """Print the document at NET:LINE/PLACE."""
    name, _, at = where.partition(":")
    label, _, place = at.rpartition("/")
    if name not in NETS or label not in NETS[name].labels() or not place.isdigit():
        print(f"{where}: no such document, say NET:LINE/PLACE as a comparison does", file=sys.stderr)
        return 2
    print(json.dumps(NETS[name].run(label)[int(place)], indent=1, sort_keys=True))
    return 0


def compared(net: Net) -> int:
    """Print how one net compares; how many differences there are."""
    began = time.monotonic()
    recorded = read(net)
    told = compare(net, recorded)
    for text in told[:_SHOWN]:
        print(text)
    if len(told) > _SHOWN:
        print(f"{net.name}: and {len(told) - _SHOWN} more")
    documents = sum(recorded.counts())
    verdict = f"{len(told)} differences" if told else "equal"
    print(f"{net.name}: {documents} documents, {verdict}, {time.monotonic() - began:.0f} s")
    return len(told)


if __name__ == "__main__":
    sys.exit(main())
