"""LG-FedAvg: every client keeps its own feature extractor, and the heads are averaged.

Liang, Liu, Liu, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", NeurIPS 2019 workshop, arXiv:2001.01523.

====================  ==========================================================================
here                  paper
====================  ==========================================================================
base of the model     l_i, the local representation, private
``head.*``            theta_g, the global model on top of it, shared
``examples``          n_i, the training samples of client i
====================  ==========================================================================

The local objective is cross-entropy alone: a client overwrites its head with the global one, trains both parts
together, and returns the head.

Departures from the paper and the authors' code: what is shared is exactly the head, not the last few layers of equal
models (as in the comparison of FedTGP, whose clients differ in architecture); training starts from random weights, not
from a model trained with FedAvg; the mean is weighted by n_i, where the authors' code divides by the number of clients
(``uniform``); SGD without momentum, at the run's learning rate. From HtFLlib: the first head is the server's own, not
that of client 0; only a round's participants get the head before training, and everyone gets the newest one before a
test; heads of unequal shape are refused, where a copy by position would replace weights by others; a client without
data sends no head, and one with less than a batch trains, so that its weight is honest.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from task.averaging import weighted_mean


def average_heads(heads: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the global head, the sum over clients of ``(n_i / n) head_i``.

    Parameters
    ----------
    heads : sequence of mapping
        The named tensors of each participant's head, at least one, all of the same shapes.
    weights : sequence of float
        n_i, or 1 for every client; they are normalised to sum 1.

    References
    ----------
    LG-FedAvg, Algorithm 1, last line of the server: the update of theta_g.
    """
    return weighted_mean(heads, weights)
