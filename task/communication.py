"""The table of ``protofed-report --communication``: what the clients of each method sent and received in a round."""

from collections.abc import Iterator, Sequence

from task.comparison import Group, Statistic, identities
from task.results import RunResult
from task.tables import show, size

_WAYS = ("up", "down")
_SHARE = "prototypes up (% of weights)"


def readable_rows(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return the communication of ``groups`` for people."""
    return _rows(groups, [_readable(group) for group in groups], ("paper (10^6)", _SHARE))


def exact_rows(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return the communication of ``groups`` for programs: scalars and bytes, also where the paper says millions."""
    return _rows(groups, [_exact(group) for group in groups], ("paper_parameters",))


def remarks(groups: Sequence[Group]) -> Iterator[str]:
    """Say in words what the columns count."""
    yield (
        "means over the rounds after the first, in which there is often nothing to send down yet (a run of one round "
        "shows that one), then over the seeds; all clients together, training exchange"
    )
    yield (
        "parameters: scalars of the weights and prototypes sent, which the papers count and call MB (1 MB = 10^6 "
        "parameters); class ids, counts and BatchNorm statistics are none"
    )
    if any(_group_means(group)["prototype_share"] is not None for group in groups):
        yield f"{_SHARE}: what prototypes add to the parameters of the models that go up"
    yield "bytes: what Flower's records of the same messages hold, everything in them; 1 kB = 1,000 bytes"
    yield "evaluation: bytes of testing, up and down; a client: its mean in a round of training, up and down"
    runs = [run for group in groups for run in group.runs]
    silent = sum(not any("parameters" in entry for entry in run.rounds) for run in runs)
    if silent:
        yield f"{silent} of {len(runs)} runs are of an earlier version, which counted the bytes of all clients alone"
    sources = {g.experiment.source: None for g in groups if g.experiment and g.paper_communication is not None}
    if sources:
        yield f"paper: {'; '.join(sources)}: millions of parameters a round, up and down"


def means(run: RunResult) -> dict[str, float | None]:
    """Return the means over the rounds of ``run`` after the first; None where no round tells.

    By name: ``parameters_up``, ``parameters_down``, ``bytes_up``, ``bytes_down`` of all clients together,
    ``client_parameters_up`` and so on of the mean client of a round, ``prototype_parameters_up`` and
    ``prototype_parameters_down`` for those of the parameters that belong to prototypes, and ``evaluation_up``,
    ``evaluation_down``.
    """
    rounds = [entry for entry in run.rounds if entry["round"] > 1] or run.rounds

    def mean(key: str, name: str) -> float | None:
        return Statistic.of(entry.get(key, {}).get(name) for entry in rounds).mean

    def client_mean(name: str) -> float | None:
        clients = [entry.get("client_traffic", {}).values() for entry in rounds]
        return Statistic.of(Statistic.of(client.get(name) for client in each).mean for each in clients).mean

    found = {f"evaluation_{way}": mean("bytes", f"evaluate_{way}") for way in _WAYS}
    for way in _WAYS:
        found[f"prototype_parameters_{way}"] = mean("prototype_parameters", f"train_{way}")
    for kind in ("parameters", "bytes"):
        for way in _WAYS:
            found[f"{kind}_{way}"] = mean(kind, f"train_{way}")
            found[f"client_{kind}_{way}"] = client_mean(f"{kind}_{way}")
    return found


def _rows(
    groups: Sequence[Group], numbers: Sequence[dict[str, str]], optional: tuple[str, ...]
) -> list[dict[str, str]]:
    """Return identity and numbers of each group, without those ``optional`` columns in which there is no number."""
    empty = {key for key in optional if all(row[key] in ("-", "") for row in numbers)}
    rows = [who | what for who, what in zip(identities(groups), numbers, strict=True)]
    return [{key: text for key, text in row.items() if key not in empty} for row in rows]


def _group_means(group: Group) -> dict[str, float | None]:
    """Return the means of the group's runs, of each pair of directions also the sum, and what prototypes add.

    ``prototype_share`` is their part of what goes up, divided by the rest; None where only one of both is sent.
    """
    each = [means(run) for run in group.runs]
    found = {name: Statistic.of(run[name] for run in each).mean for name in each[0]}
    for kind in ("parameters", "evaluation", "client_parameters", "client_bytes"):
        up, down = (found[f"{kind}_{way}"] for way in _WAYS)
        found[kind] = None if up is None or down is None else up + down
    prototypes, every = found["prototype_parameters_up"], found["parameters_up"]
    found["prototype_share"] = None
    if prototypes is not None and every is not None and 0 < prototypes < every:
        found["prototype_share"] = prototypes / (every - prototypes)
    return found


def _readable(group: Group) -> dict[str, str]:
    found = _group_means(group)
    share = found["prototype_share"]
    return {
        "n": str(len(group.runs)),
        "parameters up": show(found["parameters_up"], "{:,.0f}"),
        "parameters down": show(found["parameters_down"], "{:,.0f}"),
        "up + down": show(found["parameters"], "{:,.0f}"),
        "paper (10^6)": show(group.paper_communication),
        _SHARE: show(share if share is None else 100 * share, "{:.4g}"),
        "bytes up": size(found["bytes_up"]),
        "bytes down": size(found["bytes_down"]),
        "evaluation": size(found["evaluation"]),
        "a client's parameters": show(found["client_parameters"], "{:,.0f}"),
        "a client's bytes": size(found["client_bytes"]),
    }


def _exact(group: Group) -> dict[str, str]:
    paper = group.paper_communication
    found = _group_means(group) | {"paper_parameters": None if paper is None else 1e6 * paper}
    names = ["parameters_up", "parameters_down", "parameters", "paper_parameters", "bytes_up", "bytes_down"]
    names += ["evaluation_up", "evaluation_down", *(f"prototype_parameters_{way}" for way in _WAYS)]
    names += [f"client_{kind}_{way}" for kind in ("parameters", "bytes") for way in _WAYS]
    return {"n": str(len(group.runs))} | {name: show(found[name], "{:.1f}", missing="") for name in names}
