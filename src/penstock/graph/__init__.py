"""The dataflow engine: reading, computing and saving as one graph, run over PyTorch's kernels.

model/   what a graph is: types, nodes, JSON, the checks that let a node in, how programs build one
ops/     the operations and their kernels
run/     sessions: lowering, merging, regions, the executor
state/   variables, queues, mutexes, readers, and their saving
grad/    gradients of any order, as nodes
tools/   placement, drawings, import of modules, event files
workers/ sessions whose nodes run on several processes and machines
"""

from penstock.graph.errors import (
    CancelledError,
    CorruptError,
    CycleError,
    DeadFetchError,
    DuplicateError,
    GraphError,
    InfeasibleError,
    KernelError,
    MismatchError,
    MissingFeedError,
    NotFoundError,
    OutOfRangeError,
    UninitializedError,
    UnknownOperationError,
    UnsupportedError,
    VersionError,
    WorkerLostError,
)
from penstock.graph.grad.gradients import gradients
from penstock.graph.model.graph import Edge, Graph
from penstock.graph.model.node import Endpoint, Node, Subgraph
from penstock.graph.ops.table import operations
from penstock.graph.run.session import Session
from penstock.graph.run.statistics import Statistics
from penstock.graph.state.containers import reset_container
from penstock.graph.state.readers import write_tfrecords
from penstock.graph.tools.comparing import PartDifference, changed_variables, compare_parts
from penstock.graph.tools.drawing import to_dot
from penstock.graph.tools.lossy import from_upper_half, to_upper_half
from penstock.graph.tools.modules import add_module
from penstock.graph.tools.placing import place_graph
from penstock.graph.tools.samples import SampleReader
from penstock.graph.tools.summaries import event_file, parameter_counts
from penstock.policy.graph_placement import Devices

__all__ = [
    "CancelledError",
    "CorruptError",
    "CycleError",
    "DeadFetchError",
    "Devices",
    "DuplicateError",
    "Edge",
    "Endpoint",
    "Graph",
    "GraphError",
    "InfeasibleError",
    "KernelError",
    "MismatchError",
    "MissingFeedError",
    "Node",
    "NotFoundError",
    "OutOfRangeError",
    "PartDifference",
    "SampleReader",
    "Session",
    "Statistics",
    "Subgraph",
    "UninitializedError",
    "UnknownOperationError",
    "UnsupportedError",
    "VersionError",
    "WorkerLostError",
    "add_module",
    "changed_variables",
    "compare_parts",
    "event_file",
    "from_upper_half",
    "gradients",
    "operations",
    "parameter_counts",
    "place_graph",
    "reset_container",
    "to_dot",
    "to_upper_half",
    "write_tfrecords",
]
