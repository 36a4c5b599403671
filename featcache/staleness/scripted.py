"""Description of TorchScript modules: the code that they hold, and what it names of themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

# numbers that tell classes of one name apart, in the order in which they were made
_NUMBERED = re.compile(r"\.?_*torch_mangle_\d+")
_OWN = re.compile(r'\bself\.(\w+)|getattr\(self, "(\w+)"\)')


def scripted_settings(part: torch.jit.ScriptModule) -> Iterator[tuple[str, object]]:
    """Yield the code, and the attributes that it reads, of a module without those inside of it."""
    held: Any = part._c  # noqa: SLF001  # no public name
    kinds: Any = (part._parameters, part._buffers, part._modules)  # noqa: SLF001
    apart = {name for kind in kinds for name in kind.keys()}  # noqa: SIM118
    methods, named = sorted(held._method_names()), set[str]()  # noqa: SLF001
    for method in methods:
        code, constants = held._get_method(method).code_with_constants  # noqa: SLF001
        yield f"code of {method}", _NUMBERED.sub("", code).split("\n")
        if constants:
            yield f"constants of {method}", constants
        named.update(one or other for one, other in _OWN.findall(code))
    for name in sorted(named - apart - {*methods}):
        if held.hasattr(name):
            yield name, held.getattr(name)
