"""The table of ``protofed-report --communication``: what the clients of each method sent and received in a round."""

from collections.abc import Iterator, Sequence

from task.comparison import Group, Statistic, identities
from task.results import RunResult
from task.tables import as_csv, as_markdown, show, size

_WAYS = ("up", "down")


def markdown_table(groups: Sequence[Group]) -> str:
    """Return the communication of ``groups`` as an aligned Markdown table."""
    return as_markdown(_rows(groups, [_readable(group) for group in groups], "paper (10^6)"))


def csv_table(groups: Sequence[Group]) -> str:
    """Return the communication of ``groups`` as CSV: scalars and bytes, also where the paper says millions."""
    return as_csv(_rows(groups, [_exact(group) for group in groups], "paper_parameters"))


FORMATS = {"markdown": markdown_table, "csv": csv_table}


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
    ``client_parameters_up`` and so on of the mean client of a round, and ``evaluation_up``, ``evaluation_down``.
    """
    rounds = [entry for entry in run.rounds if entry["round"] > 1] or run.rounds

    def mean(key: str, name: str) -> float | None:
        return Statistic.of(entry.get(key, {}).get(name) for entry in rounds).mean

    def client_mean(name: str) -> float | None:
        clients = [entry.get("client_traffic", {}).values() for entry in rounds]
        return Statistic.of(Statistic.of(client.get(name) for client in each).mean for each in clients).mean

    found = {f"evaluation_{way}": mean("bytes", f"evaluate_{way}") for way in _WAYS}
    for kind in ("parameters", "bytes"):
        for way in _WAYS:
            found[f"{kind}_{way}"] = mean(kind, f"train_{way}")
            found[f"client_{kind}_{way}"] = client_mean(f"{kind}_{way}")
    return found


def _rows(groups: Sequence[Group], numbers: Sequence[dict[str, str]], paper: str) -> list[dict[str, str]]:
    """Return identity and numbers of each group, without the column ``paper`` where no paper has a number."""
    rows = [who | what for who, what in zip(identities(groups), numbers, strict=True)]
    known = any(group.paper_communication is not None for group in groups)
    return [{key: text for key, text in row.items() if known or key != paper} for row in rows]


def _group_means(group: Group) -> dict[str, float | None]:
    """Return the means of the group's runs, and of each pair of directions also the sum."""
    each = [means(run) for run in group.runs]
    found = {name: Statistic.of(run[name] for run in each).mean for name in each[0]}
    for kind in ("parameters", "evaluation", "client_parameters", "client_bytes"):
        up, down = (found[f"{kind}_{way}"] for way in _WAYS)
        found[kind] = None if up is None or down is None else up + down
    return found


def _readable(group: Group) -> dict[str, str]:
    found = _group_means(group)
    return {
        "n": str(len(group.runs)),
        "parameters up": show(found["parameters_up"], "{:,.0f}"),
        "parameters down": show(found["parameters_down"], "{:,.0f}"),
        "up + down": show(found["parameters"], "{:,.0f}"),
        "paper (10^6)": show(group.paper_communication),
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
    names += ["evaluation_up", "evaluation_down"]
    names += [f"client_{kind}_{way}" for kind in ("parameters", "bytes") for way in _WAYS]
    return {"n": str(len(group.runs))} | {name: show(found[name], "{:.1f}", missing="") for name in names}
