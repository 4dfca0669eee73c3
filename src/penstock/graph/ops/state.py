"""Operations on state that lives longer than a run: variables, saved tensors, records of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import DTYPES, FLOATS, INTEGERS, check_dtype, check_shape, fits, shape_text
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.arrays import integer
from penstock.graph.ops.elementwise import NUMBERS, tensor_of
from penstock.graph.ops.registry import REQUIRED, register

SHARED = {"container": "", "shared_name": ""}


def _infer_variable(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    check_texts(node)
    return [Spec(check_dtype(node.attr["dtype"]), check_shape(node.attr.get("shape")), "variable")]


def check_texts(node: Node) -> None:
    """Raise MismatchError unless container and shared_name are texts."""
    for name in SHARED:
        if not isinstance(node.attr.get(name, ""), str):
            raise MismatchError(f"{name} is {node.attr[name]!r:.80}; give a text")


register(
    "Variable",
    _infer_variable,
    kind="state",
    attributes={"dtype": REQUIRED, "shape": None, **SHARED},
    kernels={"cpu": lambda node, resources: lambda: resources.variable(node)},
    flops=None,
)


def handle_of(specs: Sequence[Spec], what: str, kind: str) -> Spec:
    """Return the spec of a handle that an operation takes first. Raises: MismatchError if it is of another kind."""
    if specs[0].kind != kind:
        raise MismatchError(f"the first input of {what} is a {kind}, and this is {specs[0]}")
    return specs[0]


def _infer_read(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [handle_of(specs, "Read", "variable").value()]


def _infer_assign(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    variable, value = handle_of(specs, node.op, "variable"), specs[1]
    tensor_of(value, DTYPES if node.op == "Assign" else NUMBERS, node.op)
    if value.dtype != variable.dtype:
        raise MismatchError(f"the variable holds {variable.dtype}, and the value is {value}")
    if not fits(variable.shape, value.shape):
        raise MismatchError(f"the variable has shape {shape_text(variable.shape)}, and the value is {value}")
    return [Spec(value.dtype, variable.shape if value.shape is None else value.shape)]


def _read(variable: Any) -> Any:
    """Return the value of a variable, or what was fed in its place."""
    return variable.read() if hasattr(variable, "read") else variable


register(
    "Read",
    _infer_read,
    kind="state",
    inputs=(1, 1),
    kernels={"cpu": lambda node, resources: _read},
    handles=True,
    flops=None,
)
register(
    "Assign",
    _infer_assign,
    kind="state",
    inputs=(2, 2),
    kernels={"cpu": lambda node, resources: lambda variable, value: variable.assign(value)},
    handles=True,
)
register(
    "AssignAdd",
    _infer_assign,
    kind="state",
    inputs=(2, 2),
    kernels={"cpu": lambda node, resources: lambda variable, value: variable.assign_add(value)},
    handles=True,
)


# -- Save, Restore -------------------------------------------------------------------------------------


def _path(node: Node) -> str:
    path = node.attr["path"]
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise MismatchError(f"path is {path!r:.80}; give the folder of the saved tensors")
    return os.fspath(path)


def _infer_save(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    _path(node)
    names = node.attr["names"]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise MismatchError(f"names is {names!r:.80}; give a list of texts, one for each input")
    if len(names) != len(specs) or len(set(names)) != len(names):
        raise MismatchError(f"{len(specs)} inputs need as many different names, and these are {names!r:.80}")
    for spec in specs:
        tensor_of(spec, DTYPES, "Save")
    return []


def _save(node: Node, resources: Any) -> Any:
    path, names, dtypes = _path(node), list(node.attr["names"]), resources.input_dtypes(node)

    def kernel(*values: Any) -> tuple[()]:
        resources.save_tensors(path, dict(zip(names, zip(dtypes, values, strict=True), strict=True)))
        return ()

    return kernel


def _infer_restore(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    _path(node)
    if not isinstance(node.attr["tensor"], str):
        raise MismatchError(f"tensor is {node.attr['tensor']!r:.80}; give the name it was saved under")
    return [Spec(check_dtype(node.attr["dtype"]), None)]


def _restore(node: Node, resources: Any) -> Any:
    path = _path(node)
    return lambda: resources.restore_tensor(path, node.attr["tensor"], node.attr["dtype"])


register(
    "Save",
    _infer_save,
    kind="state",
    inputs=(1, None),
    attributes={"names": REQUIRED, "path": REQUIRED},
    kernels={"cpu": _save},
)
register(
    "Restore",
    _infer_restore,
    kind="state",
    attributes={"tensor": REQUIRED, "dtype": REQUIRED, "path": REQUIRED},
    kernels={"cpu": _restore},
)


# -- Readers -------------------------------------------------------------------------------------------


def _infer_reader(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    files = node.attr["files"]
    if not isinstance(files, list | tuple) or not all(isinstance(file, str | os.PathLike) for file in files):
        raise MismatchError(f"files is {files!r:.80}; give a list of paths")
    if node.op == "FixedRecords":
        integer(node, "record_bytes", 1)
    return [Spec("bytes", ())]


def _infer_rows(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    _infer_reader(node, specs)
    columns, delimiter = node.attr["columns"], node.attr.get("delimiter", ",")
    if (
        not isinstance(columns, list | tuple)
        or not columns
        or not set(columns) <= {*FLOATS, *INTEGERS, "bytes"}
    ):
        raise MismatchError(f"columns is {columns!r:.80}; give a list of dtypes: numbers, or bytes")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n' or ord(delimiter) > 255:
        raise MismatchError(f"delimiter is {delimiter!r:.80}; give one character, such as a comma")
    if "skip_lines" in node.attr:
        integer(node, "skip_lines", 0)
    return [Spec(column, ()) for column in columns]


_ROWS = {"columns": REQUIRED, "delimiter": ",", "skip_lines": 0}
for _name, _infer, _more in (
    ("TFRecords", _infer_reader, {}),
    ("TextLines", _infer_reader, {}),
    ("CSVRows", _infer_rows, _ROWS),
    ("FixedRecords", _infer_reader, {"record_bytes": REQUIRED}),
):
    register(
        _name,
        _infer,
        kind="state",
        attributes={"files": REQUIRED, **_more},
        # Looked up in each run: `Session.restore` replaces it.
        kernels={"cpu": lambda node, resources: lambda: resources.reader(node).read()},
    )
