"""FedProto: global prototypes as averages of the clients' class means.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022, arXiv:2105.00243.

Departures: the printed formula divides the weighted mean once more by the number of holders, which shrinks every
prototype; ``weighted`` leaves that slip out and ``literal`` keeps it. The authors' code takes the plain mean
(``uniform``) and collects features during training; here they are those of the trained model in eval mode, and
``during_training`` gives the code's.
"""

import torch
from torch import Tensor


def average_prototypes(
    vectors_NK: Tensor, classes_N: Tensor, counts_N: Tensor | None, rule: str, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the average of the received prototypes of each class.

    Parameters
    ----------
    vectors_NK, classes_N : Tensor
        ``(N, K)`` prototypes of clients and their ``(N,)`` int64 classes.
    counts_N : Tensor or None
        ``(N,)`` samples behind each, |D_{i,c}|; not needed for ``uniform``.
    rule : str
        ``weighted``: weights |D_{i,c}| / N_c. ``uniform``: plain mean. ``literal``: the printed formula,
        ``weighted`` divided by the number of holders.
    num_classes : int
        C.

    Returns
    -------
    tuple of Tensor
        ``(C, K)`` averages, zero where nothing came, and the ``(C,)`` bool mask of classes that came.

    Raises
    ------
    ValueError
        Counts are missing and the rule needs them.

    References
    ----------
    FedProto, eq. (6).
    """
    if rule != "uniform" and counts_N is None:
        raise ValueError(f"aggregation={rule!r} needs the clients' sample counts (client.share_counts=true)")
    holders_C = torch.bincount(classes_N, minlength=num_classes)
    weights_N = torch.ones(len(classes_N)) if rule == "uniform" or counts_N is None else counts_N.float()
    totals_C = torch.zeros(num_classes).index_add_(0, classes_N, weights_N)
    shares_N = weights_N / totals_C[classes_N]
    if rule == "literal":
        shares_N = shares_N / holders_C[classes_N]
    averages_CK = vectors_NK.new_zeros(num_classes, vectors_NK.shape[1])
    averages_CK.index_add_(0, classes_N, vectors_NK * shares_N.unsqueeze(1))
    return averages_CK, holders_C > 0
