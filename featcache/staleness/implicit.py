"""Names that code calls without naming them, and names that tell nothing: tables."""

from __future__ import annotations

# called without being named
IMPLICIT = frozenset(
    [
        "forward",
        "__abs__",
        "__array__",
        "__array_function__",
        "__array_ufunc__",
        "__bool__",
        "__call__",
        "__contains__",
        "__enter__",
        "__eq__",
        "__exit__",
        "__float__",
        "__ge__",
        "__get__",
        "__getattr__",
        "__getattribute__",
        "__getitem__",
        "__gt__",
        "__index__",
        "__int__",
        "__iter__",
        "__le__",
        "__len__",
        "__lt__",
        "__missing__",
        "__ne__",
        "__next__",
        "__reversed__",
        "__round__",
        "__setitem__",
        "__torch_dispatch__",
        "__torch_function__",
    ]
)
NAMELESS = ("<lambda>", "_")
# parts of the names of methods, by operators of Python's syntax tree
OPERATORS = {
    "Add": "add",
    "Sub": "sub",
    "Mult": "mul",
    "MatMult": "matmul",
    "Div": "truediv",
    "FloorDiv": "floordiv",
    "Mod": "mod",
    "Pow": "pow",
    "LShift": "lshift",
    "RShift": "rshift",
    "BitOr": "or",
    "BitXor": "xor",
    "BitAnd": "and",
    "USub": "neg",
    "UAdd": "pos",
    "Invert": "invert",
}
# bases of users' classes whose code reads no attribute but its own
NEUTRAL = (
    "object",
    "Module",
    "Generic",
    "Protocol",
    "ABC",
    "SimpleNamespace",
    "FeatureCacheMixin",
    "Brain",
)
