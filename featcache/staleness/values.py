"""Description of any value as JSON, the same in every process, and what is left out of it.

Numbers and text are as they are, arrays and tensors a digest, objects their class and state. Left
out: paths, devices, locks, threads, loggers, random generators, what a library keeps for itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import copyreg
import enum
import functools
import io
import itertools
import json
import logging
import math
import multiprocessing.pool
import os
import random
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from featcache.format import digest
from featcache.interface import Array
from featcache.staleness.code import is_users

# Digests of arrays and tensors: dtype, shape and values, wherever they lie.


def is_array(value: object) -> bool:
    """Whether a value is a tensor, or an array of anything but Python's objects."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return isinstance(value, torch.Tensor)


@dataclass(frozen=True, eq=False)
class LaterArray:
    """An array or tensor that is to be read later."""

    value: Array | torch.Tensor

    def digest(self) -> str:
        """Return dtype, shape and xxh3-64 of the values."""
        state = xxhash.xxh3_64()
        dtype, shape = _add(state, self.value)
        return f"{dtype} {shape} {state.hexdigest()}"


def digests_of_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the xxh3-64 of each tensor: its dtype, shape and values, on any device."""
    found = {}
    for name, value in sorted(tensors.items()):
        state = xxhash.xxh3_64(f"{value.dtype}:{tuple(value.shape)};".encode())
        _add(state, value)
        found[name] = state.hexdigest()
    return found


def _add(state: xxhash.xxh3_64, value: Array | torch.Tensor) -> tuple[str, list[int]]:
    if isinstance(value, np.ndarray):
        whole = np.ascontiguousarray(value)
        state.update(whole.reshape(-1).view(np.uint8).data if whole.size else b"")
        return value.dtype.str.lstrip("<=|"), list(value.shape)
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if value.device.type == "meta":
        return dtype, shape
    if value.is_quantized:
        for part in _scales(value):
            _add(state, part)
        value = value.int_repr()
    if value.is_nested or value.layout is not torch.strided:
        parts = (
            value.unbind()
            if value.is_nested
            else (value.coalesce().indices(), value.coalesce().values())
        )
        for part in parts:
            _add(state, part)
        return dtype, shape
    value = value.detach().resolve_conj().resolve_neg().cpu()
    state.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return dtype, shape


def _scales(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of a quantised tensor, or those of its channels."""
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch.tensor(value.q_scale()), torch.tensor(value.q_zero_point())
    return value.q_per_channel_scales(), value.q_per_channel_zero_points()


# Description of plain values and of seeds; text that is a path or a device counts for nothing.

_DAY_S = 86400.0
_NOW = time.time()
_MOST_SEED = 1 << 48  # larger ones were drawn by the system
NOTHING = object()  # a value that does not count
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?$")
# absolute or beginning with a place, or with a file's suffix behind a slash
_PATH = re.compile(
    r"([/~]\w|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\\\\)|[^\s]*[/\\][^/\\]*\.[A-Za-z]\w{0,5}$"
)


def plain_of(value: object) -> object:
    """Describe a plain value; `NOTHING` for paths and devices."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes {digest(value)}"
    if isinstance(value, str):
        value = str(value)
        return NOTHING if is_path(value) or _DEVICE.match(value) else unicode_of(value)
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, float):
        if _NOW - _DAY_S < value < time.time():
            return NOTHING  # a moment of this process
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >> 64:
        return hex(value)
    return value


def is_path(text: str) -> bool:
    """Whether text is a path: an absolute one, or a file's."""
    return "://" not in text and _PATH.match(text) is not None


def unicode_of(text: str) -> str:
    """Return text as valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def seed_of(generator: Any) -> object:
    """Describe a generator by the seed that the user gave; its state changes while it is used."""
    if hasattr(generator, "initial_seed"):  # of torch
        seed: object = generator.initial_seed()
    else:
        sequence = getattr(generator, "bit_generator", generator).seed_seq
        seed = getattr(sequence, "entropy", None)
    given = isinstance(seed, int) and seed < _MOST_SEED
    return {"class": type(generator).__qualname__, "seed": seed} if given else NOTHING


def proxied(value: Any) -> object:
    """Return what a `weakref.proxy` stands for, None if that is gone; another value as it is."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__reduce_ex__.__self__
    except ReferenceError:
        return None


# Configurations of OmegaConf, which look like dicts and objects and are neither.

MISSING = object()


def is_configuration(value: object) -> bool:
    """Whether a value is one, or a list of one."""
    loaded = sys.modules.get("omegaconf")
    return loaded is not None and isinstance(value, loaded.DictConfig | loaded.ListConfig)


def plain_configuration(value: object) -> object:
    """Return a configuration as dicts and lists, interpolated if that is possible."""
    plain = sys.modules["omegaconf"].OmegaConf.to_container
    try:
        return plain(value, resolve=True)
    except ValueError:
        return plain(value, resolve=False)


# Attributes that libraries' own classes keep and no evaluation reads: a table, with the reasons.
#
# A row holds for the classes of installed libraries that it names, those derived from them
# included, and for these attributes and buffers alone, unless the user's code mentions them;
# never for a parameter. A name by itself decides nothing: what a user's class, buffer,
# configuration or variable is called says nothing of what it does.


class LeftOut(NamedTuple):
    """Attributes of some classes that change nothing of what their objects compute."""

    classes: str  # by module and qualified name; patterns, apart by spaces
    names: str  # apart by spaces
    reason: str


TABLE = (
    LeftOut(
        "torch.nn.modules.module.Module",
        "training",
        "features are computed in evaluation mode",
    ),
    LeftOut(
        # `inplace` of an activation counts: what it overwrites may be read again
        "torch.nn.modules.dropout._DropoutNd",
        "p inplace",
        "returns its input in evaluation",
    ),
    LeftOut(
        "torch.nn.modules.batchnorm._NormBase",
        "momentum num_batches_tracked",
        "of the running means, which training alone moves",
    ),
    LeftOut(
        "torch.nn.modules.rnn.RNNBase torch.nn.modules.activation.MultiheadAttention",
        "dropout",
        "handed on with `training`",
    ),
    LeftOut(
        "torchaudio.models.emformer._EmformerAttention torchaudio.models.deepspeech.FullyConnected "
        "torchaudio.models.wav2vec2.components.SelfAttention "
        "torchaudio.models.wav2vec2.components.Transformer "
        "torchaudio.models.wav2vec2.wavlm_attention.WavLMSelfAttention "
        "torchaudio.models.tacotron2._Decoder",
        "dropout layer_drop attention_dropout decoder_dropout",
        "handed on with `training`",
    ),
    LeftOut(
        # not drop_rate of augment.ChannelDrop, nor dropout of Tacotron2's prenet: always at work
        "speechbrain.nnet.dropout.Dropout2d",
        "drop_rate inplace",
        "returns its input in evaluation",
    ),
    LeftOut(
        "speechbrain.lobes.models.transformer.* speechbrain.lobes.models.beats.* "
        "speechbrain.lobes.models.HifiGAN.VariancePredictor",
        "layerdrop_prob layerdrop dropout",
        "asked for beside `training`",
    ),
    LeftOut(
        "speechbrain.integrations.huggingface.* speechbrain.lobes.models.fairseq_wav2vec.*",
        "freeze freeze_encoder freeze_feature_extractor",
        "whether gradients flow",
    ),
    LeftOut(
        "speechbrain.integrations.huggingface.* speechbrain.tokenizers.SentencePiece.SentencePiece",
        "source save_path text_file prefix_model_file",
        "the place that it was loaded from",
    ),
    LeftOut(
        "speechbrain.processing.features.InputNormalization",
        "update_until_epoch",
        "until when training moves the means",
    ),
    LeftOut(
        "speechbrain.core.Brain",
        "checkpointer optimizers_dict optimizer optimizer_step train_loader train_sampler "
        "profiler step nonfinite_count avg_train_loss device noprogressbar debug evaluation_ctx "
        "training_ctx",
        "set by the Brain itself: where it is in training, and on which device",
    ),
    LeftOut(
        "transformers.models.*",
        "dropout attention_dropout activation_dropout layerdrop drop_prob",
        "handed on with `training`, or asked for beside it",
    ),
    LeftOut(
        "transformers.modeling_utils.PreTrainedModel transformers.modeling_layers.*",
        "gradient_checkpointing _gradient_checkpointing_func _loss_function",
        "of the backward pass",
    ),
    LeftOut(
        "transformers.modeling_utils.PreTrainedModel",
        "name_or_path warnings_issued hf_device_map all_tied_weights_keys _no_split_modules "
        "_keep_in_fp32_modules _keep_in_fp32_modules_strict _keys_to_ignore_on_load_missing "
        "_keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save _tp_plan _pp_plan _ep_plan "
        "_fsdp_plan",
        "how it was loaded, and where it lies",
    ),
    LeftOut(
        # not speech_decoder_prenet_dropout of SpeechT5, which is always at work
        "transformers.configuration_utils.PreTrainedConfig",
        "dropout hidden_dropout hidden_dropout_prob attention_dropout attention_probs_dropout_prob "
        "activation_dropout feat_proj_dropout feat_extract_dropout feat_quantizer_dropout "
        "final_dropout pooler_dropout classifier_dropout conformer_conv_dropout adaptor_dropout "
        "speech_encoder_dropout positional_dropout layerdrop encoder_layerdrop decoder_layerdrop "
        "speech_encoder_layerdrop apply_spec_augment mask_time_prob mask_time_length "
        "mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks "
        "ctc_loss_reduction ctc_zero_infinity contrastive_loss_weight diversity_loss_weight",
        "of training and its losses",
    ),
    LeftOut(
        "transformers.configuration_utils.PreTrainedConfig",
        "initializer_range initializer_factor init_std",
        "of weights that are made anew",
    ),
    LeftOut(
        "transformers.configuration_utils.PreTrainedConfig "
        "transformers.generation.configuration_utils.GenerationConfig "
        "transformers.tokenization_utils_base.PreTrainedTokenizerBase "
        "transformers.feature_extraction_utils.FeatureExtractionMixin "
        "transformers.image_processing_base.ImageProcessingMixin",
        "transformers_version name_or_path _name_or_path _commit_hash _post_init_done "
        "special_tokens_map_file verbose deprecation_warnings _in_target_context_manager",
        "the file that it came from, and messages",
    ),
    LeftOut(
        "transformers.configuration_utils.PreTrainedConfig",
        "_attn_implementation _attn_implementation_internal _attn_implementation_autoset "
        "_experts_implementation _experts_implementation_internal",
        "another kernel for the same sums",
    ),
    LeftOut(
        "sklearn.base.BaseEstimator",
        "_sklearn_version n_jobs verbose",
        "version, threads, messages",
    ),
    LeftOut(
        "sklearn.cluster._kmeans._BaseKMeans",
        "labels_ inertia_ n_iter_ n_steps_ tol _tol max_iter n_init _n_init _n_threads "
        "random_state _random_state _ewa_inertia _ewa_inertia_min _no_improvement "
        "_n_since_last_reassign _counts",
        "of the fit: predictions read the centers",
    ),
    LeftOut(
        "sklearn.mixture._base.BaseMixture",
        "n_iter_ tol max_iter n_init random_state",
        "of the fit: predictions read weights, means and precisions",
    ),
    LeftOut(
        "sklearn.decomposition._base._BasePCA sklearn.preprocessing._data.*",
        "n_samples_seen_ tol random_state",
        "of the fit: transforms read components, means and scales",
    ),
)


@functools.lru_cache(4096)
def left_out_of(cls: type) -> frozenset[str]:
    """Return the attributes of a class, and of its bases, that are no part of what it computes."""
    bases = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__ if not is_users(base)]
    found: set[str] = set()
    for row in TABLE:
        patterns = row.classes.split()
        if any(fnmatchcase(base, pattern) for base in bases for pattern in patterns):
            found.update(row.names.split())
    return frozenset(found)


# Description of any value as JSON: the same in every process, on every device.
#
# Numbers and text are as they are, arrays and tensors a digest, objects their class and state.
# Left out: paths, devices, locks, threads, loggers, random generators, what a library keeps for
# itself.

MOST_ITEMS = 64  # of a container; beyond, their digest
MOST_LEAVES = 256  # of a value
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator)
_IGNORED: tuple[type, ...] = (
    torch.device,
    torch.amp.GradScaler,
    random.Random,
    np.random.RandomState,
    logging.Logger,
    logging.Handler,
    io.IOBase,
    os.PathLike,
    types.ModuleType,
    types.GeneratorType,
    types.FrameType,
    itertools.count,
    threading.Event,
    threading.Condition,
    threading.Thread,
    threading.local,
    concurrent.futures.Executor,
    multiprocessing.pool.Pool,
    type(threading.Lock()),
    type(threading.RLock()),
    type(Ellipsis),
    type(NotImplemented),
)
_CALLABLE = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    np.ufunc,
)


class CodeSeen(Protocol):
    """Knows the code that values refer to."""

    extractor: object

    def function(self, function: types.FunctionType, *, held: str) -> str | None:
        """Return the label of a function of the user's; None for a library's."""

    def wrapper(self, wrapper: object) -> None:
        """Learn of what stands around a function: it may hold others."""

    def named(self, cls: type) -> None:
        """Learn of a class that the code, or a value, names."""

    def attributes(self, value: object) -> Mapping[str, object] | None:
        """Return the attributes of an object that count; None: its whole state."""

    def reads(self, value: object, name: str) -> bool:
        """Whether the user's code mentions an attribute of an object."""

    def module(self, module: torch.nn.Module, values: Values) -> object:
        """Describe a torch module."""


@dataclass
class Values:
    """Describes values; `code` is told of the functions and classes among them.

    `data` are none of them: a data set and its ids, however they are reached.
    """

    code: CodeSeen
    data: Sequence[object] = ()
    opaque: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen: list[object] = []  # whatever has parts, and what these have
        self.of_libraries: set[str] = set()  # names of objects whose whole state counts
        self._within: set[int] = set()
        self._known: dict[int, tuple[object, object]] = {}  # keeps the value, and so its id

    def describe(self, value: object, name: str = "") -> object:
        """Return a tree of dicts, lists, plain values and `LaterArray`; `NOTHING` if none counts.

        Raises `RecursionError` for what is nested too deep.
        """
        value = proxied(value)
        if isinstance(value, enum.Enum):
            return self._member(value, name)
        if value is None or isinstance(value, bool | int | float | str | bytes | complex):
            return plain_of(value)
        if isinstance(value, _GENERATORS):
            return seed_of(value)
        if isinstance(value, _IGNORED):
            return NOTHING
        if any(value is each for each in self.data):
            return NOTHING
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._within or value is self.code.extractor:
            return "(itself)"
        self._within.add(id(value))
        self.seen.append(value)
        try:
            found = self._describe(value, name)
        finally:
            self._within.discard(id(value))
        if not self._within:
            self._known.clear()
        else:
            self._known[id(value)] = value, found
        return found

    def _describe(self, value: Any, name: str) -> object:
        if isinstance(value, np.ndarray) or is_array(value):
            return self._array(value, name)
        if isinstance(value, contextvars.ContextVar | weakref.ref):
            held = value.get(None) if isinstance(value, contextvars.ContextVar) else value()
            return self.describe(held, name)
        if isinstance(value, np.generic):
            item = value.item()  # of a longdouble: itself
            return str(item) if isinstance(item, np.generic) else self.describe(item, name)
        if is_configuration(value):
            return self.describe(plain_configuration(value), name)
        if isinstance(value, torch.dtype | np.dtype | range | slice | torch.Size):
            return str(value)
        if isinstance(value, torch.nn.Module):
            return self.code.module(value, self)
        if callable(value) and (found := self._callable(value, name)) is not None:
            return found
        if type(value) in (dict, types.MappingProxyType):
            return self.mapping(value, name)
        if type(value) in (list, tuple, set, frozenset):
            return self.items(value, name)
        return self._object(value, name)

    def _array(self, value: Any, name: str) -> object:
        if not is_array(value):  # of objects
            return {"shape": list(value.shape), "items": self.items(value.ravel().tolist(), name)}
        if isinstance(value, np.ma.MaskedArray):
            mask = np.ma.getmaskarray(value)
            return {
                "class": "MaskedArray",
                "values": LaterArray(value.filled(0)),
                "mask": LaterArray(mask),
            }
        return LaterArray(value)

    def _member(self, value: enum.Enum, name: str) -> object:
        """Describe a member of an enumeration: a library's by its name."""
        shown = f"{type(value).__qualname__}.{value.name}"
        self.code.named(type(value))
        if not is_users(type(value)) or value.value == value.name:
            return shown
        return [shown, self.describe(value.value, name)]

    def items(self, values: Iterable[object], name: str) -> list[object]:
        """Describe the items of a list, tuple or set."""
        found = [self.describe(each, name) for each in values]
        if isinstance(values, set | frozenset):
            found.sort(key=lambda each: json.dumps(settled(each), sort_keys=True))
        return [None if each is NOTHING else each for each in found]

    def mapping(self, values: Mapping[Any, object], name: str) -> dict[str, object]:
        """Describe the values of a mapping."""
        found: dict[str, object] = {}
        for key, value in values.items():
            text = key if isinstance(key, str) else _key(self.describe(key))
            if (inner := self.describe(value, f"{name}.{text}")) is not NOTHING:
                found[unicode_of(text)] = inner
        return found

    def _callable(self, value: object, name: str) -> object:
        """Describe what can be called by its code; None for an object with state."""
        if isinstance(value, types.MethodType):
            return {
                "method": self._callable(value.__func__, name),
                "of": self.describe(value.__self__, name),
            }
        if isinstance(value, functools.partial):
            parts = {"call": self.describe(value.func), "args": self.items(value.args, name)}
            return {**parts, **self.mapping(value.keywords, name)}
        if isinstance(value, _CALLABLE):
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType | type):
                return {"method": value.__name__, "of": self.describe(owner, name)}
            return f"function {value.__name__}"
        if isinstance(value, type):
            self.code.named(value)
            return f"class {value.__qualname__}"
        inner, precisions = wrapped_by(value)
        if inner is not value and not isinstance(inner, types.FunctionType):
            called = self.describe(inner, name)  # a module, a method, a partial
            return {"call": called, "autocast": precisions} if precisions else called
        if isinstance(inner, types.FunctionType):
            self.code.wrapper(value)
            label = self.code.function(inner, held=name)
            called = f"function {inner.__qualname__ if label is None else label}"
            return {"call": called, "autocast": precisions} if precisions else called
        return None

    def _object(self, value: object, name: str) -> object:
        cls = type(value)
        attributes = self.code.attributes(value)
        if attributes is not None:
            return {"class": cls.__qualname__, **self.mapping(attributes, name)}
        self.of_libraries.add(name)
        try:
            return {"class": cls.__qualname__, **self._state(value, name)}
        except RecursionError:
            raise
        except Exception:  # whatever its class does there: no lock, no session, no handle has state
            self.opaque.append(f"{name} ({cls.__module__}.{cls.__qualname__})")
            return {"class": cls.__qualname__}

    def _kept(self, value: object, state: Mapping[object, object]) -> dict[object, object]:
        """Return the attributes of an object but for those that its library's class keeps."""
        cls: Any = type(value)
        left_out = left_out_of(cls)
        return {
            k: v for k, v in state.items() if k not in left_out or self.code.reads(value, str(k))
        }

    def _state(self, value: object, name: str) -> dict[str, object]:
        if type(value).__module__.partition(".")[0] == "tokenizers" and hasattr(value, "to_str"):
            # a call with padding=True leaves these two behind
            kept = {
                k: v
                for k, v in json.loads(value.to_str()).items()
                if k not in ("truncation", "padding")
            }
            return self.mapping(kept, name)
        registered = copyreg.dispatch_table.get(type(value))  # of regular expressions, say
        reduced = value.__reduce_ex__(4) if registered is None else registered(value)
        if isinstance(reduced, str):
            return {"name": reduced}
        make, args, state, listed, keyed = (*reduced, None, None, None)[:5]
        found: dict[str, object] = {}
        if getattr(make, "__name__", "") not in ("__newobj__", "__newobj_ex__", "_reconstructor"):
            found["made by"] = getattr(make, "__qualname__", str(type(make)))
        rest = [each for each in args if each is not type(value) and each is not object]
        if rest:
            found["args"] = self.items(rest, name)
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                found |= self.mapping(self._kept(value, part), name)
            elif part is not None:
                found["state"] = self.describe(part, name)
        if listed is not None:
            found["items"] = self.items(list(listed), name)
        if keyed is not None:
            found["items"] = self.mapping(dict(keyed), name)
        return {key: inner for key, inner in found.items() if inner is not NOTHING}


def wrapped_by(value: object) -> tuple[object, list[str]]:
    """Return what functions of libraries wrap, and the precisions that they compute it in.

    `torch.no_grad()(encoder)`, `torch.compile(encoder.forward)`, `functools.lru_cache(function)`
    wrap what they are given; a function of the user's, which may wrap another one, is followed
    itself. The precisions are those of `torch.autocast`, the outermost first.
    """
    precisions: list[str] = []
    seen: set[int] = set()
    while id(value) not in seen and not (
        isinstance(value, type | torch.nn.Module | types.MethodType)
        or is_users(value if isinstance(value, types.FunctionType) else type(value))
    ):
        seen.add(id(value))
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # not bound yet
                if isinstance(held := cell.cell_contents, torch.autocast):
                    state = f"{held.device} {held.fast_dtype}"
                    precisions.append(state if held._enabled else "off")  # noqa: SLF001
        held_by = getattr(value, "__dict__", None)
        value = held_by.get("__wrapped__", value) if isinstance(held_by, dict) else value
    return value, precisions


def settled(tree: object) -> object:
    """Return a description as plain JSON: arrays read, large parts as digests."""
    if isinstance(tree, LaterArray):
        return tree.digest()
    if hasattr(tree, "to_json"):
        return _OfModule(tree.to_json())
    if isinstance(tree, dict):
        found = {key: settled(value) for key, value in tree.items()}
        return _shown(found, len(found))
    if isinstance(tree, list):
        return _shown([settled(value) for value in tree], len(tree))
    return tree


class _OfModule(dict[str, Any]):
    """Description of a module: shown as it is, in whatever it is held."""


def _shown(tree: object, items: int) -> object:
    """Return a description, or of a large one as many levels as are small enough to be shown."""
    if items > MOST_ITEMS:
        return _digest(tree)
    depth = _depth(tree)
    while _leaves(tree) > MOST_LEAVES:
        tree, depth = _cut(tree, depth - 1), depth - 1
    return tree


def _cut(tree: object, depth: int) -> object:
    """Return a description whose parts of a depth are digests."""
    inner = _inner(tree)
    if inner is None:
        return tree
    if not depth:
        return _digest(tree)
    cut = [_cut(each, depth - 1) for each in inner]
    return dict(zip(tree, cut, strict=True)) if isinstance(tree, dict) else cut


def _depth(tree: object) -> int:
    inner = _inner(tree)
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _leaves(tree: object) -> int:
    inner = _inner(tree)
    return 1 if inner is None else sum(map(_leaves, inner))


def _inner(tree: object) -> list[object] | None:
    if isinstance(tree, _OfModule):
        return None
    return [*tree.values()] if isinstance(tree, dict) else tree if isinstance(tree, list) else None


def _digest(tree: Any) -> str:
    return f"{len(tree)} items {digest(json.dumps(tree, sort_keys=True).encode())}"


def _key(tree: object) -> str:
    return "(left out)" if tree is NOTHING else json.dumps(settled(tree), sort_keys=True)
