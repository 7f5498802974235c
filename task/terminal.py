"""What the terminal of a user can show."""

import io
import sys


def show_any_text() -> None:
    """Let output never fail for a character that the terminal does not know: it is shown as an escape instead.

    Folders and classes may have any name, and a pipe on Windows knows a few hundred characters.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
