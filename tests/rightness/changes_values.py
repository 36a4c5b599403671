"""Changes of values of Python's own types, of NumPy and torch, that a recipe keeps."""

from __future__ import annotations

from changes_held import held

CHANGES = [
    held(
        "a built-in function",
        "brain.op = torch.tanh",
        "brain.op = torch.sin",
        "self.op(fbank)",
        "op",
    ),
    held(
        "a function of operator",
        "import operator; brain.op = operator.add",
        "import operator; brain.op = operator.mul",
        "self.op(fbank, 2.0)",
        "op",
    ),
    held(
        "a fraction",
        "from fractions import Fraction; brain.ratio = Fraction(1, 2)",
        "from fractions import Fraction; brain.ratio = Fraction(2, 3)",
        "float(self.ratio)",
        "ratio",
    ),
    held(
        "a decimal number",
        "from decimal import Decimal; brain.ratio = Decimal('0.5')",
        "from decimal import Decimal; brain.ratio = Decimal('0.6')",
        "float(self.ratio)",
        "ratio",
    ),
    held(
        "a slice",
        "brain.part = slice(0, 10)",
        "brain.part = slice(5, 15)",
        "(1 + fbank[:, self.part].mean())",
        "part",
    ),
    held("a range", "brain.steps = range(3)", "brain.steps = range(4)", "len(self.steps)", "steps"),
    held(
        "a frozen set",
        "brain.kept = frozenset({1, 2})",
        "brain.kept = frozenset({1, 3})",
        "sum(self.kept)",
        "kept",
    ),
    held("bytes", "brain.code = b'a'", "brain.code = b'c'", "self.code[0] / 90", "code"),
    held(
        "a complex number", "brain.turn = 1 + 1j", "brain.turn = 1 + 2j", "abs(self.turn)", "turn"
    ),
    held(
        "a regular expression",
        "import re; brain.pattern = re.compile('d')",
        "import re; brain.pattern = re.compile('m')",
        "1 + len(self.pattern.findall(self.layer_name))",
        "pattern",
    ),
    held(
        "a text",
        "brain.mode = 'loud'",
        "brain.mode = 'soft'",
        "{'loud': 2.0, 'soft': 0.5}[self.mode]",
        "mode",
    ),
    held(
        "the dtype of an attribute",
        "brain.kind = torch.float32",
        "brain.kind = torch.float16",
        "fbank.to(self.kind)",
        "kind",
    ),
    held(
        "an array of the standard library",
        "import array; brain.levels = array.array('d', [1.1])",
        "import array; brain.levels = array.array('d', [1.3])",
        "self.levels[0]",
        "levels",
    ),
    held(
        "a variable of the context",
        "from contextvars import ContextVar; brain.level = ContextVar('level', default=1.1)",
        "from contextvars import ContextVar; brain.level = ContextVar('level', default=1.3)",
        "self.level.get()",
        "level",
    ),
    held(
        "a chain of maps",
        "from collections import ChainMap; brain.maps = ChainMap({}, {'a': 1.1})",
        "from collections import ChainMap; brain.maps = ChainMap({'a': 1.3}, {'a': 1.1})",
        "self.maps['a']",
        "maps",
    ),
    held(
        "a complex array",
        "brain.turns = np.array([1 + 1j])",
        "brain.turns = np.array([1 + 2j])",
        "abs(self.turns[0])",
        "turns",
    ),
    held(
        "a structured array",
        "brain.rows = np.array([(1, 1.1)], dtype=[('n', 'i4'), ('x', 'f8')])",
        "brain.rows = np.array([(1, 1.3)], dtype=[('n', 'i4'), ('x', 'f8')])",
        "self.rows['x'][0]",
        "rows",
    ),
    held(
        "an array of objects",
        "brain.cells = np.array([{'a': 1.1}, None], dtype=object)",
        "brain.cells = np.array([{'a': 1.3}, None], dtype=object)",
        "self.cells[0]['a']",
        "cells",
    ),
    held(
        "a view of a tensor",
        "brain.row = torch.arange(40.0).view(2, 20)[0]",
        "brain.row = torch.arange(40.0).view(2, 20)[1]",
        "self.row",
        "row",
    ),
    held(
        "a sparse tensor",
        "brain.thin = torch.eye(20).to_sparse()",
        "brain.thin = (2 * torch.eye(20)).to_sparse()",
        "self.thin.to_dense().sum(dim=1)",
        "thin",
    ),
    held(
        "a masked array",
        "brain.hidden = np.ma.array([1.0, 3.0], mask=[False, True])",
        "brain.hidden = np.ma.array([1.0, 3.0], mask=[True, False])",
        "float(self.hidden.sum())",
        "hidden",
    ),
]
