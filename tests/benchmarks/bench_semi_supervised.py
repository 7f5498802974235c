"""A training round of each semi-supervised method through the app, over its own augmentation and passes.

As ``bench_round``; the bare side is in ``bare_semi_supervised.py``. Both sides trust every image: how many are trusted
decides how many backward passes there are, and would differ between two models that go their own ways.
"""

from tests.benchmarks.bare_semi_supervised import BARE
from tests.benchmarks.bench_round import compare
from tests.benchmarks.timing import options

SETTINGS = "data=fashion_small partition=iid_train labels=few model=cnn_small train=fssl train.batch_size=32"
MORE = {name: "algorithm.client.threshold=0" for name in BARE if "fixmatch" in name or name.startswith(("fedc", "dcc"))}
# RSCFed's subsets overlap; one subset of everybody trains every client once.
MORE["rscfed"] = "algorithm.server.subsets=1"


def main() -> None:
    quick = options(str(__doc__).split("\n", 1)[0]).quick
    clients, repeats, less = (4, 1, "partition.max_samples=400") if quick else (10, 5, "")
    compare(BARE, f"{SETTINGS} {less}", clients, repeats, most=1.25, more=MORE)


if __name__ == "__main__":
    main()
