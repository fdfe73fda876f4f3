"""How the innermost arguments of a compiled region are found again in the region's own arguments.

Owns what a compilation assumed about its arguments (types, sizes, strides, relations between
symbolic sizes) in a form that can be written to a file, the check of a later call against it, and
the list that the compiled code takes. Does not own the code. Data flow: the compiler's example
inputs and the first call make a `Binding`; each later call asks it for the innermost arguments.

Dynamo makes the same checks from guards, which do not outlive the process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from decodegrid.capture.code_sizes import parse_expression

Size = int | str | None
"""A number; an expression over symbols, as text; or None where any number will do."""


class BindingError(ValueError):
    """A compilation depends on something that a binding cannot describe."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a compilation assumed about one tensor."""

    dtype: str
    device: str
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]


Part = Literal["tensor", "size", "stride", "offset"]


@dataclass(frozen=True, slots=True)
class InnerSource:
    """Where one innermost argument comes from: a leaf, or a number that is part of its layout."""

    leaf: int
    part: Part = "tensor"
    dim: int = 0
    """Dimension of a size or stride."""

    def of(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The argument in a call."""
        leaf = leaves[self.leaf]
        match self.part:
            case "tensor":
                return leaf
            case "size":
                return leaf.shape[self.dim]
            case "stride":
                return leaf.stride(self.dim)
            case "offset":
                return leaf.storage_offset()


def flatten(args: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Structure and leaves of a call: -1 for a single argument, n for a list or tuple of n."""
    structure: list[int] = []
    leaves: list[Any] = []
    for arg in args:
        if isinstance(arg, (list, tuple)):
            structure.append(len(arg))
            leaves.extend(arg)
        else:
            structure.append(-1)
            leaves.append(arg)
    return tuple(structure), leaves


@dataclass(frozen=True, slots=True)
class Binding:
    """The assumptions of one compilation and the way to its innermost arguments."""

    structure: tuple[int, ...]
    leaves: tuple[TensorFacts, ...]
    inputs: tuple[InnerSource, ...]
    guards: tuple[str, ...]
    """Relations between symbols, as text."""
    _checked: dict[tuple[int, ...], bool] = field(default_factory=dict, compare=False, repr=False)
    _leaf_checks: list["_LeafCheck"] = field(default_factory=list, compare=False, repr=False)
    """One for each leaf; made by the first call."""

    def bind(self, args: Sequence[Any]) -> list[Any] | None:
        """The innermost arguments of a call, or None where the compilation does not fit it."""
        structure, leaves = flatten(args)
        if structure != self.structure:
            return None
        sizes: dict[str, int] = {}
        later: list[tuple[str, int]] = []
        if not self._leaf_checks:
            self._leaf_checks.extend(map(_LeafCheck.of, self.leaves))
        for leaf, check in zip(leaves, self._leaf_checks, strict=True):
            if check.known.get(id(leaf)) is leaf:
                continue
            if not isinstance(leaf, torch.Tensor) or not check.fits(leaf, sizes, later):
                return None
        key = (*sizes.values(), *(value for _, value in later))
        if key not in self._checked:
            self._checked[key] = all(
                parse_expression(text).value(sizes) == value for text, value in later
            ) and all(bool(parse_expression(text).value(sizes)) for text in self.guards)
        if not self._checked[key]:
            return None
        inner: list[Any] = []
        for source in self.inputs:
            if source.part == "tensor":
                inner.append(leaves[source.leaf])
                continue
            inner.append(source.of(leaves))
            if source.part == "offset" and inner[-1] < 2:
                return None
        return inner

    def as_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "structure": list(self.structure),
            "leaves": [
                [facts.dtype, facts.device, list(facts.sizes), list(facts.strides)]
                for facts in self.leaves
            ],
            "inputs": [[source.leaf, source.part, source.dim] for source in self.inputs],
            "guards": list(self.guards),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Binding":
        """Inverse of `as_json`; raises one of several errors for anything else."""
        binding = cls(
            tuple(value["structure"]),
            tuple(
                TensorFacts(dtype, device, tuple(sizes), tuple(strides))
                for dtype, device, sizes, strides in value["leaves"]
            ),
            tuple(InnerSource(*source) for source in value["inputs"]),
            tuple(value["guards"]),
        )
        binding.check()
        return binding

    def check(self) -> None:
        """Raise BindingError, TypeError, SyntaxError or one of sympy's errors for parts that do not
        fit together."""
        count = sum(max(size, 1) if size else 0 for size in self.structure)
        if count != len(self.leaves) or any(size < -1 for size in self.structure):
            raise BindingError(f"structure {self.structure} has not {len(self.leaves)} leaves")
        for facts in self.leaves:
            kinds = {type(size) for size in (*facts.sizes, *facts.strides)}
            if len(facts.sizes) != len(facts.strides) or not kinds <= {int, str, type(None)}:
                raise BindingError(f"{facts} are no facts of a tensor")
        for source in self.inputs:
            if source.part not in get_args(Part) or not 0 <= source.leaf < len(self.leaves):
                raise BindingError(f"{source} is no part of {len(self.leaves)} leaves")
            if not 0 <= source.dim < max(1, len(self.leaves[source.leaf].sizes)):
                raise BindingError(f"{source} is no dimension of its leaf")
        if any(not isinstance(guard, str) for guard in self.guards):
            raise BindingError(f"guards {self.guards} are not all text")
        _check_symbols(self.leaves, self.guards)


@dataclass(frozen=True, slots=True)
class _LeafCheck:
    """The facts of one tensor in the form that is compared fastest: a start makes tens of thousands
    of these checks."""

    dtype: torch.dtype
    device: str
    num_dims: int
    whole: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Sizes and strides, where all are numbers."""
    parts: tuple[Size, ...]
    """Sizes, then strides."""
    known: dict[int, torch.Tensor]
    """Tensors that fit `whole`, by identity: weights and pools come again in every graph."""

    @classmethod
    def of(cls, facts: TensorFacts) -> "_LeafCheck":
        parts = (*facts.sizes, *facts.strides)
        numbers = tuple(part for part in parts if isinstance(part, int))
        dims = len(facts.sizes)
        whole = (numbers[:dims], numbers[dims:]) if len(numbers) == len(parts) else None
        dtype = getattr(torch, facts.dtype.removeprefix("torch."))
        return cls(dtype, facts.device, dims, whole, parts, {})

    def fits(self, leaf: torch.Tensor, sizes: dict[str, int], later: list[tuple[str, int]]) -> bool:
        """Check one tensor; adds symbols to `sizes` and expressions with their values to
        `later`."""
        if leaf.dtype != self.dtype or leaf.device.type != self.device:
            return False
        shape, strides = leaf.shape, leaf.stride()
        if self.whole is not None:
            fits = (shape, strides) == self.whole
            if fits:
                self.known[id(leaf)] = leaf
            return fits
        if len(shape) != self.num_dims:
            return False
        for have, want in zip((*shape, *strides), self.parts, strict=True):
            if want is None or have == want:
                continue
            if isinstance(want, int):
                return False
            if want.isidentifier():
                # A symbol stands for 2 and more: 0 and 1 are compiled as constants.
                if have < 2 or sizes.setdefault(want, have) != have:
                    return False
            else:
                later.append((want, have))
        return True


def make_binding(
    args: Sequence[Any],
    inner_args: Sequence[Any],
    examples: Sequence[Any],
    dynamic: dict[int, tuple[int, ...]],
) -> Binding:
    """Describe a compilation from its first call.

    Args:
        args: the region's arguments: tensors, and lists or tuples of tensors.
        inner_args: tensors and sizes that the compiled code got for them.
        examples: the compiler's symbolic inputs, one for each of inner_args.
        dynamic: leaf -> its symbolic dimensions, for leaves that the code does not take.

    Raises:
        BindingError: an argument is no tensor, an inner argument is none of the call's tensors, or
            a size is not the size of one.
    """
    structure, leaves = flatten(args)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise BindingError("an argument is neither a tensor nor a list of tensors")
    by_identity: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        by_identity.setdefault(id(leaf), index)
    facts: list[TensorFacts | None] = [None] * len(leaves)
    symbols: dict[str, InnerSource] = {}
    for inner, example in zip(inner_args, examples, strict=True):
        if isinstance(inner, torch.Tensor):
            if id(inner) not in by_identity:
                raise BindingError("the compiled code takes a tensor that is not an argument")
            index = by_identity[id(inner)]
            known = facts[index] = _symbolic_facts(example)
            for dim, (size, stride) in enumerate(zip(known.sizes, known.strides, strict=True)):
                symbols.setdefault(str(size), InnerSource(index, "size", dim))
                symbols.setdefault(str(stride), InnerSource(index, "stride", dim))
            # Dynamo has no guard on an offset; code for a symbolic one takes it as a number.
            symbols.setdefault(str(_size(example.storage_offset())), InnerSource(index, "offset"))
    inputs = []
    for inner, example in zip(inner_args, examples, strict=True):
        if isinstance(inner, torch.Tensor):
            inputs.append(InnerSource(by_identity[id(inner)]))
        elif isinstance(example, torch.SymInt) and str(_size(example)) in symbols:
            inputs.append(symbols[str(_size(example))])
        else:
            raise BindingError(f"the compiled code takes the size {example}, which no tensor has")
    whole = tuple(
        seen if seen is not None else _concrete_facts(leaf, dynamic.get(index, ()))
        for index, (leaf, seen) in enumerate(zip(leaves, facts, strict=True))
    )
    guards = _guards(examples)
    _check_symbols(whole, guards)
    return Binding(structure, whole, tuple(inputs), guards)


def _check_symbols(leaves: Sequence[TensorFacts], guards: Sequence[str]) -> None:
    """Raise BindingError for a symbol that no plain size gives a value to."""
    sizes = [size for facts in leaves for size in (*facts.sizes, *facts.strides)]
    texts = [size for size in sizes if isinstance(size, str)]
    known = {text for text in texts if text.isidentifier()}
    for text in (*texts, *guards):
        unknown = parse_expression(text).symbols - known
        if unknown:
            raise BindingError(f"{text} depends on {sorted(unknown)[0]}, the size of no argument")


def _size(value: Any) -> Size:
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression) if expression.is_number else str(expression)
    return int(value)


def _symbolic_facts(example: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        str(example.dtype),
        example.device.type,
        tuple(_size(size) for size in example.shape),
        tuple(_size(stride) for stride in example.stride()),
    )


def _concrete_facts(leaf: torch.Tensor, dynamic: tuple[int, ...]) -> TensorFacts:
    """Facts of a tensor of which the code read sizes at most while it was traced."""
    sizes = tuple(None if dim in dynamic else size for dim, size in enumerate(leaf.shape))
    return TensorFacts(str(leaf.dtype), leaf.device.type, sizes, (None,) * leaf.dim())


def _guards(examples: Sequence[Any]) -> tuple[str, ...]:
    environments: list[Any] = []
    for example in examples:
        values = [example] if isinstance(example, torch.SymInt) else [*example.shape]
        for value in values:
            if isinstance(value, torch.SymInt) and value.node.shape_env not in environments:
                environments.append(value.node.shape_env)
    # Symbols that a guard made equal are one symbol in the sizes, so they are in the guards too.
    found = [
        environment.replace(guard.expr)
        for environment in environments
        for guard in environment.guards
    ]
    return tuple(dict.fromkeys(str(guard) for guard in found if str(guard) != "True"))
