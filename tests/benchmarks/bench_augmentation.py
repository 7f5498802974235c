"""Share of a semi-supervised training step that goes into making its three views."""

from typing import Literal

import torch
from torch import nn

from task.config import load
from task.data.augment import Augmentation, three_views
from task.data.loaders import normalise
from task.models.assign import build_model
from tests.benchmarks.timing import finish, interleave, judge, milliseconds, options, table

BATCH = 64
SHAPE = (3, 32, 32)
STRONG2: tuple[Literal["randaug", "simclr"], ...] = ("randaug", "simclr")


def main() -> None:
    quick = options(str(__doc__).split("\n", 1)[0]).quick
    rows, good = [], []
    images = torch.randint(0, 256, (BATCH, *SHAPE), dtype=torch.uint8)
    labels = torch.randint(0, 10, (3 * BATCH,))
    for name, repeats in (("cnn_small", 25), ("wrn16_2", 5)):
        settings = load(f"model={name}").model
        model = build_model(settings, 0, num_classes=10, image_shape=SHAPE, seed=0).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        inputs = normalise(torch.cat([images] * 3))

        def step(
            model: nn.Module = model, inputs: torch.Tensor = inputs, optimizer: torch.optim.SGD = optimizer
        ) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

        for strong2 in STRONG2:
            views, rng = Augmentation(strong2=strong2), torch.Generator().manual_seed(0)
            pairs = interleave(
                lambda v=views, r=rng: normalise(three_views(images, r, v)), step, 2 if quick else repeats
            )
            share = pairs.ratio / (1 + pairs.ratio)
            times = milliseconds(pairs.first), milliseconds(pairs.second)
            rows.append((name, strong2, *times, f"{share:.3f}"))
            good.append((f"{name}, {strong2}, share of the step", share))
    print(f"Three views of {BATCH} images of 3x32x32 and one step on them, CPU time of one thread")
    table(("model", "second strong view", "views ms", "forward, backward, SGD ms", "share"), rows)
    finish(judge(what, share, most=0.3) for what, share in good)


if __name__ == "__main__":
    main()
