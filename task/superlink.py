"""A private local SuperLink: Flower's simulation runtime, owned by one ``protofed`` command.

Flower's own managed SuperLink listens on a fixed port, keeps the environment and the working folder of
whoever started it first, and stays behind. This one has a port, a home folder and a Ray folder of its own,
and ends with the command, so two commands never meet and nothing is left running.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from task import processes, ray_engine
from task.progress import last_error

PROJECT_DIR = Path(__file__).resolve().parent.parent
PARTS = ("server_app", "client_app", "task", "conf")
FILES = ("pyproject.toml", "README.md", "LICENSE")
CONNECTION = "protofed"
PREFIX = "protofed-"  # of home folders
START_TIMEOUT = 60.0  # seconds until a new SuperLink must answer
STOP_TIMEOUT = 20.0  # seconds that processes get to end by themselves
# Ray puts sockets of about 65 more characters below its folder, and a socket's path ends at 103 on macOS.
LONGEST_RAY_FOLDER = 38


class SuperLinkError(RuntimeError):
    """The private SuperLink, or a command to it, did not do its job."""


class LocalSuperLink:
    """A SuperLink in simulation mode on a free port; a context manager that leaves no process and no file.

    Parameters
    ----------
    project : Path, optional
        A frozen copy of the project, made by ``stage``; by default a copy is made here, so that editing a file
        during a run does not change it.
    ray_cores : int, optional
        Start a Ray with this many CPU cores for all runs, which then need not start their own.
    ray_address : str, optional
        Run on the Ray cluster at this address.
    parent : Path, optional
        Where to make the home folder, which all machines of a cluster must see.
    """

    def __init__(
        self,
        project: Path | None = None,
        ray_cores: int | None = None,
        ray_address: str | None = None,
        parent: Path | None = None,
    ) -> None:
        temporary = _short_temporary_folder()
        processes.remove_leftovers(Path(temporary or tempfile.gettempdir()), PREFIX)
        self.home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or temporary))
        processes.sign(self.home)
        self.log = self.home / "superlink.log"
        self.environment = private_environment(self.home)
        self.ray_cores, self._ray_address = ray_cores, ray_address
        self._project = project or self.home / "project"
        self._ray: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._run: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            if not self._project.exists():
                stage(self._project)
            if self.ray_cores is not None:
                self._ray_address = self._start_ray(self.ray_cores)
            if self._ray_address is not None:
                self.environment["RAY_ADDRESS"] = self._ray_address
            for _ in range(3):  # another program may take the free port before the SuperLink does
                if self._start(free_port()):
                    return self
        except BaseException:
            self.close()
            raise
        last = last_error(self.log)
        self.close()
        raise SuperLinkError(f"the local SuperLink did not start: {last}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_ray(self) -> bool:
        """Whether runs join a Ray that is there already."""
        return self._ray_address is not None

    @property
    def is_alive(self) -> bool:
        """Whether the processes below which runs are done are still there."""
        return all(each is None or each.poll() is None for each in (self._process, self._ray))

    def submit(
        self, run_config: Mapping[str, str], federation_config: str, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start and return the process ``flwr run --stream``, whose output goes to the file ``log``."""
        # A file, because the inline form of --run-config cannot carry both kinds of quotes.
        settings = self.home / "run-config.toml"
        lines = [f"{key} = {toml_string(value)}\n" for key, value in run_config.items()]
        settings.write_text("".join(lines), encoding="utf-8")
        arguments = ["--stream", "--run-config", str(settings), "--federation-config", federation_config]
        command = [self._program("flwr"), "run", str(self._project), CONNECTION, *arguments]
        with log.open("ab") as stream:
            self._run = self._popen(command, stream.fileno())
        return self._run

    def stop_run(self, log: Path) -> bool:
        """Stop the last run that ``log`` tells of, and say whether Flower confirmed it."""
        run_id = last_run_id(log)
        if run_id is None:
            return False
        command = [self._program("flwr"), "stop", str(run_id), CONNECTION]
        with log.open("ab") as stream:
            process = self._popen(command, stream.fileno())
        try:
            return process.wait(STOP_TIMEOUT) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False

    def close(self) -> None:
        """End every process that this SuperLink started, and remove its folder."""
        if self._process is not None:
            if self._run is not None:
                _end(self._run)
            processes.end_all(self._process.pid, str(self.home))
            _end(self._process)
            self._process = None
        if self._ray is not None:  # its processes carry the home folder, so those that were left have ended, too
            processes.end_all(self._ray.pid, str(self.home))
            _end(self._ray)
            self._ray = None
        if self._guard is not None:
            _end(self._guard)
        shutil.rmtree(self.home, ignore_errors=True)

    def _start(self, port: int) -> bool:
        config = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        config += f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        (self.home / "config.toml").write_text(config, encoding="utf-8")
        command = [self._program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--disable-runtime-dependency-installation"]
        with self.log.open("ab") as stream:
            self._process = self._popen(command, stream.fileno())
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            if _answers(f"http://127.0.0.1:{port}/health"):
                self._guard = processes.start_guard(self._process.pid, str(self.home))
                return True
            time.sleep(0.1)
        _end(self._process)
        return False

    def _popen(
        self, command: list[str], output: int, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches only the launcher, which then stops things in order. And a folder of its
        # own: Ray puts the working folder first on its workers' path, where a checkout would hide the bundle.
        return subprocess.Popen(
            command,
            cwd=self.home,
            env=self.environment,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=os.name == "posix",
        )

    def _program(self, name: str) -> str:
        path = shutil.which(name, path=self.environment["PATH"])
        if path is None:
            raise SuperLinkError(f"{name} is not installed beside {sys.executable}")
        return path

    def _start_ray(self, cores: int) -> str:
        file, log = self.home / "ray-address", self.home / "ray.log"
        with log.open("ab") as stream:
            # -P: the neighbours of the program's file must not hide other modules.
            program = Path(ray_engine.__file__)
            command = [sys.executable, "-P", str(program), str(cores), str(file)]
            self._ray = self._popen(command, stream.fileno(), subprocess.PIPE)
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._ray.poll() is None:
            if file.exists():
                return file.read_text("ascii").strip()
            time.sleep(0.1)
        raise SuperLinkError(f"Ray did not start: {last_error(log)}")


def stage(target: Path) -> None:
    """Copy what a run consists of into the new folder ``target``.

    Raises
    ------
    SuperLinkError
        There is no project beside the installed code.
    """
    if not (PROJECT_DIR / "pyproject.toml").is_file():
        raise SuperLinkError(f"no pyproject.toml in {PROJECT_DIR}: install ProtoFed with `pip install -e FOLDER`")
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in PARTS:
        shutil.copytree(PROJECT_DIR / name, target / name, ignore=skip)
    for name in FILES:
        if (PROJECT_DIR / name).is_file():
            shutil.copy(PROJECT_DIR / name, target / name)


def private_environment(home: Path) -> dict[str, str]:
    """Return the environment of everything that runs below a private SuperLink with this ``home``."""
    environment = dict(os.environ)
    # Ray would join a cluster that this names instead of starting its own.
    environment.pop("RAY_ADDRESS", None)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["FLWR_HOME"] = str(home)
    environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    environment["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    environment["FLWR_TELEMETRY_ENABLED"] = "0"
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_TMPDIR"] = str(home)
    # Ray's processes rename themselves, which would wipe out the environment that tells whose they are.
    environment["SPT_NOENV"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONIOENCODING"] = "utf-8"
    # A proxy for the outside world must not get the traffic between our own processes.
    for key in ("NO_PROXY", "no_proxy"):
        environment[key] = ",".join(filter(None, [environment.get(key), "127.0.0.1", "localhost"]))
    return environment


def toml_string(text: str) -> str:
    """Return ``text`` as a TOML basic string."""
    escapes = {'"': '\\"', "\\": "\\\\"}
    parts = [escapes.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text]
    return '"' + "".join(parts) + '"'


def last_run_id(log: Path) -> int | None:
    """Return the number that Flower gave to the last run submitted in this ``log``, if any."""
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    found = re.findall(r"Successfully started run (\d+)", text)
    return int(found[-1]) if found else None


def free_port() -> int:
    """Return a TCP port of this machine that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT / 2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _short_temporary_folder() -> str | None:
    """Return where to make the private folder: the usual place unless Ray's sockets need a shorter one."""
    usual = tempfile.gettempdir()
    fits = len(usual) + len("/protofed-12345678") <= LONGEST_RAY_FOLDER
    return usual if fits or not os.access("/tmp", os.W_OK) else "/tmp"
