"""What a caller passes and gets: the structure of arguments and results of one entry, stored as JSON in the program.

A structure is a tree of {"t": "tuple" | "list" | "dict" | "odict" | "named" | "torch", "c": [children], ...}; a leaf is
{"kind": "tensor" | "int" | "float" | "bool", "index": slot} or {"kind": "value", "value": ..} for a constant.
Only "torch" (a container class that somebody registered with torch's pytree) needs torch at load time.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trivet.error import Error

Tree = dict[str, Any]


@dataclass(slots=True)
class Signature:
    """Arguments and results of an entry.

    Attributes:
        args: structure of the positional arguments ("t": "tuple").
        kwargs: structure of the keyword arguments ("t": "dict").
        result: structure of the result.
        names: forward()'s positional parameter names; "" entries when unknown.
        defaults: forward()'s default values that JSON can hold.
    """

    args: Tree
    kwargs: Tree
    result: Tree
    names: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For Graph.signature and Entry.signature."""
        return {"args": self.args, "kwargs": self.kwargs, "result": self.result, "names": self.names,
                "defaults": self.defaults}  # fmt: skip

    @staticmethod
    def from_json(data: dict[str, Any] | str) -> Signature:
        """The inverse; data is the dict or its JSON text."""
        d = json.loads(data) if isinstance(data, str) else data
        return Signature(d["args"], d["kwargs"], d["result"], list(d["names"]), dict(d["defaults"]))

    # -- reading
    def input_names(self) -> list[str]:
        """Names of the input slots as the caller knows them: "x", "pair[1]['z']"."""
        named = [(leaf["index"], path) for leaf, path in self._leaves() if leaf["kind"] != "value"]
        return [path for _, path in sorted(named)]

    def _leaves(self) -> Iterator[tuple[Tree, str]]:
        for i, child in enumerate(self.args["c"]):
            yield from leaves_of(child, self._name(i))
        for key, child in zip(self.kwargs["k"], self.kwargs["c"], strict=True):
            yield from leaves_of(child, key)

    def _name(self, i: int) -> str:
        return self.names[i] if i < len(self.names) and self.names[i] else f"args[{i}]"

    # -- at a call
    def flatten_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves for the input slots, in order. Raises Error for a wrong count, structure or constant."""
        args, kwargs = self._bind(tuple(args), dict(kwargs))
        slots: dict[int, Any] = {}
        for i, (tree, value) in enumerate(zip(self.args["c"], args, strict=True)):
            _flatten(tree, value, self._name(i), slots)
        for key, tree in zip(self.kwargs["k"], self.kwargs["c"], strict=True):
            _flatten(tree, kwargs[key], key, slots)
        return [slots[i] for i in sorted(slots)]

    def unflatten_outputs(self, outputs: list[Any]) -> Any:
        """The result with the model's structure. outputs: one value per output slot (tensors, or numbers for int slots)."""
        return _unflatten(self.result, outputs)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position or by keyword as at export, whichever way the caller gives them."""
        want, keys = len(self.args["c"]), list(self.kwargs["k"])
        place = {n: i for i, n in enumerate(self.names) if n}
        for key in kwargs:
            if key not in place and key not in keys and key not in self.defaults:
                raise Error(f"unexpected keyword argument {key!r}", remedy=self._usage())
        for i in range(want, len(args)):  # given by position, keyword (or not at all) at export
            name = self.names[i] if i < len(self.names) else ""
            if not name or name in kwargs:
                raise Error(f"expected {want} positional arguments, got {len(args)}", remedy=self._usage())
            kwargs[name] = args[i]
        given = list(args[:want])
        for i in range(len(given), want):
            name = self.names[i] if i < len(self.names) else ""
            if name and name in kwargs:
                given.append(kwargs.pop(name))
            elif name in self.defaults:
                given.append(self.defaults[name])
            else:
                raise Error(f"argument {self._name(i)!r} is missing: expected {want} positional arguments, "
                            f"got {len(args)}", remedy=self._usage())  # fmt: skip
        for key in keys:
            if key not in kwargs:
                if key not in self.defaults:
                    raise Error(f"keyword argument {key!r} is missing", remedy=self._usage())
                kwargs[key] = self.defaults[key]
        for key in [k for k in kwargs if k not in keys]:
            if key in place and place[key] < want:
                raise Error(f"argument {key!r} was given twice", remedy=self._usage())
            if key not in self.defaults:
                raise Error(f"unexpected keyword argument {key!r}", remedy=self._usage())
            if not _same(kwargs[key], self.defaults[key]):
                raise Error(f"argument {key!r} was left at its default {self.defaults[key]!r} at export, "
                            f"got {_show(kwargs[key])}", remedy=f"export with {key} among the example arguments")  # fmt: skip
            del kwargs[key]
        return tuple(given), kwargs

    def _usage(self) -> str:
        words = [self._name(i) for i in range(len(self.args["c"]))] + [f"{k}=" for k in self.kwargs["k"]]
        return f"call it with ({', '.join(words)})"


# ---- making -------------------------------------------------------------------------------------------------------------
def tree_of(spec: Any, leaves: Iterator[Tree]) -> Tree:
    """torch's TreeSpec with our leaves."""
    children = spec.children()
    kind, context = spec.type, spec.context
    if kind is None:
        return next(leaves)
    if kind in (dict, OrderedDict) and all(k is None or isinstance(k, (str, int, float, bool)) for k in context):
        return {
            "t": "dict" if kind is dict else "odict",
            "k": list(context),
            "c": [tree_of(c, leaves) for c in children],
        }
    if kind in (tuple, list):
        return {"t": kind.__name__, "c": [tree_of(c, leaves) for c in children]}
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _named(kind, [tree_of(c, leaves) for c in children])
    if kind.__module__ == "torch.return_types":  # of torch.max(x, 1) and the like
        return {"t": "named", "class": f"torch.return_types:{kind.__name__}", "fields": list(kind.__match_args__),
                "c": [tree_of(c, leaves) for c in children]}  # fmt: skip
    if kind is namedtuple:
        return _named(context, [tree_of(c, leaves) for c in children])
    import torch.utils._pytree as pytree

    shallow = pytree.TreeSpec(kind, context, [pytree.treespec_leaf()] * len(children))
    try:
        text = pytree.treespec_dumps(shallow)
    except (NotImplementedError, TypeError, ValueError) as e:
        raise Error(f"the container {kind.__name__} cannot be written to a file",
                    remedy="register it with torch.utils._pytree.register_pytree_node(.., serialized_type_name=..)") from e  # fmt: skip
    return {"t": "torch", "spec": text, "name": kind.__name__, "c": [tree_of(c, leaves) for c in children]}


def _named(cls: Any, children: list[Tree]) -> Tree:
    return {"t": "named", "class": f"{cls.__module__}:{cls.__qualname__}", "fields": list(cls._fields), "c": children}


def constant(value: Any) -> Tree:
    """The leaf of a constant argument or result."""
    if value is None or isinstance(value, (bool, int, str)):
        return {"kind": "value", "value": value}
    if isinstance(value, float):
        return {"kind": "value", "value": value if math.isfinite(value) else str(value), "float": True}
    return {"kind": "value", "value": str(value), "opaque": True}  # a dtype, a device, an enum: compared as text


def _value(leaf: Tree) -> Any:
    return float(leaf["value"]) if leaf.get("float") else leaf["value"]


# ---- using --------------------------------------------------------------------------------------------------------------
def leaves_of(tree: Tree, path: str) -> Iterator[tuple[Tree, str]]:
    """The leaves of a structure with their paths."""
    if "kind" in tree:
        yield tree, path
        return
    for label, child in zip(_labels(tree), tree["c"], strict=True):
        yield from leaves_of(child, path + label)


def _labels(tree: Tree) -> list[str]:
    if "k" in tree:
        return [f"[{k!r}]" for k in tree["k"]]
    if tree["t"] == "named":
        return [f".{f}" for f in tree["fields"]]
    return [f"[{i}]" for i in range(len(tree["c"]))]


def _flatten(tree: Tree, value: Any, path: str, slots: dict[int, Any]) -> None:
    if "kind" in tree:
        _leaf(tree, value, path, slots)
        return
    for label, child, part in zip(_labels(tree), tree["c"], _children(tree, value, path), strict=True):
        _flatten(child, part, path + label, slots)


def _leaf(leaf: Tree, value: Any, path: str, slots: dict[int, Any]) -> None:
    if leaf["kind"] != "value":
        if value is None or isinstance(value, (str, bytes, dict, list, tuple)):
            raise Error(f"argument {path!r}: expected a {leaf['kind']}, got {_show(value)}")
        slots[leaf["index"]] = value
        return
    want = _value(leaf)
    if leaf.get("opaque"):
        if str(value) != want:
            raise Error(f"argument {path!r} was {want} at export, got {_show(value)}",
                        remedy="constants are part of the program; export again with the new one")  # fmt: skip
    elif not _same(value, want):
        raise Error(f"argument {path!r} was {want!r} at export, got {_show(value)}",
                    remedy="constants are part of the program; export again with the new one, or make it a tensor")  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None or isinstance(a, (str, bool)) or isinstance(b, (str, bool)):
        return a is b or (type(a) is type(b) and bool(a == b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or (a != a and b != b)
    return False


def _show(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _children(tree: Tree, value: Any, path: str) -> list[Any]:
    kind, count = tree["t"], len(tree["c"])
    if kind in ("dict", "odict"):
        if not isinstance(value, dict):
            raise Error(f"argument {path!r}: expected a dict with the keys {tree['k']}, got {_show(value)}")
        if set(value) != set(tree["k"]):
            raise Error(f"argument {path!r}: expected the keys {tree['k']}, got {list(value)}")
        return [value[k] for k in tree["k"]]
    if kind == "torch":
        import torch.utils._pytree as pytree

        parts, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
        if spec.type is None or spec.type.__name__ != tree["name"] or len(parts) != count:
            raise Error(f"argument {path!r}: expected a {tree['name']} of {count}, got {_show(value)}")
        return parts
    if not isinstance(value, (tuple, list)):
        raise Error(
            f"argument {path!r}: expected a {'tuple' if kind == 'named' else kind} of {count}, got {_show(value)}"
        )
    if len(value) != count:
        raise Error(f"argument {path!r}: expected {count} elements, got {len(value)}")
    return list(value)


def _unflatten(tree: Tree, outputs: list[Any]) -> Any:
    if "kind" in tree:
        return _value(tree) if tree["kind"] == "value" else outputs[tree["index"]]
    parts = [_unflatten(c, outputs) for c in tree["c"]]
    makers: dict[str, Callable[[], Any]] = {
        "tuple": lambda: tuple(parts), "list": lambda: parts,
        "dict": lambda: dict(zip(tree["k"], parts, strict=True)),
        "odict": lambda: OrderedDict(zip(tree["k"], parts, strict=True)),
        "named": lambda: _make_named(tree, parts), "torch": lambda: _torch_container(tree, parts)}  # fmt: skip
    return makers[tree["t"]]()


def _make_named(tree: Tree, parts: list[Any]) -> Any:
    cls = _named_class(tree)
    return cls(parts) if tree["class"].startswith("torch.return_types:") else cls(*parts)


def _named_class(tree: Tree) -> Any:
    """The tuple class that the file names if the program has it already: a file must not import anything."""
    module, _, name = tree["class"].partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    fields = getattr(found, "_fields", getattr(found, "__match_args__", None))
    if isinstance(found, type) and issubclass(found, tuple) and fields == tuple(tree["fields"]):
        return found
    try:
        return namedtuple(name.split(".")[-1], tree["fields"])
    except (TypeError, ValueError) as e:
        raise Error(
            f"the file names a container with impossible fields: {e}", remedy="export the model again"
        ) from None


def _torch_container(tree: Tree, parts: list[Any]) -> Any:
    import torch.utils._pytree as pytree

    try:
        return pytree.tree_unflatten(parts, pytree.treespec_loads(tree["spec"]))
    except Exception as e:
        raise Error(f"the result is a {tree['name']}, which this process does not know",
                    remedy="import the library that defines it before the call") from e  # fmt: skip
