"""The project as a whole: its public face, its layers, its pins, its guards, and what its pages claim."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.cli.words import OTHER_WORDS_OF_PYTHON
from tests.for_each import for_each

import penstock
from penstock.cli.main import main
from penstock.machine import Cluster
from penstock.machine.ssd import Ssd
from penstock.simulate.scenario import Scenario

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src"
PYPROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
MODULES = sorted(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in SOURCE.rglob("*.py")
)
IS_MODULE = frozenset(MODULES)

PUBLIC_NAMES = [
    "AccessPlan", "BundleShuffle", "FullShuffle", "Loader", "LoaderConfig", "Machine", "PenstockError",
    "SnapshotStore", "StorageClass", "Trace", "calibrate", "open_source", "predict", "read_trace",
    "report_waits_on", "watch",
]  # fmt: skip


LONGEST_LINES = 80
#: More are fields of a configuration. The columns of a span are as many.
MOST_ARGUMENTS = 11


def file_of(module: str) -> Path:
    place = SOURCE.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


# -- The public face -----------------------------------------------------------------------------------


def test_the_public_names_are_the_ones_listed_here_in_order() -> None:
    assert penstock.__all__ == PUBLIC_NAMES == sorted(PUBLIC_NAMES)


@for_each("name", PUBLIC_NAMES)
def test_each_public_name_can_be_imported_and_says_what_it_is(name: str) -> None:
    value = getattr(penstock, name)

    documentation = inspect.getdoc(value)
    assert documentation, f"penstock.{name} has no docstring"
    assert documentation != inspect.getdoc(object)
    assert name in dir(penstock)


@for_each("name", PUBLIC_NAMES)
def test_each_public_name_is_in_the_reference(name: str) -> None:
    reference = "".join(page.read_text("utf-8") for page in (REPOSITORY / "docs" / "reference").glob("*.md"))

    assert re.search(rf"^.*auto\w+:?.*\bpenstock\.{name}$", reference, re.MULTILINE)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'penstock' has no attribute 'Loadre'"):
        _ = penstock.Loadre  # type: ignore[attr-defined]


def test_type_checkers_and_the_interpreter_find_each_name_in_the_same_place() -> None:
    tree = ast.parse(inspect.getsource(penstock))
    imported = {
        alias.name: node.module
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert imported == penstock._HOMES
    assert sorted(imported) == PUBLIC_NAMES


def test_importing_penstock_and_its_command_line_imports_no_heavy_library() -> None:
    program = "import json, sys, penstock, penstock.cli.main; print(json.dumps(sorted(sys.modules)))"
    printed = run_python("-c", program).stdout

    loaded = {name.partition(".")[0] for name in json.loads(printed)}
    heavy = {"torch", "numba", "llvmlite", "cv2", "matplotlib", "sklearn", "scipy", "rich", "numpy"}
    assert loaded.isdisjoint(heavy)


def test_importing_penstock_imports_nothing_but_itself_and_the_standard_library() -> None:
    """It takes some ten milliseconds, which no test asserts; what it could take longer by is what it imports."""
    program = "import json, sys, penstock; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(run_python("-c", program).stdout)

    # An interpreter at its start may import what finds packages that are installed for editing.
    at_start = json.loads(run_python("-c", "import json, sys; print(json.dumps(sorted(sys.modules)))").stdout)
    roots = {module.partition(".")[0] for module in set(modules) - set(at_start)}
    assert roots - sys.stdlib_module_names == {"penstock"}
    assert [module for module in modules if module.startswith("penstock.")] == []


# -- The layers ----------------------------------------------------------------------------------------


def layers_of_the_linter() -> dict[str, list[set[str]]]:
    """Return the layers that `make lint` holds inside each package, the highest first."""
    return {
        package: [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
        for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
        for package in contract.get("containers", ())
    }


def test_no_files_import_each_other() -> None:
    """Wherever in a file an import stands, unless type checkers alone see it."""
    imports = {name: set(_outline(name)[0]) & IS_MODULE - {name} for name in MODULES}

    TopologicalSorter(imports).prepare()  # raises CycleError, which shows the circle


@functools.cache
def _outline(name: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return what a module imports, its functions that are too long or take too much, and odd words: parsed once."""
    imported, long, wide, odd = list[str](), list[str](), list[str](), list[str]()
    nodes: list[ast.AST] = [ast.parse(file_of(name).read_text("utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                part = f"{node.module}.{alias.name}"
                imported.append(part if part in IS_MODULE else str(node.module))
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes += node.orelse
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            odd += [f"{name}: {node.target.id}"] * (node.target.id in OTHER_WORDS_OF_PYTHON)
        elif not isinstance(node, ast.expr):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{name}.{node.name}, {lines} lines"] * (lines > LONGEST_LINES)
                taken = [each.arg for each in (*node.args.args, *node.args.kwonlyargs) if each.arg != "self"]
                if not re.match("_[^_]", node.name):
                    wide += [f"{name}.{node.name}, {len(taken)} arguments"] * (len(taken) > MOST_ARGUMENTS)
                    odd += [f"{name}.{node.name}: {arg}" for arg in taken if arg in OTHER_WORDS_OF_PYTHON]
            for inner in (
                "body",
                "orelse",
                "finalbody",
                "handlers",
                "cases",
            ):  # statements stand nowhere else
                nodes.extend(getattr(node, inner, ()))
    return imported, long, wide, odd


def test_the_design_page_draws_the_layers_that_the_linter_holds() -> None:
    design = (REPOSITORY / "docs" / "design.md").read_text("utf-8")
    pictures = re.findall(r"^<!-- layers.*?-->\n+```text\n(.*?)```$", design, re.MULTILINE | re.DOTALL)

    drawn = [[set(re.findall(r"\w+", line)) for line in picture.splitlines()] for picture in pictures]

    assert drawn == list(layers_of_the_linter().values())


def test_every_part_of_a_package_has_its_layer() -> None:
    layers = layers_of_the_linter()

    for package in ("penstock", "penstock.checkpoint"):
        parts = {
            name.removeprefix(f"{package}.").split(".")[0]
            for name in MODULES
            if name.startswith(f"{package}.")
        }
        assert parts - {"__main__"} == set().union(*layers[package])


# -- The pinned environment ----------------------------------------------------------------------------


def pinned_versions() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


#: How the names of those begin that only a build of PyTorch for GPUs brings; the pins are of the build for CPUs.
ONLY_WITH_CUDA = ("nvidia-", "cuda-", "triton")


def needed_distributions(extras: set[str]) -> dict[str, set[str]]:
    """Return every third-party distribution that the extras reach, with the extras asked of each."""
    project = PYPROJECT["project"]
    own = [*project["dependencies"], *PYPROJECT["build-system"]["requires"]]
    own += [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    found: dict[str, set[str]] = {}
    waiting = [Requirement(text) for text in own]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        asked = {"", *requirement.extras} - found.get(name, set())
        if not asked or name.startswith(ONLY_WITH_CUDA):
            continue
        found.setdefault(name, set()).update(asked)
        if name == "penstock":
            texts = [text for extra in asked - {""} for text in project["optional-dependencies"][extra]]
            waiting += map(Requirement, texts)
        elif is_installed(name):
            for text in importlib.metadata.requires(name) or []:
                needed = Requirement(text)
                if any(needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in asked):
                    waiting.append(needed)
    return {name: asked for name, asked in found.items() if name != "penstock"}


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_every_distribution_that_is_tested_with_is_pinned() -> None:
    needed = needed_distributions(set(PYPROJECT["project"]["optional-dependencies"]))

    assert sorted(set(needed) - set(pinned_versions())) == []


def test_what_only_a_build_for_gpus_brings_needs_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requirements of torch 2.13.0 from PyPI, beside those of the build for CPUs."""
    requires = importlib.metadata.requires
    on_a_gpu = ["nvidia-cudnn-cu13==9.20.0.48", "cuda-toolkit[cublas,cudart]==13.0.2", "triton==3.7.0"]
    needed = needed_distributions({"torch"})

    def those_of_the_gpu_build(name: str) -> list[str]:
        return [*(requires(name) or []), *(on_a_gpu if name == "torch" else [])]

    monkeypatch.setattr(importlib.metadata, "requires", those_of_the_gpu_build)

    assert needed_distributions({"torch"}) == needed


def test_the_pins_hold_no_local_version_and_no_address() -> None:
    for name, version in pinned_versions().items():
        assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", version), f"{name}=={version}"


def test_the_tests_run_in_the_pinned_environment() -> None:
    """A local suffix (torch's `+cpu`) says how a version was built, not which one it is."""
    installed = {
        name: importlib.metadata.version(name).partition("+")[0]
        for name in needed_distributions({"test", "lint"})
        if is_installed(name)
    }

    assert installed == {name: pinned_versions()[name] for name in installed}


# -- What the pages claim ------------------------------------------------------------------------------


def blocks_in_pages(language: str) -> list[ParameterSet]:
    blocks = re.compile(rf"^ *```{language}\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    return [
        pytest.param(textwrap.dedent(match[1]), id=f"{page.relative_to(REPOSITORY)}-{number}")
        for page in PAGES
        for number, match in enumerate(blocks.finditer(page.read_text("utf-8")), 1)
    ]


@for_each("text", blocks_in_pages("toml"))
def test_the_machines_in_the_pages_are_what_they_say(text: str) -> None:
    if "[[device]]" in text and "[source]" not in text:  # for graphs alone; it is not written
        assert Cluster.from_toml(text).devices
        return
    kind = Scenario if "[training]" in text else Ssd if "pages_per_block" in text else penstock.Machine

    described = kind.from_toml(text)

    assert kind.from_toml(described.to_toml()) == described


@for_each("code", blocks_in_pages("python"))
def test_the_code_in_the_pages_parses_and_names_what_exists(code: str) -> None:
    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.partition(".")[0] == "penstock":
                        assert alias.name in MODULES, alias.name
                        modules[alias.asname or "penstock"] = alias.name if alias.asname else "penstock"
            case ast.ImportFrom(module=str(home), names=names) if home.partition(".")[0] == "penstock":
                for alias in names:
                    assert alias.name in names_in(home), f"{home}.{alias.name}"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                assert attribute in names_in(modules[name]), ast.unparse(node)


@functools.cache
def names_in(module: str) -> set[str]:
    """Return what a module binds, and the modules in it, without its import: it may be one of a framework."""
    waiting: list[ast.AST] = [ast.parse(file_of(module).read_text("utf-8"))]
    found = {name[len(module) + 1 :] for name in MODULES if name.startswith(f"{module}.")}
    while waiting:
        match waiting.pop():
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case node:
                waiting += ast.iter_child_nodes(node)
    return found


def test_every_command_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "reference" / "command-line.md").read_text("utf-8")

    with pytest.raises(SystemExit, match="0"):
        main(["--help"])

    commands = re.findall(r"^    ([a-z]+)\b", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--help"])
    kinds = re.findall(r"^    ([a-z]+)\b", capsys.readouterr().out, re.MULTILINE)
    assert commands
    assert kinds
    assert list(dict.fromkeys(re.findall(r"^`penstock ([a-z]+)\b", page, re.MULTILINE))) == commands
    assert re.findall(r"^`penstock simulate ([a-z]+)\b", page, re.MULTILINE) == kinds


def modules_with_examples() -> list[str]:
    return [name for name in MODULES if ">>>" in file_of(name).read_text("utf-8")]


@for_each("name", modules_with_examples())
def test_the_examples_in_the_docstrings_give_what_they_show(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)

    assert result.attempted > 0
    assert result.failed == 0


# -- The guards of the test suite ----------------------------------------------------------------------


@pytest.fixture
def small_suite(tmp_path: Path) -> Path:
    """Return a project of its own with this project's configuration, guards and an empty list of skips."""
    for folder in ("tests", "memory"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests" / "skips.txt").write_text("", "utf-8")
    modules = ("conftest", "few_readers", "parallel", "patience")
    for name in ("pyproject.toml", *(f"tests/{module}.py" for module in modules)):
        text = (REPOSITORY / name).read_text("utf-8")
        impatient = re.sub(r"^GRACE_SECONDS = .*$", "GRACE_SECONDS = 0.2", text, flags=re.MULTILINE)
        # What it leaves there no test beside it sees. Its tests need no kernel.
        own = impatient.replace('SHARED_MEMORY = Path("/dev/shm")', 'SHARED_MEMORY = Path("memory")')
        (tmp_path / name).write_text(own.replace("def pytest_sessionstart", "def _compile"), "utf-8")
    return tmp_path


def run_suite(suite: Path, test: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (suite / "tests" / "test_small.py").write_text(textwrap.dedent(test), "utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=suite,
        env={**os.environ, "PENSTOCK_FAIL_ON_SKIP": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


HANGS_AND_LEAKS = """
    import os
    import subprocess
    import threading

    import pytest

    children = []

    def a_worker_that_waits_for_ever():
        threading.Event().wait()

    @pytest.mark.timeout(2, func_only=True)
    def test_that_hangs():
        worker = threading.Thread(target=a_worker_that_waits_for_ever, daemon=True)
        worker.start()
        worker.join()

    def test_after_it():
        pass

    def test_thread():
        threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

    def test_process():
        children.append(subprocess.Popen(["sleep", "60"]))

    def test_shared_memory():
        with open("memory/forgotten", "w") as file:
            file.write("forgotten")

    def test_open_file():
        os.pipe()

    def test_after_all():
        pass
    """


def test_a_test_that_hangs_or_leaves_something_behind_fails_and_the_run_continues(small_suite: Path) -> None:
    result = run_suite(small_suite, HANGS_AND_LEAKS)

    assert result.returncode == 1, result.stdout
    assert "1 failed, 6 passed" in result.stdout
    assert "in a_worker_that_waits_for_ever" in result.stdout + result.stderr, "the stack of every thread"
    assert "worker.join()" in result.stdout
    for kind in ("thread", "process", "shared memory", "open file"):
        title = f"_ ERROR at teardown of test_{kind.replace(' ', '_')} _"
        assert re.search(rf"{title}.*\nthe test left behind:\n{kind} ", result.stdout), kind


IN_PROCESSES = """
    import os
    import time
    from pathlib import Path

    import pytest

    @pytest.fixture(scope="session")
    def process():
        return os.getpid()

    def test_that_fails(process, tmp_path):
        print("said by a process with", tmp_path.parent.name)
        assert not process

    def test_that_dies(process):
        run = Path(f"/proc/{os.getppid()}/stat")
        if os.fork() == 0:  # a process that has its connection, too, until all is over
            try:
                while run.read_text().split()[2] != "Z":
                    time.sleep(0.05)
            finally:
                os._exit(0)
        os.kill(process, 9)

    def test_in_the_next_process(process):
        assert process == os.getpid()

    def test_that_exits():
        pytest.exit("it would end the run")
    """


def test_several_processes_report_as_one_does_and_one_that_dies_is_replaced(small_suite: Path) -> None:
    dies_last = "import atexit, os\ndef test_dies_last(): atexit.register(os.kill, os.getpid(), 9)\n"
    (small_suite / "tests" / "test_first.py").write_text(f"{dies_last}def test_passes(): pass\n", "utf-8")

    result = run_suite(small_suite, IN_PROCESSES, "--processes=2")

    assert result.returncode == 1, result.stdout
    assert "said by a process with process-1" in result.stdout
    assert "test_that_dies _" in result.stdout
    assert (
        result.stdout.count("the process of this test ended with status -9") >= 2
    )  # one of them after its last test
    assert "it would end the run" in result.stderr
    assert "4 failed, 3 passed" in result.stdout


SKIPPED = """
    import pytest

    @pytest.mark.parametrize("size", [1])
    def test_on_a_rare_machine(size):
        pytest.skip("this machine is too common")

    def test_on_an_old_machine():
        pytest.skip("this machine is too new")

    def test_anywhere():
        pass
    """
RARE = "tests/test_small.py::test_on_a_rare_machine[1]: needs a rare machine"


@pytest.mark.parametrize(
    ("listed", "guarded", "status"),
    [
        pytest.param(
            f"{RARE}\ntests/test_small.py::test_*_old_*: needs an old machine", "1", 0, marks=pytest.mark.slow
        ),
        (f"{RARE}\ntests/test_small.py::test_anywhere: another test", "1", 1),
        pytest.param("tests/test_small.py::test_on_a_rare_machine[1]:", "1", 4, marks=pytest.mark.slow),
        pytest.param("", "0", 0, marks=pytest.mark.slow),
    ],
    ids=["listed, one by pattern", "one is not listed", "listed without reason", "not guarded"],
)
def test_a_skip_without_a_listed_reason_fails_the_run(
    small_suite: Path, listed: str, guarded: str, status: int
) -> None:
    (small_suite / "tests" / "skips.txt").write_text(listed, "utf-8")

    result = run_suite(small_suite, SKIPPED, PENSTOCK_FAIL_ON_SKIP=guarded)

    assert result.returncode == status, result.stdout + result.stderr
    _, _, unlisted = result.stdout.partition("skipped, but not listed")
    assert ("test_on_an_old_machine" in unlisted, "rare" in unlisted) == (status == 1, False)


def test_no_function_is_longer_than_a_reader_can_hold() -> None:
    """Docstring and comments included; compiled kernels, which numba takes whole, may be longer."""
    plain = [name for name in MODULES if not name.endswith("_kernels")]

    assert [function for name in plain for function in _outline(name)[1]] == []


def documented_modules() -> list[str]:
    reference = "".join(page.read_text("utf-8") for page in (REPOSITORY / "docs" / "reference").glob("*.md"))
    names = set(re.findall(r"^.*auto\w+::? ([\w.]+)$", reference, re.MULTILINE))
    documented = {name if name in IS_MODULE else name.rpartition(".")[0] for name in names} - {"penstock"}
    documented |= set(penstock._HOMES.values())
    parts = {home for name in documented for home in _outline(name)[0] if home.startswith(f"{name}.")}
    return sorted(documented | parts)


def test_no_documented_call_takes_more_than_a_configuration_should() -> None:
    """Fields of dataclasses, which are the configurations, are not counted."""
    # Its signature is that of PyTorch's.
    drop_in = "penstock.torch.dataloader.__init__, 18 arguments"
    assert [call for name in documented_modules() for call in _outline(name)[2]] == [drop_in]


def test_each_concept_has_one_word_in_documented_calls_and_fields() -> None:
    assert [odd for name in documented_modules() for odd in _outline(name)[3]] == []
