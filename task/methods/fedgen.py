"""FedGen: the server trains a generator of features on the clients' heads, and clients train their heads on its output.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, arXiv:2105.10056;
here in the form of FedTGP's comparison, in which clients share the head and the generator only.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
``FeatureGenerator``  G_w(z | y), from a label and noise to a feature
``noise_BZ``          epsilon, uniform on [0, 1) in the public code (Gaussian in the paper), Z numbers a sample
``prior_C``           p-hat(y), how often each label is drawn
``shares_MC``         the weight of each client's head for each label, sum 1 over the clients
``diversity``         weight of the code's diversity term
``alpha``, ``beta``   weights of the client's two extra terms
====================  ==========================================================================

Departures from the paper and the authors' code: only head and generator are shared, feature extractors are private and
differ; the client's KL term (``beta``), the diversity term and weights by label (``teacher: labels``) are there, and
off, as in HtFLlib; the extra terms do not fade over the rounds; labels are drawn as often as the clients hold them
(``label_prior: uniform`` draws all alike), for which every client tells its C label counts once.

Departures from HtFLlib, the FedTGP authors' code: the trained generator, and the state of its optimiser, are kept. The
code trains a copy and drops it, so that clients get the random first generator for ever (``persist_generator: false``);
its learning rate of 0.1 was never felt, hence 0.005. Clients use the generator from the second round on, the first in
which it is trained; in eval mode (``generator_mode: train`` takes the statistics of the generated batch); and without
a backward pass through it, whose result nobody used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from task.averaging import labelled, part, require_alike
from task.models.heads import HEAD, initialise
from task.models.split import weights_of

GENERATOR, ADAM, LABEL_COUNTS = "generator.", "adam.", "label_counts"
"""What the names of the generator's tensors and of its optimiser's begin with, and the name of the label counts."""

MOST_SAMPLES = 2**31


class FeatureGenerator(nn.Module):
    """G: noise and a label in, a feature out; two linear layers with BatchNorm and ReLU between them.

    Parameters
    ----------
    noise_dim, hidden_dim : int
        Z and the width of the hidden layer.
    num_classes, width : int
        C and K.
    """

    def __init__(self, noise_dim: int, hidden_dim: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.noise_dim, self.num_classes = noise_dim, num_classes
        self.layers = nn.Sequential(
            nn.Linear(noise_dim + num_classes, hidden_dim),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, width),
        )

    def forward(self, noise_BZ: Tensor, labels_B: Tensor) -> Tensor:
        """Return ``(B, K)`` features of the labels."""
        onehot_BC = functional.one_hot(labels_B, self.num_classes).to(noise_BZ.dtype)
        feats_BK: Tensor = self.layers(torch.cat([noise_BZ, onehot_BC], dim=1))
        return feats_BK


@dataclass(frozen=True)
class GeneratorTraining:
    """How the server trains the generator in a round: ``steps`` of Adam on ``batch_size`` drawn labels."""

    steps: int
    batch_size: int
    lr: float
    diversity: float


@dataclass(frozen=True)
class Teacher:
    """The clients' heads together: one module, the stacked tensors of M heads by name, and ``(M, C)`` shares."""

    head: nn.Module
    stacked: Mapping[str, Tensor]
    shares_MC: Tensor

    @classmethod
    def of(
        cls,
        head: nn.Module,
        heads: Sequence[Mapping[str, Tensor]],
        weights: Sequence[float],
        counts_MC: Tensor | None,
        device: torch.device,
    ) -> "Teacher":
        """Return the teacher that M ``heads`` (named tensors) make on the ``device``.

        Parameters
        ----------
        head : nn.Module
            Any module of their architecture.
        weights, counts_MC
            As in ``head_shares``.
        """
        stacked = {name: torch.stack([each[HEAD + name] for each in heads]).to(device) for name in head.state_dict()}
        num_classes = next(reversed(stacked.values())).shape[1]  # the bias of the last layer
        return cls(head, stacked, head_shares(weights, counts_MC, num_classes).to(device))

    def logits(self, feats_BK: Tensor, labels_B: Tensor) -> Tensor:
        """Return the ``(B, C)`` averaged logits, each sample's weighted by the clients' shares of its label.

        References
        ----------
        FedGen, eq. (4): the ensemble of the heads, averaged before the softmax.
        """

        def one(tensors: dict[str, Tensor]) -> Tensor:
            logits_BC: Tensor = functional_call(self.head, tensors, (feats_BK,))
            return logits_BC

        logits_MBC = vmap(one)(dict(self.stacked))
        return torch.einsum("mb,mbc->bc", self.shares_MC[:, labels_B], logits_MBC)


def head_shares(weights: Sequence[float], counts_MC: Tensor | None, num_classes: int) -> Tensor:
    """Return the ``(M, C)`` share of each client in the teacher's answer for each label; every column sums to 1.

    Parameters
    ----------
    weights : sequence of float
        The weight of each of M clients, for all labels.
    counts_MC : Tensor or None
        ``(M, C)`` samples of each label, to weigh each label by; None goes by ``weights`` alone. They also decide
        for a label that none of these clients holds.
    num_classes : int
        C.
    """
    general_M = torch.tensor(weights) / sum(weights)
    general_MC = general_M.unsqueeze(1).expand(-1, num_classes)
    if counts_MC is None:
        return general_MC.contiguous()
    totals_C = counts_MC.sum(dim=0)
    return torch.where(totals_C > 0, counts_MC / totals_C.clamp(min=1), general_MC)


def label_prior(counts_C: Tensor | None, num_classes: int) -> Tensor:
    """Return the ``(C,)`` probabilities of labels: in proportion to ``counts_C``, all alike without any count."""
    if counts_C is None or not counts_C.any():
        return torch.full((num_classes,), 1 / num_classes)
    return counts_C.double().div(counts_C.sum()).float()


def require_label_counts(who: str, sent_C: Tensor | None, known_C: Tensor) -> None:
    """Refuse malformed label counts, and none from a client whose row of the table, ``known_C``, is still empty.

    Raises
    ------
    ValueError
        One line with ``who`` sent them.
    """
    if sent_C is None:
        if not known_C.any():
            raise ValueError(f"{who} sent no {LABEL_COUNTS}: label_prior=empirical needs them once")
        return
    if sent_C.shape != known_C.shape or sent_C.dtype != known_C.dtype:
        needed = f"{tuple(known_C.shape)} {known_C.dtype} is needed"
        raise ValueError(f"{who} sent {LABEL_COUNTS} as {tuple(sent_C.shape)} {sent_C.dtype}: {needed}")
    if sent_C.min() < 0 or sent_C.max() > MOST_SAMPLES or not sent_C.any():
        raise ValueError(f"{who} sent malformed {LABEL_COUNTS}: from 0 to {MOST_SAMPLES}, not all 0")


def draw(prior_C: Tensor, size: int, noise_dim: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """Return ``(size, Z)`` noise and ``(size,)`` labels, drawn on the CPU."""
    labels_B = torch.multinomial(prior_C, size, replacement=True, generator=rng)
    return torch.rand(size, noise_dim, generator=rng), labels_B


def diversity_term(noise_BZ: Tensor, feats_BK: Tensor) -> Tensor:
    """Return the term that is small when different noise gives different features: ``exp(-mean(|dz|^2 |df|))``.

    The mean is over all pairs of a batch, of their mean squared difference in noise times their mean absolute
    difference in features, as in the authors' code.
    """
    noise_gap_BB = (noise_BZ.unsqueeze(0) - noise_BZ.unsqueeze(1)).square().mean(dim=2)
    feature_gap_BB = (feats_BK.unsqueeze(0) - feats_BK.unsqueeze(1)).abs().mean(dim=2)
    return torch.exp(-(noise_gap_BB * feature_gap_BB).mean())


def train_generator(
    generator: FeatureGenerator,
    optimizer_state: Mapping[str, Tensor],
    teacher: Teacher,
    prior_C: Tensor,
    training: GeneratorTraining,
    rng: Generator,
) -> tuple[dict[str, Tensor], float]:
    """Train the generator in place so that the teacher recognises its features as the labels they were made from.

    Parameters
    ----------
    generator, teacher
        The generator is moved to the device of the teacher.
    optimizer_state : mapping
        What an earlier call returned; empty before the first.
    prior_C : Tensor
        ``(C,)`` probabilities of labels, on the CPU.

    Returns
    -------
    tuple
        Adam's moments as named tensors on the CPU, and the mean loss over the steps (nats).

    References
    ----------
    FedGen, eq. (4), and Algorithm 1, the server's update of w.
    """
    device = teacher.shares_MC.device
    generator.to(device).train()
    optimizer = torch.optim.Adam(generator.parameters(), lr=training.lr)
    _restore_adam(optimizer, generator, optimizer_state)
    total = torch.zeros((), device=device)
    for _ in range(training.steps):
        noise_BZ, labels_B = (each.to(device) for each in draw(prior_C, training.batch_size, generator.noise_dim, rng))
        feats_BK = generator(noise_BZ, labels_B)
        loss = functional.cross_entropy(teacher.logits(feats_BK, labels_B), labels_B)
        if training.diversity:
            loss = loss + training.diversity * diversity_term(noise_BZ, feats_BK)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.detach()
    return _adam_tensors(optimizer, generator), float(total) / max(training.steps, 1)


def _adam_tensors(optimizer: torch.optim.Adam, generator: FeatureGenerator) -> dict[str, Tensor]:
    """Return the optimiser's state by name of the parameter and of the moment."""
    return {
        f"{name}.{key}": value.detach().cpu().clone()
        for name, parameter in generator.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _restore_adam(optimizer: torch.optim.Adam, generator: FeatureGenerator, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in generator.named_parameters():
        found = {
            key: tensors[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in tensors
        }
        # The counter of steps stays on the CPU, where Adam keeps it.
        optimizer.state[parameter] = {
            key: value.clone() if key == "step" else value.clone().to(parameter.device) for key, value in found.items()
        }


def first_generator(noise_dim: int, hidden_dim: int, num_classes: int, width: int, rng: Generator) -> dict[str, Tensor]:
    """Return the named tensors of a generator before round 1, drawn from ``rng``."""
    with torch.random.fork_rng(devices=[]):
        generator = FeatureGenerator(noise_dim, hidden_dim, num_classes, width)
    initialise(generator, rng)
    return labelled(GENERATOR, weights_of(generator))


def load_generator(tensors: Mapping[str, Tensor], num_classes: int, width: int) -> FeatureGenerator | None:
    """Return the generator among named ``tensors``, sized by them, with copies of its weights; None without one.

    Raises
    ------
    ValueError
        The tensors are not those of a generator for C classes and features of width K.
    """
    found = part(GENERATOR, tensors)
    if not found:
        return None
    first = found.get("layers.0.weight", torch.zeros(0))
    if first.ndim != 2 or not len(first) or first.shape[1] <= num_classes:
        shape = tuple(first.shape)
        raise ValueError(f"server sent a generator whose layers.0.weight is {shape}: (hidden, noise + C) is needed")
    hidden_dim, inputs = first.shape
    with torch.device("meta"):
        generator = FeatureGenerator(inputs - num_classes, hidden_dim, num_classes, width)
    require_alike("server", found, generator.state_dict())
    generator.load_state_dict({name: tensor.clone() for name, tensor in found.items()}, assign=True)
    return generator
