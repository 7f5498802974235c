"""The class list that all clients agree on before round 1."""

from collections.abc import Mapping
from logging import INFO, WARNING, getLogger

LOG = getLogger("flwr")


def agree(known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the C class names in the order of their ids.

    Where all nodes have one list, that is it; else all names that any node knows, sorted, numbers by their value.

    Parameters
    ----------
    known : Mapping[str, tuple of str]
        The classes of each node, by what messages call the node; at least one.

    Raises
    ------
    ValueError
        One line with two nodes: one has numbers where the other has words, or two names differ in case, spaces,
        hyphens or underscores only.
    """
    lists = list(dict.fromkeys(known.values()))
    if len(lists) == 1:
        return lists[0]
    advice = "rename them, or list all names in data.classes"
    first: dict[str, tuple[str, str]] = {}
    for who, names in known.items():
        for name in names:
            alike = "".join(character for character in name.casefold() if character not in " -_")
            other, owner = first.setdefault(alike or name, (name, who))
            if other != name:
                raise ValueError(f"class {other!r} of {owner} and class {name!r} of {who} are one or two? {advice}")
    numbered = {who: all(name.lstrip("-").isdecimal() for name in names) for who, names in known.items()}
    if len(set(numbered.values())) > 1:
        words, numbers = (next(who for who, only in numbered.items() if only == kind) for kind in (False, True))
        raise ValueError(f"the classes of {words} have names, those of {numbers} are numbers; {advice}")
    every = {name for names in lists for name in names}
    agreed = tuple(sorted(every, key=int) if all(numbered.values()) else sorted(every))
    LOG.log(INFO, "the nodes know %d classes together: %s", len(agreed), ", ".join(agreed))
    for name in agreed:
        owners = [who for who, names in known.items() if name in names]
        if len(owners) == 1 < len(known):
            LOG.log(WARNING, "class %r is known to %s alone", name, owners[0])
    return agreed
