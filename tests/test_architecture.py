"""The import rules and house rules of the packages, read from their syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("task", "server_app", "client_app")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FLOWER_FILE = "task/payload.py"
HYDRA_FILES = {"task/composition.py", "task/command_line.py", "task/launchers.py"}
# HtFLlib's data folders are pickles; this file reads them with an unpickler that knows three harmless names.
PICKLE_FILES = {"task/data/pfllib.py"}
# What leaves may share: all methods, and those with one global model.
BASES = {"__init__", "base", "global_model"}
# The two console scripts talk to a terminal.
PRINTING_FILES = {"task/launch.py", "task/running.py", "task/report.py", "task/progress.py"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative imports hide the layers"
            yield f"{node.module}"


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_keep_the_layers(path: Path) -> None:
    package, found = name_of(path).split("/")[0], roots(path)
    if package == "task":
        assert not found & {"server_app", "client_app"}
        assert "flwr" not in found or name_of(path) == FLOWER_FILE
    else:
        assert not found & ({"server_app", "client_app"} - {package})
    assert "hydra" not in found or name_of(path) in HYDRA_FILES
    assert not found & {"pickle", "cloudpickle", "dill", "joblib"} or name_of(path) in PICKLE_FILES
    assert "tests" not in found


@pytest.mark.parametrize("folder", ["server_app/strategies", "client_app/trainers", "task/methods"])
def test_leaves_do_not_import_leaves(folder: str) -> None:
    for path in (ROOT / folder).glob("*.py"):
        if path.stem in BASES:
            continue
        siblings = {
            name.rsplit(".", 1)[-1] for name in imports(path) if name.startswith(folder.replace("/", ".") + ".")
        }
        assert siblings <= BASES, f"{name_of(path)} imports {siblings}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_house_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 300, f"{name_of(path)} is longer than 300 lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= 40, f"{name_of(path)}: {node.name} has {length} lines"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{name_of(path)}: bare except"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{name_of(path)}: {node.func.id}"
            assert node.func.id != "print" or name_of(path) in PRINTING_FILES, f"{name_of(path)}: print"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False, f"{name_of(path)}: allow_pickle"


def test_flower_is_used_only_through_its_public_modules() -> None:
    public = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
    for path in FILES:
        assert {name for name in imports(path) if name.split(".")[0] == "flwr"} <= public, name_of(path)


def test_the_top_level_is_what_it_says() -> None:
    import subprocess

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    if not any(tracked):
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked if line and not line.startswith(".")}
    expected = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        "server_app",
        "client_app",
        "task",
        "conf",
        "tests",
    }
    assert top <= expected


def test_every_setting_is_read_somewhere() -> None:
    """A key that never reaches the code is a lie to the user."""
    import dataclasses

    from task import schema

    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES if path.name != "schema.py"]
    # Of the schema itself only what is no check: its public methods.
    methods = ast.walk(ast.parse(Path(schema.__file__).read_text(encoding="utf-8")))
    trees += [node for node in methods if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    configs = [value for name, value in vars(schema).items() if name.endswith("Config")]
    assert len(configs) == 10
    for config in configs:
        for field in dataclasses.fields(config):
            assert field.name in read, f"{config.__name__}.{field.name} is never read"
