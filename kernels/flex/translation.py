"""Functions of scores and places written with torch, as kernels trace them.

FlexAttention's `score_mod` and `mask_mod` compute with tensors without dimensions. `translated` runs one of them once
on stand-ins for these, which records torch's operations, and makes a `Program` of them: what a kernel traces instead.
Tensors that a function captures become auxiliary tensors of the call. What it computes from those alone, such as
`slopes.exp()`, is computed by torch in every call, so that it follows their values and has gradients.
"""

from __future__ import annotations

import math
import operator
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fly.errors import ArgumentTypeError, UnsupportedError

from ..arguments.checks import Checks
from ..problem.mods import Mod, dependencies
from .operations import CONSTANTS, DTYPES, OPERATIONS, listed
from .program import LOAD, Number, Program, Ref, Step

CHECKS = Checks("flex_attention")
OPTIONS = ("alpha", "rounding_mode")  # keyword arguments that a result depends on, beside its type


@dataclass(frozen=True)
class Translation:
    """A `Program`, and how a call's auxiliary tensors for it are made: nodes of a recorded graph, in order.

    `moved`: the program behind other auxiliary tensors, by their number.
    """

    program: Program
    graph: torch.fx.GraphModule
    tensors: tuple[torch.fx.Node, ...]
    moved: dict[int, Program] = field(default_factory=dict, compare=False)

    def aux_tensors(self, what: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Of a call on `device`, of what the function captures now; errors call the function `what`."""
        known: dict[torch.fx.Node, Any] = {}

        def value(node: torch.fx.Node) -> Any:
            if node not in known:
                if node.op == "get_attr":
                    known[node] = operator.attrgetter(str(node.target))(self.graph)
                else:
                    given = torch.fx.node.map_arg((node.args, node.kwargs), value)
                    known[node] = node.target(*given[0], **given[1])  # type: ignore[operator]  # a call_function's
            return known[node]

        return tuple(_as_aux(what, value(node), device) for node in self.tensors)

    def behind(self, tensors: int) -> Program:
        """The program of a call that has so many other auxiliary tensors before."""
        if tensors not in self.moved:
            self.moved[tensors] = replace(self.program, first=tensors)
        return self.moved[tensors]


def _as_aux(what: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device != device:
        CHECKS.fail(f"{what} loads from a tensor on {tensor.device}: move it to query's device {device}")
    tensor = tensor.view(torch.int8) if tensor.dtype is torch.bool else tensor
    return tensor if tensor.dim() else tensor.view(1)


_known_translations: weakref.WeakKeyDictionary[Any, tuple[Any, Translation]] = weakref.WeakKeyDictionary()
# what cannot change behind a function's back
_LASTING = (int, float, bool, str, type(None), torch.Tensor, torch.dtype, torch.device, types.FunctionType, tuple)
_LASTING_MODULES = ("torch", "math", "builtins", "operator", "typing")


def translated(function: Any, is_mask: bool, what: str, device: torch.device) -> Translation:
    """A function of FlexAttention: of a score, or a mask (`is_mask`), both of (batch, head, query, key) behind it.

    It is recorded once, as long as all that it captures are numbers, tensors and functions; else in every call.

    Raises:
        ArgumentTypeError: it is no function, or returns no tensor or number without dimensions.
        UnsupportedError: it reads a value on the host, or uses an operation that is not translated.
    """
    if not callable(function):
        CHECKS.fail(f"{what} must be a function, got {function!r} ({type(function).__name__})", ArgumentTypeError)
    identity = Mod.of(function).identity
    lasting = isinstance(function, types.FunctionType) and identity is not function
    if not (lasting and all(_lasts(x) for _, x in dependencies(function))):
        return _translate(function, is_mask, what, device)
    found = _known_translations.get(function)
    if found is None or not _same(found[0], (identity, is_mask)):
        found = (identity, is_mask), _translate(function, is_mask, what, device)
        _known_translations[function] = found
    return found[1]


def _same(a: Any, b: Any) -> bool:
    """Whether two identities are one; tensors are by being the same object."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    return bool(a == b)


def _lasts(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in _LASTING_MODULES
    if isinstance(value, type | types.BuiltinFunctionType):
        return (value.__module__ or "builtins").split(".")[0] in _LASTING_MODULES
    return type(value) in _LASTING or isinstance(value, torch.Tensor)


class _Indexing(torch.overrides.TorchFunctionMode):
    """`table[head, query - key]` as one operation: torch would read the numbers on the host to make a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, index = args
        index = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(i, torch.Tensor) and not i.dim() for i in index):
            return func(*args)
        places: list[torch.Tensor] = []
        for i in index:
            if isinstance(i, torch.Tensor) and not i.dim() and i.dtype is not torch.bool:
                places.append(i)
            elif isinstance(i, int) and not isinstance(i, bool):
                tensor = tensor.select(len(places), i)
            else:
                CHECKS.fail(f"an index {i!r} beside a place; accepted: integers and places", UnsupportedError)
        return torch.ops.aten.index(tensor, places)


def _translate(function: Any, is_mask: bool, what: str, device: torch.device) -> Translation:
    graph = _recorded(function, is_mask, what, device, {})
    if unknown := _unknown(graph):  # of simpler ones, where torch says how
        simpler = _recorded(function, is_mask, what, device, torch._decomp.get_decompositions([*unknown]))
        graph = graph if _unknown(simpler) else simpler
    return _Translator(graph, is_mask, what).translation()


def _unknown(graph: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in _traced(graph) if str(node.target) not in _TRANSLATED}


def _recorded(
    function: Any, is_mask: bool, what: str, device: torch.device, decompositions: Mapping[Any, Any]
) -> torch.fx.GraphModule:
    def called(*given: torch.Tensor) -> Any:
        with _Indexing():
            return function(*given)

    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            places = [torch.empty((), dtype=torch.int32, device=device) for _ in range(4)]
            given = places if is_mask else [torch.empty((), device=device), *places]
            graph: torch.fx.GraphModule = make_fx(called, decomposition_table=decompositions)(*given)
    except DataDependentOutputException as error:
        raise UnsupportedError(
            f"flex_attention: {what} reads a number of a score or place on the host (if, and, or, int(), .item()): "
            "use torch.where, & and |"
        ) from error
    graph.graph.eliminate_dead_code()
    return graph


def _traced(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The operations on what a kernel alone knows."""
    inside: set[torch.fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            inside.add(node)
        elif node.op == "call_function" and inside & {*node.all_input_nodes}:
            inside.add(node)
            yield node


class _Translator:
    """Makes a `Program` of a recorded graph."""

    def __init__(self, graph: torch.fx.GraphModule, is_mask: bool, what: str) -> None:
        self.graph, self.is_mask, self.what = graph, is_mask, what
        self.arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.places: dict[torch.fx.Node, Ref] = {node: Ref(i) for i, node in enumerate(self.arguments)}
        self.numbers: dict[torch.fx.Node, Number] = {}
        self.tensors: dict[torch.fx.Node, int] = {}
        self.views: dict[torch.fx.Node, tuple[torch.fx.Node, tuple[Any, ...]]] = {}
        self.steps: list[Step] = []

    def translation(self) -> Translation:
        """Of the whole graph."""
        for node in _traced(self.graph):
            self._add(node)
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        (result,) = output.args
        if not isinstance(result, torch.fx.Node | int | float) or _shape(result):
            CHECKS.fail(f"{self.what} must return a number of its own for a score, got {result!r}", ArgumentTypeError)
        if self.is_mask and isinstance(result, torch.fx.Node) and _dtype(result) is not torch.bool:
            CHECKS.fail(f"{self.what} must return a bool, got {_dtype(result)}", ArgumentTypeError)
        value = self._operand(result)  # which may be a step of its own
        program = Program(len(self.arguments), tuple(self.steps), value, self.is_mask)
        return Translation(program, self.graph, tuple(self.tensors))

    def _add(self, node: torch.fx.Node) -> None:
        name = str(node.target)
        if name in CONSTANTS and not _shape(node):
            self.numbers[node] = _number(CONSTANTS[name](*node.args))
        elif name == "aten.index.Tensor":
            self._index(node)
        elif name == "aten.select.int" and node.args[0] in self.views:
            self._select(node)
        elif name not in OPERATIONS or _shape(node):
            self._refuse(node)
        else:
            operands = tuple(self._operand(x) for x in node.args if not isinstance(x, list | tuple))
            options = tuple((key, self._operand(x)) for key, x in node.kwargs.items() if key in OPTIONS)
            self._append(node, Step(name, operands, options, self._type(node), self._met(node)))

    def _append(self, node: torch.fx.Node, step: Step) -> None:
        self.places[node] = Ref(len(self.arguments) + len(self.steps))
        self.steps.append(step)

    def _index(self, node: torch.fx.Node) -> None:
        source, given = node.args
        assert isinstance(source, torch.fx.Node) and isinstance(given, list | tuple)
        tensor, before = self.views.get(source, (source, ()))
        if tensor in self.places or any(not isinstance(i, torch.fx.Node) or _shape(i) for i in given):
            self._refuse(node)
        self._element(node, tensor, (*before, *given))

    def _select(self, node: torch.fx.Node) -> None:
        source, dim, index = node.args
        tensor, before = self.views[source]  # type: ignore[index]  # it is one of them
        if dim != 0:
            self._refuse(node)
        self._element(node, tensor, (*before, index))

    def _element(self, node: torch.fx.Node, tensor: torch.fx.Node, indices: tuple[Any, ...]) -> None:
        """Of a tensor, or with fewer indices than it has dimensions a part that more will be taken of."""
        if _shape(node):
            self.views[node] = tensor, indices
            return
        number = self.tensors.setdefault(tensor, len(self.tensors))
        # a place itself is never negative
        wraps = tuple(not (isinstance(i, torch.fx.Node) and i.op == "placeholder") for i in indices)
        operands = tuple(self._operand(i) for i in indices)
        self._append(node, Step(LOAD, (number, *operands), (), self._type(node), "i32", wraps))

    def _operand(self, x: Any) -> Any:
        """What a step takes for an argument of a node: a traced value, a number, or None."""
        if not isinstance(x, torch.fx.Node):
            return _number(x) if isinstance(x, int | float) else x if isinstance(x, str) else None
        if x in self.numbers:
            return self.numbers[x]
        if x not in self.places:
            self._outside(x)
        return self.numbers.get(x) or self.places[x]

    def _outside(self, node: torch.fx.Node) -> None:
        """A number that does not depend on a score: one written in the function, or a tensor's only element."""
        name = str(node.target)
        if name in CONSTANTS and not _shape(node):
            self.numbers[node] = _number(CONSTANTS[name](*node.args))
        elif name == "aten.lift_fresh_copy.default" and not _shape(node):
            (literal,) = node.all_input_nodes
            self.numbers[node] = _number(operator.attrgetter(str(literal.target))(self.graph).item())
        elif _shape(node):
            self._refuse(node, f"takes all of a tensor of shape {_shape(node)} for a score")
        else:
            number = self.tensors.setdefault(node, len(self.tensors))
            self._append(node, Step(LOAD, (number,), (), self._type(node), "i32"))

    def _type(self, node: torch.fx.Node) -> str:
        dtype = _dtype(node)
        if dtype not in DTYPES:
            accepted = ", ".join(map(str, DTYPES))
            CHECKS.fail(f"{self.what} computes with {dtype}; accepted: {accepted}", UnsupportedError)
        return DTYPES[dtype].name

    def _met(self, node: torch.fx.Node) -> str:
        """The type in which an operation's operands meet."""
        given = [_value(x) if isinstance(x, torch.fx.Node) else x for x in node.args]
        values: list[Any] = [x for x in given if isinstance(x, torch.Tensor | int | float)]
        dtype = values[0].dtype if len(values) == 1 else torch.result_type(*values[:2])
        return DTYPES[dtype].name if dtype in DTYPES else "f32"

    def _refuse(self, node: torch.fx.Node, why: str = "") -> NoReturn:
        shape = f" with a result of shape {_shape(node)}" if _shape(node) else ""
        why = why or f"uses {node.target}{shape}"
        CHECKS.fail(
            f"{self.what} {why}, which is not translated; accepted: elements of tensors by index, and of numbers "
            f"{listed()}",
            UnsupportedError,
        )


_TRANSLATED = {*OPERATIONS, *CONSTANTS, "aten.index.Tensor", "aten.select.int"}


def _value(node: torch.fx.Node) -> Any:
    return node.meta.get("val")


def _shape(x: Any) -> tuple[int, ...]:
    value = _value(x) if isinstance(x, torch.fx.Node) else x
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _dtype(node: torch.fx.Node) -> torch.dtype:
    dtype: torch.dtype = _value(node).dtype
    return dtype


def _number(value: Any) -> Number:
    return Number(repr(math.nan if value != value else value))  # NaN
