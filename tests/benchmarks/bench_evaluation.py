"""Evaluation of 1,000 images against 10 prototypes against the forward pass alone, for each model of htcnn4."""

import torch

from task.config import load
from task.data.loaders import ClientData
from task.metrics import evaluate
from task.models.assign import build_model
from tests.benchmarks.timing import finish, interleave, judge, milliseconds, options, table

IMAGES, CLASSES = 1000, 10


def main() -> None:
    quick = options(str(__doc__).split("\n", 1)[0]).quick
    config = load()
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(256, (IMAGES, 1, 28, 28), generator=rng, dtype=torch.uint8)
    labels = torch.randint(CLASSES, (IMAGES,), generator=rng)
    # Made before the clock starts: both sides get the same batches.
    data = ClientData(images, labels, torch.device("cpu"))
    batches = [(x.clone(), y) for x, y in data.eval_batches(config.train.eval_batch_size)]
    protos = torch.randn(CLASSES, config.model.feature_dim, generator=rng)
    rows, good = [], []
    for partition, entry in enumerate(config.model.entries):
        shape = (1, 28, 28)
        model = build_model(config.model, partition, num_classes=CLASSES, image_shape=shape, seed=0).eval()

        @torch.no_grad()
        def forward(model: torch.nn.Module = model) -> None:
            for x, _ in batches:
                model(x)

        known = torch.ones(CLASSES, dtype=torch.bool)
        pairs = interleave(lambda m=model, k=known: evaluate(m, batches, protos, k), forward, 3 if quick else 25)
        times = milliseconds(pairs.second), milliseconds(pairs.first)
        rows.append((entry["name"], *times, f"{pairs.ratio:.3f}", pairs.spread))
        good.append((entry["name"], pairs.ratio))
    print(f"Evaluation of {IMAGES} images in batches of {config.train.eval_batch_size}, CPU time of one thread")
    table(("model", "forward ms", "evaluation ms", "ratio", "quartiles"), rows)
    finish(judge(f"{name}, evaluation over forward", ratio, most=1.1) for name, ratio in good)


if __name__ == "__main__":
    main()
