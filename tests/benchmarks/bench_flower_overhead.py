"""What our app adds to Flower's own cost: rounds with next to no training against those of an empty app."""

import statistics

from tests.benchmarks.federations import run, superlinks
from tests.benchmarks.timing import finish, judge, milliseconds, options, table

EXCHANGES = 2  # training and evaluation
WARM_UP = 3  # rounds in which workers still import and read


def main() -> None:
    quick = options(str(__doc__)).quick
    clients, rounds, repeats = (4, 5, 1) if quick else (20, 13, 3)
    rows, found = [], []
    with superlinks() as (ours, empty):
        for repeat in range(repeats):
            seconds = {}
            for name, link in (("empty", empty), ("ours", ours)):
                seconds[name] = run(link, clients, rounds)[WARM_UP:]
            added = statistics.median(seconds["ours"]) - statistics.median(seconds["empty"])
            found.append(1e3 * added / (clients * EXCHANGES))
            times = milliseconds(seconds["empty"]), milliseconds(seconds["ours"])
            rows.append((repeat + 1, *times, f"{found[-1]:.2f}"))
    print(f"{clients} clients, {EXCHANGES} exchanges a round, medians of {rounds - WARM_UP} rounds, wall time")
    table(("pair", "empty app ms a round", "our app ms a round", "added ms a client and exchange"), rows)
    finish([judge("added ms a client and exchange (median)", statistics.median(found), most=15.0)])


if __name__ == "__main__":
    main()
