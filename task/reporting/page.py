"""The report as one HTML page that needs no network: tables that can be sorted, figures, settings and versions."""

import base64
import hashlib
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from task.reporting import content
from task.reporting.differences import Baseline
from task.reporting.drawing import SIGNATURE
from task.reporting.study import Study
from task.results import RunResult

_FILES = Path(__file__).parent / "page"
SECTIONS = ("Accuracy", "Communication", "Clients", "Prototypes", "Classes")
"""The sections that hold figures, in their order."""


@dataclass(frozen=True)
class Picture:
    """A figure on the page: ``wide`` ones take a whole row, a ``matrix`` is inverted on a dark page."""

    name: str
    section: str
    title: str
    caption: str
    alternative: str
    uri: str
    wide: bool
    matrix: bool


def render(
    study: Study,
    runs: Sequence[RunResult],
    baseline: Baseline | None,
    pictures: Sequence[Picture],
    *,
    title: str,
    command: Sequence[str],
    remarks: Iterable[str],
) -> str:
    """Return the page as text.

    Parameters
    ----------
    study, runs, baseline : Study, sequence of RunResult, Baseline or None
        What was compared, all runs that were read, and the method that the others are compared with.
    pictures : sequence of Picture
        The figures.
    title, command, remarks : str, sequence of str, iterable of str
        The page's title, the words of the command that made it, and what else a reader has to know.
    """
    tables = [content.grid_table(study), content.numbers_table(study, baseline)] if study.groups else []
    if baseline and study.groups:
        tables.insert(1, content.differences_table(study, baseline))
    settings, consequences = content.settings_tables(study)
    style, script = ((_FILES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        signature=SIGNATURE,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        facts=_facts(study, runs),
        gaps=[*content.gaps(study), *(f"{run.folder.name}: {run.status}: {run.reason}" for run in study.unplaced)],
        tables=tables,
        communication=content.communication_table(study) if study.groups else None,
        sections=[(name, [each for each in pictures if each.section == name]) for name in SECTIONS],
        settings=settings,
        consequences=consequences,
        common=content.common_settings(study),
        runs=content.runs_table(study, runs),
        versions=content.versions(runs),
        remarks=list(remarks),
        command=shlex.join(command),
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _facts(study: Study, runs: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return what a reader sees first: numbers and what they count."""
    counted = sum(len(group.runs) for group in study.groups)
    seeds = study.seeds
    close = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    named = f"{seeds[0]} to {seeds[-1]}" if close else ", ".join(map(str, seeds)) or "-"
    return [
        (str(counted) if counted == len(runs) else f"{counted} of {len(runs)}", _many(len(runs), "run")),
        (str(len(study.methods)), _many(len(study.methods), "method")),
        (str(len(study.settings)), _many(len(study.settings), "setting")),
        (named, _many(len(seeds), "seed")),
    ]


def _many(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _hash(text: str) -> str:
    """Return what a page's policy must say so that exactly this style or script is allowed, and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
