"""FedTGP's server step against a plain transcription of the authors' loop.

The authors' side: a new ``DataLoader`` every epoch, mini-batches of 10, SGD with learning rate 0.01, distances by
the expanded square, S = 100 epochs. Ours: the recipes of ``conf/algorithm/``, through the strategy itself, with all
that a round does. At C = 100 the authors' loop runs for 1 epoch of 100 here and its time is multiplied; ``--full``
runs it to its end and compares the losses there too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from server_app.strategies.fedtgp import FedTGP
from task.config import build, load
from task.messages import PrototypeSet, Upload
from task.methods.fedtgp import contrastive_loss
from tests.benchmarks.timing import Pairs, finish, interleave, judge, milliseconds, options, table

WIDTH, CLIENTS, EPOCHS = 512, 20, 100


class OfficialPrototypes(nn.Module):
    """Embedding, linear layer with ReLU, linear layer, asked by a list of classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(num_classes, WIDTH)
        self.middle = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, classes: list[int]) -> Tensor:
        embedded = self.embeddings(torch.tensor(classes, device=self.last.weight.device))
        made: Tensor = self.last(self.middle(embedded))
        return made


def official_loop(model: OfficialPrototypes, received: list[tuple[Tensor, int]], margin: float, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cross_entropy = nn.CrossEntropyLoss()
    num_classes = model.embeddings.num_embeddings
    model.train()
    for _ in range(epochs):
        for vectors, classes in DataLoader(received, 10, drop_last=False, shuffle=True):
            protos = model(list(range(num_classes)))
            own_squares = torch.sum(torch.pow(vectors, 2), 1, keepdim=True)
            proto_squares = torch.sum(torch.pow(protos, 2), 1, keepdim=True)
            distances = own_squares - 2 * torch.matmul(vectors, protos.T) + proto_squares.T
            distances = torch.sqrt(distances.clamp(min=1e-12))
            one_hot = functional.one_hot(classes, num_classes)
            loss = cross_entropy(-(distances + one_hot * margin), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@dataclass(eq=False)
class Case:
    """One recipe of ours on one set of received prototypes, and the authors' loop on the same."""

    algorithm: str
    num_classes: int

    def __post_init__(self) -> None:
        strategy = build(load(f"algorithm={self.algorithm}").algorithm.server, "algorithm.server")
        assert isinstance(strategy, FedTGP)
        self.strategy = strategy
        rng = torch.Generator().manual_seed(0)
        # Class centres and clients around them; norms of about 14, as after some rounds on images.
        centres = 0.5 * torch.randn(self.num_classes, WIDTH, generator=rng)
        noise = 0.3 * torch.randn(CLIENTS, self.num_classes, WIDTH, generator=rng)
        self.vectors, self.classes = (centres + noise).flatten(0, 1), torch.arange(self.num_classes).repeat(CLIENTS)
        ids = torch.arange(self.num_classes)
        self.uploads = [Upload(i, 1, PrototypeSet(ids, (centres + noise[i]).contiguous())) for i in range(CLIENTS)]
        self.pairs = [(vector, int(of)) for vector, of in zip(self.vectors, self.classes, strict=True)]
        self.state = strategy.init_state(self.num_classes, WIDTH, torch.Generator().manual_seed(1))
        self.margin = self.ours()

    def ours(self) -> float:
        """Take our server step and return its margin."""
        rng = torch.Generator().manual_seed(2)
        self.trained, metrics = self.strategy.absorb(self.state, self.uploads, rng, torch.device("cpu"))
        return metrics["margin"]

    def official(self, epochs: int) -> None:
        """Run the authors' loop from their own start with the same margin."""
        torch.manual_seed(2)
        self.model = OfficialPrototypes(self.num_classes)
        official_loop(self.model, self.pairs, self.margin, epochs)

    def losses(self) -> tuple[float, float]:
        """Return the final loss of the authors' loop and of ours, over all received prototypes."""
        sent = self.strategy.downlink(self.trained).prototypes
        assert sent is not None
        with torch.no_grad():
            last = self.model(list(range(self.num_classes)))
            found = [contrastive_loss(self.vectors, self.classes, p, self.margin) for p in (last, sent.vectors)]
        return float(found[0]), float(found[1])


def speed(case: Case, official_epochs: int, repeats: int) -> Pairs:
    """Time both sides; the authors' in ``official_epochs`` epochs, multiplied up to the 100 of a round."""
    pairs = interleave(lambda: case.official(official_epochs), case.ours, repeats, warm_up=official_epochs < EPOCHS)
    return Pairs(tuple(time * EPOCHS / official_epochs for time in pairs.first), pairs.second)


def main() -> None:
    chosen = options(str(__doc__).split("\n", 1)[0], full="run the authors' loop at C = 100 to its end (minutes)")
    quick = chosen.quick
    official, default = Case("fedtgp_official", 10), Case("fedtgp", 20 if quick else 100)
    whole = EPOCHS if chosen.full else 1
    found = [
        (official, speed(official, 2 if quick else 20, 2 if quick else 15), 3.0),
        (default, speed(default, whole, 1 if quick or chosen.full else 7), 20.0),
    ]
    header = ("recipe", "C", "prototypes", "authors' loop ms", "ours ms", "ratio", "quartiles")
    rows = [
        (
            case.algorithm,
            case.num_classes,
            len(case.pairs),
            milliseconds(pairs.first),
            milliseconds(pairs.second),
            f"{pairs.ratio:.1f}",
            pairs.spread,
        )
        for case, pairs, _ in found
    ]
    print(f"Server step, K = {WIDTH}, {CLIENTS} clients, {EPOCHS} epochs, CPU time of one thread")
    print(f"(authors' loop at C = {default.num_classes}: {whole} epochs measured, multiplied to {EPOCHS})")
    table(header, rows)
    good = [judge(f"{case.algorithm}, times faster", pairs.ratio, least=least) for case, pairs, least in found]
    compared = default if chosen.full else Case("fedtgp", 10)
    if not chosen.full:
        compared.official(2 if quick else EPOCHS)
    theirs, ours = compared.losses()
    at = f"final loss of fedtgp at C = {compared.num_classes}, authors' loop {theirs:.3f}, ours"
    good.append(judge(at, ours, most=theirs))
    finish(good)


if __name__ == "__main__":
    main()
