"""`taps`: outputs of modules inside a torch model as features, with the lengths that they have.

Shapes and lengths are measured by running the model, on the meta device where it can.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from featcache._tensors import Lengths
from featcache.errors import ConfigError, FeatureError, nearest
from featcache.writing.arrays import integers

Shape = tuple[int, ...]
_MOST_SHAPES = 1 << 11  # that are remembered of one module: 2 MB; or of utterances alone
Frames = dict[str, list[int] | None]  # of each utterance, by feature


def taps(
    model: nn.Module, modules: Sequence[str] | Mapping[str, str], *, axis: int = 1
) -> TappedModel:
    """Make a model that returns the outputs of modules inside another one, as `unpad` takes them.

    Several come out of one forward pass, which ends with the last of them: what the model would
    compute after it is not computed.

    Args:
        model: any module of torch. It keeps its mode: call `model.eval()` before features are
            computed by hand; `featcache.extract` and a Brain's `cache_features` see to that.
        modules: names as in `model.named_modules()`, or patterns: "encoder.layers.*" are all
            layers, `*` stands for one part of a name. A feature is called as its module, with "_"
            for ".". Or a dict, {feature: name of a module}; "" is the model itself.
        axis: the axis of time of the model's input; axis 0 is that of the utterances.

    Raises `ConfigError` for names that the model does not have.

    >>> model = nn.Sequential(nn.Conv1d(1, 4, kernel_size=5, stride=2), nn.ReLU(), nn.Tanh())
    >>> tapped = taps(model, {"conv": "0", "relu": "1"}, axis=2)
    >>> lengths, features = tapped(torch.zeros(2, 1, 100), lengths=[100, 50])
    >>> lengths["relu"], tuple(features["relu"].shape)
    ([48, 23], (2, 48, 4))
    """
    if isinstance(modules, str) or not modules:
        raise ConfigError(f"modules are a list of names, or a dict by feature, not {modules!r}")
    known = dict(model.named_modules())
    if isinstance(modules, Mapping):
        names = dict(modules)
        for name in names.values():
            if name not in known:
                raise ConfigError(f"the model has no module {name!r}; {nearest(name, known)}")
        return TappedModel(model, names, axis)
    found = [name for pattern in modules for name in _matching(pattern, known)]
    names = {name.replace(".", "_"): name for name in found}
    if len(names) < len(set(found)):
        raise ConfigError("two modules make one name of a feature; name them: {feature: module}")
    return TappedModel(model, names, axis)


def _matching(pattern: str, known: Iterable[str]) -> list[str]:
    parts = pattern.split(".")
    found = [
        name
        for name in known
        if len(own := name.split(".")) == len(parts) and all(map(fnmatchcase, own, parts))
    ]
    if not found or not pattern:
        raise ConfigError(f"the model has no module {pattern!r}; {nearest(pattern, known)}")
    return found


class TappedModel(nn.Module):
    """Outputs of modules inside a model by feature, with their lengths; made by `taps`.

    Attributes:
        model: the model, whose modules and weights these are.
        names: the name of the module of each feature.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, str], axis: int) -> None:
        super().__init__()
        self.model, self.names, self.axis = model, dict(names), axis
        self._shapes = _Shapes(names, axis)

    @torch.no_grad()
    def forward(
        self, inputs: Tensor, lengths: Lengths | None = None, **more: object
    ) -> tuple[Frames, dict[str, Tensor]]:
        """Compute lengths and features of a batch: `unpad(ids, *tapped(inputs, lengths))`.

        Args:
            inputs: what the model takes first, padded, axis 0 the utterances.
            lengths: of each utterance along the axis of time of `inputs`, integers; None: all are
                as long as that.
            more: what else the model takes, by keyword.

        Returns the length of each utterance by feature: the number of frames that the model gives
        for this utterance alone, None for a feature that has no axis of time; and the features,
        (batch, frames, ...) or (batch, ...), whatever the order of axes inside the model. Their
        values are those of the padded batch: where these depend on the padding, give the model its
        mask, or one utterance at a time.

        Raises `FeatureError` for lengths that are none, for modules that do not run just once in a
        forward pass, and for outputs without an axis of utterances, or with two of time.
        """
        given = _given_lengths(lengths, inputs, self.axis)
        layouts = self._shapes.layouts(self.model, inputs, more)
        found = _outputs(self.model, self.names, inputs, more)
        features = {name: layouts[name].apply(found[name][0]) for name in self.names}
        frames: Frames = {
            name: None if layouts[name].time is None else [features[name].shape[1]] * len(inputs)
            for name in self.names
        }
        for row, length in enumerate(given):
            if length < inputs.shape[self.axis]:
                alone = self._shapes.alone(self.model, inputs, more, row, length)
                for name, listed in frames.items():
                    if listed is not None:
                        listed[row] = alone[name]
        return frames, features


def _given_lengths(lengths: Lengths | None, inputs: Tensor, axis: int) -> list[int]:
    longest, batch = inputs.shape[axis], len(inputs)
    given = [longest] * batch if lengths is None else integers("inputs", lengths)
    if len(given) != batch:
        raise FeatureError(f"{len(given)} lengths do not fit {batch} utterances")
    for length in given:
        if not 0 < length <= longest:
            raise FeatureError(f"length {length} is not within 1 to {longest}, the padded length")
    return given


# Forward passes


class _AllThere(BaseException):
    """Ends a forward pass whose remainder is not needed; no `except Exception` stops it."""


def _outputs(
    model: nn.Module,
    names: Mapping[str, str],
    inputs: Tensor,
    more: Mapping[str, object],
    *,
    whole: bool = False,
) -> dict[str, list[Tensor]]:
    """Return the outputs of modules by feature, of each call; the first alone unless `whole`."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str, output: object) -> None:
        tensor = next(_tensors(output), None)
        if tensor is None:
            raise FeatureError(f"the output of module {names[name]!r} holds no tensor")
        found[name].append(tensor)
        if not whole and all(found.values()):
            raise _AllThere
        # what follows may write into it: an activation in place, a sum
        found[name][-1] = tensor.clone()

    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, name=name: keep(name, output)
        )
        for name, path in names.items()
    ]
    try:
        model(inputs, **more)
    except _AllThere:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in what a module returns: a tuple, a dict, an output of transformers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


# Shapes, measured


class _Layout(NamedTuple):
    """The axes of an output: of the utterances, and of time, if it has one."""

    utterances: int
    time: int | None

    def apply(self, output: Tensor) -> Tensor:
        """Return the output as (batch, frames, ...) or (batch, ...)."""
        if self.time is None:
            return output.movedim(self.utterances, 0)
        return output.movedim((self.utterances, self.time), (0, 1))


class _Shapes:
    """Shapes of outputs by those of the input, measured by running the model.

    It runs as a copy on the meta device, which computes shapes alone; for real, up to the last
    module, where the model cannot.
    """

    def __init__(self, names: Mapping[str, str], axis: int) -> None:
        self._names, self._axis = dict(names), axis
        self._copy: nn.Module | None = None
        self._layouts: dict[str, _Layout] = {}
        self._alone: dict[object, dict[str, int]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return _Shapes, (self._names, self._axis)  # what is measured is measured anew elsewhere

    def layouts(
        self, model: nn.Module, inputs: Tensor, more: Mapping[str, object]
    ) -> dict[str, _Layout]:
        """Return the layout of each feature's output, measured once."""
        if not self._layouts:
            try:
                self._copy = _on_meta(model, self._names.values())
                self._layouts = self._measured(self._copy, inputs, more)
            except FeatureError:
                raise
            except Exception:  # whatever: a copy, or values, that the meta device cannot have
                self._copy = None
                self._layouts = self._measured(model, inputs, more)
        return self._layouts

    def _measured(
        self, model: nn.Module, inputs: Tensor, more: Mapping[str, object]
    ) -> dict[str, _Layout]:
        length = inputs.shape[self._axis]
        base = self._run(model, inputs, more, [0, 0], length, whole=True)
        for name, calls in base.items():
            if len(calls) != 1:
                raise FeatureError(
                    f"module {self._names[name]!r} runs {len(calls)} times in a forward pass; "
                    "only one that runs once can be tapped"
                )
        wider = self._run(model, inputs, more, [0, 0, 0], length)
        others = []
        for other in (2 * length, max(1, length // 2)):
            try:
                others.append(self._run(model, inputs, more, [0, 0], other))
            except Exception as error:  # too long for positions, too short for a kernel
                refused = error
        if not others:
            raise refused
        return {
            name: _layout(path, base[name][0], wider[name][0], [other[name][0] for other in others])
            for name, path in self._names.items()
        }

    def alone(
        self, model: nn.Module, inputs: Tensor, more: Mapping[str, object], row: int, length: int
    ) -> dict[str, int]:
        """Return the number of frames of each feature that has some, of one utterance alone."""
        settings = {k: repr(v) for k, v in more.items() if not isinstance(v, Tensor)}
        key = (length, *settings.items())
        if key not in self._alone:
            if len(self._alone) == _MOST_SHAPES:
                self._alone.clear()
            try:
                found = self._run(self._copy or model, inputs, more, [row], length)
            except Exception as error:
                raise FeatureError(
                    f"the model does not take an utterance of length {length} alone: {error}"
                ) from error
            self._alone[key] = {
                name: shape[time]
                for name, (shape,) in found.items()
                if (time := self._layouts[name].time) is not None
            }
        return self._alone[key]

    def _run(
        self,
        model: nn.Module,
        inputs: Tensor,
        more: Mapping[str, object],
        rows: list[int],
        length: int,
        *,
        whole: bool = False,
    ) -> dict[str, list[Shape]]:
        """Return the shapes of outputs of some rows of a batch, cut or repeated to a length."""
        longest, meta = inputs.shape[self._axis], model is self._copy

        def resized(value: Tensor, axes: Iterable[int]) -> Tensor:
            value = value.to("meta") if meta else value
            value = value[torch.tensor(rows, device=value.device)]
            for axis in axes:
                index = torch.arange(length, device=value.device) % longest
                value = value.index_select(axis, index)
            return value

        def resized_too(value: object) -> object:
            if not isinstance(value, Tensor) or value.shape[:1] != inputs.shape[:1]:
                return value.to("meta") if isinstance(value, Tensor) and meta else value
            return resized(value, [i for i in range(1, value.ndim) if value.shape[i] == longest])

        given = resized(inputs, [self._axis])
        others = {name: resized_too(value) for name, value in more.items()}
        with torch.device("meta" if meta else inputs.device):
            found = _outputs(model, self._names, given, others, whole=whole)
        return {name: [tuple(call.shape) for call in calls] for name, calls in found.items()}


def _layout(path: str, base: Shape, wider: Shape, others: Sequence[Shape]) -> _Layout:
    """Return the axes that follow the number of utterances (2, or 3 in `wider`) and the length."""
    sizes = enumerate(zip(base, wider, strict=False))
    utterances = [axis for axis, both in sizes if both == (2, 3)]
    time = {
        axis
        for other in others
        for axis, (size, changed) in enumerate(zip(base, other, strict=False))
        if size != changed
    }
    of = f"the output of {path!r}, of shape {base} for 2 utterances,"
    if len(utterances) != 1 or utterances[0] in time:
        raise FeatureError(f"{of} has no axis of utterances")
    if len(time) > 1:
        raise FeatureError(f"{of} has more than one axis of time")
    return _Layout(utterances[0], *(time or [None]))


def _on_meta(model: nn.Module, tapped: Iterable[str]) -> nn.Module:
    """Return a copy of a model whose tensors have no values, and take no memory."""
    memo: dict[int, object] = {id(each): each.to("meta") for each in model.buffers()}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(each.to("meta"), requires_grad=False)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                vars(module)[key] = value.to("meta")
    tapped_modules = {copied.get_submodule(path) for path in tapped}
    known: dict[object, dict[object, object]] = {}
    alike = {module: _described(module) for module in copied.modules()}
    for module, described in alike.items():
        # a module around a tapped one has to call it
        if module is not copied and not tapped_modules & {*module.modules()} - {module}:
            shapes = known.setdefault(described, {})
            module.forward = _remembering(module.forward, shapes)
    return copied


def _described(module: nn.Module) -> object:
    """Return what two modules have in common that make the same shapes: layers of one encoder."""
    found: list[object] = []
    for name, part in module.named_modules():
        found += [name, type(part)]
        for key, value in vars(part).items():
            if key in ("_parameters", "_buffers"):
                shapes = [(k, None if v is None else (*v.shape, v.dtype)) for k, v in value.items()]
                found.append((key, *shapes))
            elif key != "_modules":  # their parts come by themselves
                leaves = pytree.tree_leaves(list(value) if isinstance(value, set) else value)
                plain = all(isinstance(leaf, int | float | str | None) for leaf in leaves)
                # any other object counts as itself: a hook of its own sets a layer apart
                found.append((key, repr(value) if plain else id(value)))
    return tuple(found)


def _remembering(
    forward: Callable[..., object], known: dict[object, object]
) -> Callable[..., object]:
    """Return a function on the meta device that is called once for inputs of the same shapes.

    Kernels there take 0.1 ms each. Layers get the same numbers of frames again and again, of
    waves of thousands of lengths.
    """

    def remembering(*args: object, **kwargs: object) -> object:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves):
            return forward(*args, **kwargs)
        shapes = [
            (*leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
        ]
        key = (str(tree), *shapes)
        if key not in known:
            if len(known) == _MOST_SHAPES:
                known.clear()
            known[key] = forward(*args, **kwargs)
        # what comes after may change the shape of its input in place
        return pytree.tree_map_only(Tensor, Tensor.detach, known[key])

    return remembering
