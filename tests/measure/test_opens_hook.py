"""The hook notes what Python opens, and the program that it runs in does not notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.for_each import for_each

from penstock.measure import opens_hook


def run(tmp_path: Path, program: str, *places: Path, **environment: str) -> tuple[str, list[list[str]]]:
    """Run a Python with the hook; return what it printed, and what was noted of files below tmp_path."""
    hook, log = tmp_path / "hook", tmp_path / "log"
    hook.mkdir(exist_ok=True)
    shutil.copyfile(opens_hook.__file__, hook / "sitecustomize.py")
    log.touch()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (hook, *places))),
            opens_hook.LOG: str(log),
            **environment,
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []
    noted = [[kind, size, json.loads(path)] for _, _, kind, size, path in lines]
    return done.stdout, [each for each in noted if each[2].startswith(str(tmp_path))]


def test_opens_are_noted_with_kind_size_and_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "é\n.bin").write_bytes(bytes(5_000))
    program = """
import os
open("é\\n.bin", "rb").close()
open(b"\\xc3\\xa9\\n.bin", "r+b").close()
os.close(os.open("new", os.O_WRONLY | os.O_CREAT))
with open("new", "x" if False else "a") as file:
    open(os.dup(file.fileno()), "a").close()  # a descriptor is no open
os.close(os.open(".", os.O_RDONLY))
try:
    open("missing")
except FileNotFoundError:
    print("still missing")
"""

    said, noted = run(tmp_path, program)

    name, new = str(tmp_path / "é\n.bin"), str(tmp_path / "new")
    assert noted == [["R", "5000", name], ["W", "0", name], ["W", "0", new], ["W", "0", new]]
    assert said == "still missing\n"


def test_forked_and_new_processes_are_noted_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(7))
    program = """
import os, subprocess, sys
if os.fork() == 0:
    open("a").close()
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", "open('a').close()"], check=True)
"""

    _, noted = run(tmp_path, program)

    assert noted == [["R", "7", str(tmp_path / "a")]] * 2


def test_a_program_that_closes_all_descriptors_does_not_get_notes_into_its_own_files(tmp_path: Path) -> None:
    """As daemons do: the number of the log's descriptor is then given to another file."""
    program = """
import os
os.closerange(3, 64)
files = [open("mine", "w") for _ in range(8)]
open("mine").close()
for file in files:
    file.close()
"""

    _, noted = run(tmp_path, program)

    assert [kind for kind, _, _ in noted] == ["W"] * 8 + ["R"]
    assert (tmp_path / "mine").read_text() == ""


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = __file__\n")

    said, _ = run(tmp_path, "import sys; print(customized, sys.modules['sitecustomize'].__file__)", own)

    assert said.split() == [str(own / "sitecustomize.py")] * 2


def test_a_log_that_cannot_be_written_is_not_the_programs_trouble(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone" / "log")

    said, noted = run(tmp_path, "print(open('x', 'w').write('well'))", **{opens_hook.LOG: gone})

    assert (said, noted) == ("4\n", [])


@for_each("module", ["torch", "numpy", "penstock", "json"])
def test_the_hook_loads_nothing_that_a_bare_python_does_not(tmp_path: Path, module: str) -> None:
    said, _ = run(tmp_path, f"import sys; print({module!r} in sys.modules)")

    assert said == "False\n"
