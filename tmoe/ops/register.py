"""Registers an op with torch: its schema, kernels, fake and gradients; also makes a call without dispatcher.

`register_differentiable` registers an op and the op of its gradients. The names in both schemas determine the
tensors kept for backward, and the arguments of its gradients. `register` registers one op with a given rule.

An op of many arguments has a NamedTuple in place of a schema, and its functions get that one value. torch
passes separate arguments, which only `taking` converts into the value.

`collect` keeps the traces of an op's kernels, which are compiled before training (commands/warmup.py): each
registration takes `traces` for it, and a file whose kernels are launched without an op of torch calls it.

`on_any_device` registers a function that is the op on every device, such as an exchange between ranks. Its
annotations are the schema.

They use Library.define and not @custom_op: the decorator's own checks take 0.3 ms a call on the host, as long
as a whole forward.

next: experts/op.py
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from tmoe.base.private_torch import find
from tmoe.ops.argument_checks import check_tensors, require
from tmoe.ops.launch.eager import no_second_derivative, unwatched

R = TypeVar("R")

lib = torch.library.Library("tmoe", "FRAGMENT")
# torch.compiler.disable would import the compiler at once
_not_compiled: Callable = find("torch._disable_dynamo") or torch.compiler.disable

# the type of an argument in Python, and in the schema language of torch.library
TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
}


# Functions from shapes to [(trace, *arguments)] for precompile, by the type of shapes and the op's name.
Traces = Callable[[Any], Iterable[tuple]]
_collected: dict[type, dict[str, Traces]] = {}


def collect(name: str, traces: Mapping[type, Traces]) -> None:
    """Keep the traces of an op's kernels.

    Args:
        name: name of the op; ValueError if it has traces already.
        traces: for each type of ops/launch/shapes.py that uses the op, a function from a value of that type
            to traces.
    """
    for kind, launched in traces.items():
        known = _collected.setdefault(kind, {})
        require(name not in known, f"traces of {kind.__name__}", name, "one registration for each op")
        known[name] = launched


def traces_of(shapes: Any) -> list[tuple]:
    """The traces of all ops of tmoe for `shapes`, a value of ops/launch/shapes.py; each trace once."""
    _import_ops()
    by_name = sorted(_collected.get(type(shapes), {}).items())
    return list(dict.fromkeys(trace for _, traces in by_name for trace in traces(shapes)))


@cache
def _import_ops() -> None:
    """Import every file of tmoe.ops, and with it its registrations."""
    package = importlib.import_module("tmoe.ops")
    for module in pkgutil.walk_packages(package.__path__, "tmoe.ops."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if not (error.name or "").startswith("triton"):  # a triton without gluon has no such kernels
                raise


def flat(schema: str | type, results: int) -> str:
    """The schema string of an op whose arguments are the fields of a NamedTuple. Its results are tensors.

    schema: the NamedTuple, or a string, which is returned.
    results: number of results.
    """
    if isinstance(schema, str):
        return schema
    fields = [f"{TYPES[kind]} {name}" for name, kind in get_type_hints(schema).items()]
    returned = ", ".join(["Tensor"] * results)
    return f"({', '.join(fields)}) -> {returned if results == 1 else f'({returned})'}"


def taking(schema: str | type, run: Callable) -> Callable:
    """A kernel with separate arguments from `run`, whose only argument is the NamedTuple `schema`.

    schema: the NamedTuple; if it is a string, `run` has separate arguments and is returned.
    """
    return run if isinstance(schema, str) else lambda *arguments: run(schema(*arguments))


def register(
    name: str,
    schema: str | type,
    *,
    results: int = 1,
    cpu: Callable | None,
    cuda: Callable,
    fake: Callable,
    save: Callable | None = None,
    differentiate: Callable = no_second_derivative,
    traces: Mapping[type, Traces] | None = None,
) -> None:
    """Register tmoe::name.

    Args:
        schema: "(arguments) -> results", in the schema language of torch.library; or a NamedTuple of the
            arguments, which cpu, cuda and fake then get as one value.
        results: with a NamedTuple, the number of tensors that are returned.
        cpu, cuda: compute the results on such a device; cpu: None if the op runs only on a GPU.
        fake: returns tensors of the results' shapes and types, for tracing.
        save, differentiate: setup_context and backward of torch.library.register_autograd. Without them the
            op has no derivative, which is right for an op that computes gradients itself.
        traces: what it launches on a GPU, see `collect`.
    """
    collect(name, traces or {})
    lib.define(name + flat(schema, results), tags=torch.Tag.pt2_compliant_tag)
    if cpu is not None:
        lib.impl(name, taking(schema, cpu), "CPU")
    lib.impl(name, taking(schema, cuda), "CUDA")
    torch.library.register_fake(f"tmoe::{name}", taking(schema, fake), lib=lib)
    torch.library.register_autograd(f"tmoe::{name}", differentiate, setup_context=save, lib=lib)


def on_any_device(
    name: str,
    *,
    fake: Callable[..., R],
    save: Callable | None = None,
    differentiate: Callable = no_second_derivative,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator: register a function as tmoe::name for CPU and GPU, and return the op in its place.

    The function's annotations are the schema. Its results must not be views of its arguments. The compiler
    does not look into it, not even where the op runs between two compiled graphs.

    Args:
        fake, save, differentiate: as for `register`. fake has the function's parameters.
    """

    def decorate(run: Callable[..., R]) -> Callable[..., R]:
        schema = torch.library.infer_schema(run, mutates_args=())
        kernel = _not_compiled(run)
        register(name, schema, cpu=kernel, cuda=kernel, fake=fake, save=save, differentiate=differentiate)
        return getattr(torch.ops.tmoe, name).default

    return decorate


class Backward(NamedTuple):
    """The op that computes an op's gradients, which is registered as NAME_backward.

    Its first argument is the gradient of the op's first result. All further arguments have the names of
    arguments or results of the op, which are kept for backward: first a tensor that is never None, then
    other tensors, then arguments that are not tensors.
    """

    schema: str | type  # as for `register`
    gradients: str  # names of the op's arguments whose gradients are the results
    cpu: Callable  # cpu and cuda may return None as the gradient of an argument that is None
    cuda: Callable


def register_differentiable(
    name: str,
    schema: str | type,
    returns: str,
    *,
    keeps: str = "",
    cpu: Callable,
    cuda: Callable,
    fake: Callable,
    backward: Backward,
    traces: Mapping[type, Traces] | None = None,
) -> type[torch.autograd.Function]:
    """Register tmoe::name and tmoe::name_backward.

    Args:
        schema: as for `register`.
        returns, keeps: names of the op's results: first the results for its caller, then for backward alone.
        cpu, cuda, fake: as for `register`; cuda runs with the first argument's GPU current.
        traces: as for `register`, for both ops.

    Returns the op on a GPU without torch's dispatcher, for calls that are `unwatched`. It returns only the
    results for the caller; `run` and `run_backward` are its kernels.
    """
    names = [*returns.split(), *keeps.split()]
    flat_schema = flat(schema, len(names))
    flat_backward = flat(backward.schema, len(backward.gradients.split()))
    rule = _Rule(flat_schema, names, flat_backward, backward.gradients)
    run = _with_gpu_of(0, taking(schema, cuda))
    run_backward = _with_gpu_of(1, taking(backward.schema, backward.cuda))

    register(
        f"{name}_backward",
        flat_backward,
        cpu=_without_none(taking(backward.schema, backward.cpu)),
        cuda=_without_none(run_backward),
        fake=rule.fake_backward,
    )
    registered_backward = getattr(torch.ops.tmoe, f"{name}_backward")

    def differentiate(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        return rule.gradients(ctx, gradient, registered_backward)

    register(
        name,
        flat_schema,
        cpu=taking(schema, cpu),
        cuda=run,
        fake=taking(schema, fake),
        save=rule.save,
        differentiate=differentiate,
        traces=traces,
    )

    seen = len(returns.split())

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            results = _tuple(Straight.run(*inputs))
            rule.save(ctx, inputs, results)
            return results[0] if seen == 1 else results[:seen]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
            # False: the gradient is batched, counted or compiled, or will be differentiated again
            alone = gradient is not None and unwatched(gradient) and not torch.is_grad_enabled()
            return rule.gradients(ctx, gradient, Straight.run_backward if alone else registered_backward)

    Straight.run = staticmethod(run)
    Straight.run_backward = staticmethod(run_backward)
    return Straight


class _Rule:
    """Keeps the arguments of a call's backward, and assigns its gradients to the op's arguments, by names."""

    def __init__(self, schema: str, results: list[str], backward: str, gradients: str) -> None:
        """Reads the names.

        schema, backward: schemas of the op and of the op of its gradients.
        results: names of the op's results.
        gradients: see `Backward`.
        """
        names = [name for _, name in _arguments(schema)]
        (_, self.incoming), *kept = _arguments(backward)
        places = {name: i for i, name in enumerate([*names, *results])}
        self.arguments = len(names)
        self.tensors = _picker([places[name] for kind, name in kept if kind.startswith("Tensor")])
        self.others = _picker([places[name] for kind, name in kept if not kind.startswith("Tensor")])
        self.places = [places[name] for name in gradients.split()]
        kept_names = [name for _, name in kept]
        self.like = [kept_names.index(name) for name in gradients.split()]

    def save(self, ctx: Any, inputs: tuple, output: Any) -> None:
        """The setup_context: keeps the arguments of the backward op."""
        every = (*inputs, *_tuple(output))
        ctx.others = self.others(every)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.tensors(every))

    def gradients(self, ctx: Any, gradient: Tensor | None, run: Callable) -> tuple[Tensor | None, ...]:
        """The gradient of each of the op's arguments; run: the backward op."""
        by_argument: list[Tensor | None] = [None] * self.arguments
        if gradient is None:
            return tuple(by_argument)
        check_tensors(**{self.incoming: gradient})
        # saved_tensors is read only once, because a checkpoint recomputes at each access
        results = _tuple(run(gradient, *ctx.saved_tensors, *ctx.others))
        needed = ctx.needs_input_grad
        for i, result in zip(self.places, results, strict=True):
            if needed[i]:
                by_argument[i] = result
        return tuple(by_argument)

    def fake_backward(self, gradient: Tensor, *kept: Any) -> Any:
        """The fake of the backward op: a gradient has its argument's shape, and is empty for None."""
        return _bare(
            tuple(
                kept[0].new_empty(0) if kept[i] is None else kept[i].new_empty(kept[i].shape)
                for i in self.like
            )
        )


def _arguments(schema: str) -> list[tuple[str, str]]:
    """(type, name) of each argument."""
    inside = schema[1 : schema.index(")")]
    return [(kind, name) for kind, name in (argument.split() for argument in inside.split(","))]


def _picker(places: list[int]) -> Callable[[tuple], tuple]:
    """A function that returns a tuple's elements at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda every: tuple(every[i] for i in places)


def _tuple(results: Any) -> tuple:
    """An op's results as a tuple, which a single result is not."""
    return results if type(results) is tuple else (results,)


def _bare(results: tuple) -> Any:
    """Results as an op returns them: a single result without a tuple."""
    return results if len(results) > 1 else results[0]


def _with_gpu_of(at: int, run: Callable) -> Callable:
    """`run` with the GPU of its argument number `at` as the current device."""

    def run_there(*args: Any) -> Any:
        with torch.cuda.device(args[at].device):
            return run(*args)

    return run_there


def _without_none(run: Callable) -> Callable:
    """A backward op's kernel that returns an empty tensor for None: a registered op must return tensors."""

    def filled(*args: Any) -> Any:
        return _bare(tuple(args[1].new_empty(0) if t is None else t for t in _tuple(run(*args))))

    return filled
