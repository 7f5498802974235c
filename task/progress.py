"""Follows a run from outside: the new lines of ``rounds.jsonl`` in words, and what went wrong in a log."""

import json
import re
import time
from pathlib import Path
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Ray puts the name of the worker before each line that one of them writes.
_WORKER = re.compile(r"^\([^)]*pid=\d+[^)]*\) ?")
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Timeout|Exit)\w*(?:\(.*\))?(?:: .*)?")
START_NEWS = 10.0  # seconds between two lines before the first round
ROUND_NEWS = 60.0  # the same, within a round


class Progress:
    """Reads a growing ``rounds.jsonl``; ``lines`` returns what is new since the last call.

    Parameters
    ----------
    folder : Path
        The results folder.
    rounds : int
        The number of rounds of the run, T.
    waiting_for : str
        What a run does before its first round, for the lines that say that it is still alive.
    """

    def __init__(self, folder: Path, rounds: int, waiting_for: str) -> None:
        self.file = folder / "rounds.jsonl"
        self.rounds = rounds
        self.waiting_for = waiting_for
        self.done = 0
        self._position = 0
        self._seconds: list[float] = []
        self._started = self._last_news = time.monotonic()
        self._skip_old_rounds()

    def lines(self) -> list[str]:
        """Return a line for each round that ended, or, after a long silence, one that says what goes on."""
        news = [line for entry in self._new_entries() for line in self._describe(entry)]
        now = time.monotonic()
        if not news and now - self._last_news >= (ROUND_NEWS if self.done else START_NEWS):
            if self.done:
                news = [f"round {self.done + 1}/{self.rounds} goes on"]
            else:
                news = [f"{self.waiting_for} ({now - self._started:.0f} s)"]
        if news:
            self._last_news = now
        return news

    def _skip_old_rounds(self) -> None:
        """Leave out the rounds of the run that is being resumed."""
        for entry in self._new_entries():
            self.done = max(self.done, int(entry["round"]))

    def _new_entries(self) -> list[dict[str, Any]]:
        try:
            with self.file.open("rb") as stream:
                if stream.seek(0, 2) < self._position:  # a resumed run takes back rounds after its checkpoint
                    self._position = self.done = 0
                    self._seconds.clear()
                stream.seek(self._position)
                complete, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(complete) + len(newline)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]

    def _describe(self, entry: dict[str, Any]) -> list[str]:
        number = int(entry["round"])
        seconds = float(entry.get("seconds", {}).get("round", 0.0))
        self.done = max(self.done, number)
        self._seconds.append(seconds)
        accuracy = entry.get("accuracy")
        result = "accuracy not evaluated" if accuracy is None else f"accuracy {100 * accuracy:6.2f} %"
        usual = self._seconds[1:][-10:] or self._seconds  # the first round also loads code and data
        left = (self.rounds - number) * sum(usual) / len(usual)
        rest = f", about {duration(left)} left" if number < self.rounds else ""
        lines = [f"round {number:{len(str(self.rounds))}}/{self.rounds}  {result}  {seconds:5.1f} s{rest}"]
        failures = entry.get("failures") or []
        if failures:
            first = failures[0]
            reason = " ".join(str(first.get("reason")).split())
            lines.append(f"  {len(failures)} failed, first client {first.get('partition')}: {reason}")
        return lines


def duration(seconds: float) -> str:
    """Return ``seconds`` in words: the two largest units at most."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def last_error(log: Path) -> str:
    """Return in one line what ended the run with this ``log``: its last error, or else its last words.

    Of exceptions that were raised from one another, the first is the reason.
    """
    text = _COLOURS.sub("", log.read_text("utf-8", "replace")) if log.exists() else ""
    lines = [_WORKER.sub("", line).rstrip() for line in text.split("\n")]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if starts:
        lines = lines[_start_of_chain(lines, starts) :]
        found = [line for line in lines if _EXCEPTION.fullmatch(line)][:1]
    else:
        # Flower's commands draw a box round what went wrong before there was a run.
        found = [" ".join(box.replace("│", " ").split()) for box in re.findall(r"─ Error ─+╮\n(.*?)╰─", text, re.S)]
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("ERROR")]
    words = [line for line in lines if line]
    return (found or words or ["no output"])[-1]


def _start_of_chain(lines: list[str], starts: list[int]) -> int:
    """Return where the first of the tracebacks stands that led to the last of those at ``starts``."""
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = lines[start + 1 : first]
        if not any(line.startswith(("During handling", "The above exception")) for line in between):
            break
        first = start
    return first
