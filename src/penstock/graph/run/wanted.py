"""What a run asks for, as callers write it: fetches, targets and feeds as endpoints and nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.graph.errors import MismatchError, NotFoundError, nearest
from penstock.graph.model.dtypes import fits, shape_text, to_client, to_value
from penstock.graph.model.graph import Edge, Graph
from penstock.graph.model.node import Endpoint, Node, parse_endpoint


class Wanted(NamedTuple):
    """What a run fetches, each once; the nodes that run besides; and what it is fed."""

    endpoints: tuple[Endpoint, ...]
    operations: tuple[str, ...]
    fed: tuple[Endpoint, ...]


def wanted_of(
    graph: Graph, fetches: Any, feeds: Mapping[Any, Any] | None, targets: Sequence[Any]
) -> tuple[Wanted, list[Any], Callable[[Mapping[Endpoint, Any]], Any]]:
    """Return what a run asks for, copies of what it is fed, and what arranges values that were found as `fetches` are.

    Arguments: as of `Session.run`. Raises: NotFoundError, MismatchError.
    """
    listed, arrange = _arranged(fetches)
    places, operations = _asked(graph, listed, targets)
    fed, values = _fed_values(graph, {} if feeds is None else feeds)
    endpoints = dict.fromkeys(endpoint for endpoint in places if endpoint is not None)

    def results(found: Mapping[Endpoint, Any]) -> Any:
        return arrange([None if each is None else to_client(found[each]) for each in places])

    return Wanted(tuple(endpoints), tuple(operations), tuple(fed)), values, results


def _asked(
    graph: Graph, wanted: Sequence[Any], targets: Sequence[Any]
) -> tuple[list[Endpoint | None], list[str]]:
    """Return the endpoint of each fetch, None where it names an operation, and all operations that a run asks for.

    Raises: NotFoundError; MismatchError for a fetch that is no tensor.
    """
    scope = graph.scope
    places = [_endpoint_of(each) for each in wanted]
    operations = []
    targets = [targets] if isinstance(targets, str | Edge | Node) else targets
    for each, endpoint in zip(wanted, places, strict=True):
        if endpoint is None:
            operations.append(_name_of(each))
            continue
        spec = scope.find(endpoint)
        if spec is None:
            raise NotFoundError(f"fetch {str(endpoint)!r} is not there{nearest(endpoint.node, scope.nodes)}")
        if spec.kind not in ("tensor", "variable"):
            raise MismatchError(
                f"fetch {str(endpoint)!r} is a {spec.kind}, and no tensor", node=endpoint.node
            )
    operations += [_name_of(each) for each in targets]
    for name in operations:
        if name not in scope.nodes:
            raise NotFoundError(f"target {name!r} is not there{nearest(name, scope.nodes)}")
    return places, operations


def _fed_values(graph: Graph, feeds: Mapping[Any, Any]) -> tuple[list[Endpoint], list[Any]]:
    """Return the endpoints that are fed, and copies of what is. Raises: NotFoundError, MismatchError."""
    endpoints, values = [], []
    if not isinstance(feeds, Mapping):
        raise MismatchError(f"feeds are arrays by edge or text, and this is {feeds!r:.80}")
    for key, array in feeds.items():
        endpoint = key.endpoint if isinstance(key, Edge) else parse_endpoint(str(key))
        spec = graph.scope.find(endpoint)
        if spec is None:
            raise NotFoundError(f"feed {str(endpoint)!r} is not there{nearest(endpoint.node, graph.nodes)}")
        node = graph.nodes[endpoint.node]
        try:
            if spec.kind not in ("tensor", "variable"):
                raise MismatchError(f"its output is a {spec.kind}, which cannot be fed")
            value = to_value(array, spec.dtype)
            if not fits(spec.shape, tuple(value.shape)):
                raise MismatchError(
                    f"{shape_text(tuple(value.shape))} is fed, and its shape is {shape_text(spec.shape)}"
                )
        except MismatchError as error:
            raise MismatchError(error.text, node=node.name, where=node.where) from None
        if endpoint in endpoints:
            raise MismatchError("it is fed twice", node=node.name, where=node.where)
        endpoints.append(endpoint)
        values.append(value)
    return endpoints, values


def _endpoint_of(given: Any) -> Endpoint | None:
    """Return the endpoint that a fetch names, or None if it names an operation."""
    if isinstance(given, Edge):
        return given.endpoint
    if isinstance(given, Node):
        return None
    if isinstance(given, Endpoint):
        return given
    if not isinstance(given, str):
        raise MismatchError(f"a fetch is {given!r:.80}; give an edge, a node or a text")
    return parse_endpoint(given) if ":" in given else None


def _name_of(given: Any) -> str:
    if isinstance(given, Edge):
        return given.endpoint.node
    return given.name if isinstance(given, Node) else str(given).partition(":")[0]


def _arranged(fetches: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the fetches as a list, and what arranges their values as they are."""
    if isinstance(fetches, Mapping):
        return list(fetches.values()), lambda values: dict(zip(fetches, values, strict=True))
    if isinstance(fetches, list):
        return fetches, lambda values: values
    if isinstance(fetches, tuple) and not isinstance(fetches, Endpoint):
        return list(fetches), tuple
    return [fetches], lambda values: values[0]
