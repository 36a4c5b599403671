"""Features of one state in one cache, whatever changes while a process fills it."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import featcache
from featcache.extraction import process_part
from featcache.staleness.watch import Watch
from featcache.writing import part_writer, queue

IDS = [f"utt-{number}" for number in range(6)]
SCALE = 2.0
TABLE = np.arange(8, dtype=np.float32)
OPTIONS = {"shift": 1.0}
Change = Callable[["World"], object]


class Encoder(torch.nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
        self.gain = 1.0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.gain * (self.layers(values) - self.mean)
        return found


class World:
    """What features are computed with; the others count calls."""

    def __init__(self) -> None:
        self.encoder: Any = Encoder().eval()
        self.offset = 0.5
        self.computed: list[str] = []
        self.inner: Any = lambda values: values

    def features(self, id: str) -> torch.Tensor:
        self.computed.append(id)
        values = torch.full((3, 8), float(id[4:])) + torch.from_numpy(TABLE) * OPTIONS["shift"]
        with torch.no_grad():
            found: torch.Tensor = self.inner(self.encoder(values) * SCALE + self.offset)
        return found

    # of `extract` and `cache_features`
    device = "cpu"

    def compute_features(self, batch: Any, stage: object = None) -> list[dict[str, Any]]:
        return [{"id": id, "feats": self.features(id)} for id in batch]


class Cached(World, featcache.FeatureCacheMixin):
    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        return {"encoder": self.encoder}


class Given(featcache.EnvironmentProvider):
    def __init__(self, world: World, data: Any) -> None:
        self.world, self.data = world, data

    def build_env_local(self) -> Any:
        return {"dataset": self.data, "compute_features": self.world.compute_features}


class Data:
    """Items that are their ids; changes the world when the third has been computed."""

    def __init__(self, world: World, change: Change | None) -> None:
        self.ids, self._world, self._change = IDS, world, change

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, number: int) -> str:
        if self._change is not None and len({*self._world.computed}) >= 3:
            change, self._change = self._change, None
            change(self._world)
        return IDS[number]


def by_decorator(place: Path, world: World, change: Change | None) -> None:
    @featcache.cache(place)
    def feats(id: str) -> torch.Tensor:
        return world.features(id)

    read_all(feats, world, change)


def by_through(place: Path, world: World, change: Change | None) -> None:
    declared = [featcache.FeatureStorageConfig("feats", dims=(8,))]
    read_all(featcache.through(place, world.features, features=declared), world, change)


def read_all(read: Any, world: World, change: Change | None) -> None:
    with contextlib.closing(read):
        for id in IDS:
            if change is not None and len({*world.computed}) >= 3:
                change(world)
                change = None
            read(id)


def by_extract(place: Path, world: World, change: Change | None) -> None:
    given = Given(world, Data(world, change))
    declared = [featcache.FeatureStorageConfig("feats")]
    featcache.extract(given, place, declared, check=None, progressbar=False)


def by_cache_features(place: Path, world: World, change: Change | None) -> None:
    storage = featcache.FeatureStorage(place.parent, [featcache.FeatureStorageConfig("feats")])
    data = Data(world, change)
    settings: Any = {"storage": storage, "split": place.name, "progressbar": False}
    collate = {"collate_fn": list}
    world.cache_features(data, "train", check=None, loader_kwargs=collate, **settings)  # type: ignore[attr-defined]


FILLERS = [by_decorator, by_through, by_extract, by_cache_features]
Filler = Callable[[Path, World, Change | None], None]


def in_place(world: World) -> None:
    with torch.no_grad():
        world.encoder.layers[0].weight += 0.1


def trained(world: World, **settings: Any) -> None:
    with torch.enable_grad():
        world.encoder(torch.ones(1, 8)).sum().backward()
    torch.optim.Adam(world.encoder.parameters(), 0.1, **settings).step()


def loaded(world: World) -> None:
    state = {name: value + 0.1 for name, value in world.encoder.state_dict().items()}
    world.encoder.load_state_dict(state)


def of_a_container(name: str, value: Any) -> Change:
    return lambda world: globals().update({name: value})


def written_to_table(world: World) -> None:
    TABLE[3] += 1


CHANGES: dict[str, tuple[Change, str]] = {
    "a parameter in place": (in_place, r"weights of .*encoder: layers.0.weight"),
    "a parameter's data": (lambda w: w.encoder.layers[1].bias.data.add_(1), r"layers.1.bias"),
    "a new tensor as data": (
        lambda w: setattr(w.encoder.layers[1].bias, "data", torch.ones(8)),
        r"layers.1.bias",
    ),
    "a step": (trained, r"weights of .*encoder: layers"),
    "a fused step": (lambda w: trained(w, fused=True), r"weights of .*encoder: layers"),
    "other weights are loaded": (loaded, r"weights of .*encoder: layers"),
    "a module replaced": (
        lambda w: w.encoder.layers.__setitem__(0, torch.nn.Linear(8, 64)),
        r"layers.0.bias, layers.0.weight",
    ),
    "a layer more": (lambda w: w.encoder.layers.append(torch.nn.ReLU()), "layers.2"),
    "half precision": (lambda w: w.encoder.double(), "layers.0"),
    "a buffer": (lambda w: w.encoder.mean.add_(1), r"weights of .*encoder: mean"),
    "an attribute of a module": (
        lambda w: setattr(w.encoder, "gain", 3.0),
        r"gain: was 1.0, now 3",
    ),
    "an attribute": (lambda w: setattr(w, "offset", 9.0), r"offset: was 0.5, now 9"),
    "a function": (lambda w: setattr(w, "inner", lambda values: -values), "lambda"),
    "a constant": (of_a_container("SCALE", 5.0), r"SCALE: was 2.0, now 5"),
    "an item": (lambda w: OPTIONS.update(shift=4.0), r"shift.*: was 1.0, now 4"),
    "an array in place": (written_to_table, r"TABLE"),
    "another array": (of_a_container("TABLE", TABLE * 2), r"TABLE"),
}


@pytest.fixture(autouse=True)
def at_each_utterance(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is compared before and after each utterance, as of an encoder that takes its time."""
    monkeypatch.setattr(process_part, "SHARE", float("inf"))


@pytest.fixture(autouse=True)
def constants() -> Iterator[None]:
    """The constants as they are for each test."""
    yield
    globals().update(SCALE=2.0, TABLE=np.arange(8, dtype=np.float32), OPTIONS={"shift": 1.0})


def as_at_first() -> dict[str, torch.Tensor]:
    world = World()
    return {id: world.features(id) for id in IDS}


def check_stored(place: Path, expected: dict[str, torch.Tensor], *, all_of_it: bool) -> int:
    """Compare what a cache holds with the results of the first state; return how many."""
    if not (place / "featcache.json").exists():
        return 0
    cache = featcache.open(place, verify="arrays")
    for id in cache.ids:
        assert np.array_equal(cache.read(id, next(iter(cache.features))), expected[id]), id
    assert not all_of_it or cache.ids == IDS
    return len(cache)


@pytest.mark.parametrize("fill", FILLERS)
@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_between_utterances_is_refused_by_name(
    tmp_path: Path, fill: Filler, kind: str
) -> None:
    change, named = CHANGES[kind]
    place, expected = tmp_path / "cache", as_at_first()
    before: dict[str, Any] = {"SCALE": SCALE, "TABLE": TABLE.copy(), "OPTIONS": {**OPTIONS}}
    with pytest.raises(featcache.StaleCacheError, match=named):
        fill(place, Cached(), change)
    assert check_stored(place, expected, all_of_it=False) == 3
    globals().update(before)
    fill(place, Cached(), None)  # as a new process would
    check_stored(place, expected, all_of_it=True)


@pytest.mark.parametrize("fill", FILLERS)
@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_between_comparisons_is_not_stored(
    tmp_path: Path, fill: Filler, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_part, "SHARE", 1e-9)  # the next one is due in hours
    change, named = CHANGES[kind]
    place, expected = tmp_path / "cache", as_at_first()
    before: dict[str, Any] = {"SCALE": SCALE, "TABLE": TABLE.copy(), "OPTIONS": {**OPTIONS}}
    # half of the layers in another precision cannot be computed with
    with pytest.raises((featcache.StaleCacheError, RuntimeError), match=named):
        fill(place, Cached(), change)
    check_stored(place, expected, all_of_it=False)
    globals().update(before)
    fill(place, Cached(), None)
    check_stored(place, expected, all_of_it=True)


@pytest.mark.parametrize("pace", [1e-9, 0.005, float("inf")])
def test_what_is_committed_was_compared(
    tmp_path: Path, pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed leaves nothing of a state that nobody has compared."""
    monkeypatch.setattr(process_part, "SHARE", pace)
    monkeypatch.setattr(queue, "COMMIT_INTERVAL_S", 0.01)
    place, expected, world = tmp_path / "cache", as_at_first(), World()
    read: Any = featcache.through(place, world.features)
    with contextlib.suppress(featcache.StaleCacheError):
        for id in IDS:
            if id == IDS[3]:
                time.sleep(0.1)
                in_place(world)
            read(id)
            time.sleep(0.05)
    copied = shutil.copytree(place, tmp_path / "killed")
    with contextlib.suppress(featcache.StaleCacheError):
        read.close()
    for each in (copied, place):
        with featcache.through(each, World().features) as again:
            for id in IDS:
                assert np.array_equal(np.asarray(again(id)), expected[id]), id
    assert check_stored(place, expected, all_of_it=True) == len(IDS)


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("end", ["publish", "close"])
def test_what_changes_before_a_publish_concerns_only_what_is_computed_then(
    tmp_path: Path, kind: str, end: str
) -> None:
    place, expected, world = tmp_path / "cache", as_at_first(), World()
    read = featcache.through(place, world.features)
    read("utt-0"), read("utt-1")
    CHANGES[kind][0](world)
    getattr(read, end)()
    assert check_stored(place, expected, all_of_it=False) == 2
    # closed, it begins anew, and is compared with the cache
    says = CHANGES[kind][1] if end == "publish" else "made from something else than is declared"
    with pytest.raises(featcache.StaleCacheError, match=says):
        read("utt-2")
    read.close()
    assert check_stored(place, expected, all_of_it=False) == 2


@pytest.mark.parametrize("fill", FILLERS)
def test_what_no_counter_shows_is_dropped_before_the_publish(tmp_path: Path, fill: Filler) -> None:
    place, expected = tmp_path / "cache", as_at_first()

    def change(world: World) -> None:  # one value, of those that are not looked at each time
        world.encoder.layers[0].weight.data[5, 5] += 1

    with pytest.raises(featcache.StaleCacheError, match=r"while it was filled:\s+weights of .*0"):
        fill(place, Cached(), change)
    assert check_stored(place, expected, all_of_it=False) == 0
    fill(place, Cached(), None)
    check_stored(place, expected, all_of_it=True)


class Learning(torch.nn.Module):
    """A normaliser as libraries have them, that learns in training mode."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(values.mean(0), alpha=0.1)
        return values - self.mean


@pytest.mark.parametrize("fill", FILLERS[:3])  # the last evaluates
def test_a_module_that_computing_changes_is_refused_with_a_way_out(
    tmp_path: Path, fill: Filler
) -> None:
    world = World()
    world.inner = Learning()
    way_out = r"while 'utt-0' was computed(.|\n)*weights of .*inner: mean(.|\n)*module.eval\(\)"
    with pytest.raises(featcache.StaleCacheError, match=way_out):
        fill(tmp_path / "cache", world, None)
    assert check_stored(tmp_path / "cache", {}, all_of_it=False) == 0
    world.inner.eval()
    fill(tmp_path / "cache", world, None)
    assert len(featcache.open(tmp_path / "cache")) == len(IDS)


LIBRARY = '''
class Words:
    """Counts, and fills a table when it is first asked."""

    def __init__(self):
        self.asked, self.table, self.late = 0, {}, 0

    def note_late(self):
        self.late += 1

    def __call__(self, values):
        self.asked += 1
        self.table.setdefault(float(values.sum()), len(self.table))
        return values
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "filling_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("filling_library")
    del sys.modules["filling_library"]


@pytest.mark.parametrize("fill", FILLERS)
def test_what_computing_leaves_on_objects_of_libraries_is_no_change(
    tmp_path: Path, fill: Filler, library: Any
) -> None:
    world = Cached()
    world.inner = library.Words()
    fill(tmp_path / "cache", world, None)
    check_stored(tmp_path / "cache", as_at_first(), all_of_it=True)
    assert len(world.computed) <= 3 * len(IDS)  # a few times more, to see that it is none
    fresh = Cached()
    fresh.inner = library.Words()
    fill(tmp_path / "cache", fresh, None)
    assert len(fresh.computed) <= 4  # to compare them: none is missing


HARMLESS: dict[str, Change] = {
    "another mode": lambda w: w.encoder.train(),
    "gradients": lambda w: w.encoder.requires_grad_(False),
    "what has gradients": lambda w: torch.enable_grad()(
        lambda: w.encoder(torch.ones(1, 8)).sum().backward()
    )(),
    "a move to where it is": lambda w: w.encoder.to("cpu", torch.float32),
    "the same weights": lambda w: w.encoder.load_state_dict(w.encoder.state_dict()),
    "copies of the weights": lambda w: w.encoder.load_state_dict(
        {name: value.clone() for name, value in w.encoder.state_dict().items()}, assign=True
    ),
    "the same value": lambda w: setattr(w, "offset", float("0.5")),
    "an equal array": lambda w: globals().update(TABLE=TABLE.copy()),
    "memory that is shared": lambda w: w.encoder.share_memory(),
    "what nobody reads": lambda w: setattr(w, "comment", "new"),
}


@pytest.mark.parametrize("fill", FILLERS)
@pytest.mark.parametrize("kind", HARMLESS)
def test_what_counts_for_nothing_is_not_refused(tmp_path: Path, fill: Filler, kind: str) -> None:
    world = Cached()
    fill(tmp_path / "cache", world, HARMLESS[kind])
    assert list(dict.fromkeys(world.computed)) == IDS
    assert len(world.computed) <= len(IDS) + 2  # the first one, to see that
    check_stored(tmp_path / "cache", as_at_first(), all_of_it=True)


def interrupted(watch: Watch) -> Any:
    Watch.found(watch)  # type: ignore[attr-defined]
    raise KeyboardInterrupt


def test_an_interrupt_while_it_is_found_out_stores_nothing_of_the_second_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, expected, world = tmp_path / "cache", as_at_first(), World()
    read: Any = featcache.through(place, world.features)
    read("utt-0")
    monkeypatch.setattr(process_part, "SHARE", 1e-9)
    read("utt-1")
    world.offset = 9.0
    read("utt-2")
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "found", Watch.differences, raising=False)
        patch.setattr(Watch, "differences", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read.publish()
    read("utt-3")  # which is not looked at yet
    with pytest.raises(featcache.StaleCacheError, match=r"offset: was 0\.5, now 9\.0"):
        read.close()
    check_stored(place, expected, all_of_it=False)
    with featcache.through(place, World().features) as again:
        for id in IDS:
            assert np.array_equal(np.asarray(again(id)), expected[id]), id


def test_an_interrupt_while_it_is_found_out_that_nothing_has_changed_is_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, world = tmp_path / "cache", World()
    read: Any = featcache.through(place, world.features)
    for id in IDS:
        read(id)
        with monkeypatch.context() as patch:
            patch.setattr(Watch, "found", Watch.differences, raising=False)
            patch.setattr(Watch, "differences", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read.publish()
    read.close()
    check_stored(place, as_at_first(), all_of_it=True)


def test_what_an_interrupted_computing_has_left_is_no_change(tmp_path: Path, library: Any) -> None:
    world, words = World(), library.Words()

    def inner(values: torch.Tensor) -> torch.Tensor:
        words(values)
        if world.computed[-1] == "utt-2" and world.computed.count("utt-2") == 1:
            words.note_late()
            raise KeyboardInterrupt
        return values

    world.inner = inner
    read: Any = featcache.through(tmp_path / "cache", world.features)
    read("utt-0"), read("utt-1")
    with pytest.raises(KeyboardInterrupt):
        read("utt-2")
    with contextlib.closing(read):
        for id in IDS:
            read(id)
    check_stored(tmp_path / "cache", as_at_first(), all_of_it=True)


@pytest.mark.parametrize("fill", [by_extract, by_cache_features])  # the others may be closed again
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_last_comparison_that_fails_publishes_nothing_of_the_second_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Filler, error: type[BaseException]
) -> None:
    def fails(watch: Watch) -> Any:
        raise error

    def change(world: World) -> None:  # which nothing quick shows
        world.encoder.layers[0].weight.data[5, 5] += 1
        monkeypatch.setattr(Watch, "differences", fails)

    place, expected = tmp_path / "cache", as_at_first()
    with pytest.raises(error):
        fill(place, Cached(), change)
    check_stored(place, expected, all_of_it=False)


def test_what_has_become_too_deep_to_be_compared_is_refused(tmp_path: Path) -> None:
    place, history, settings = tmp_path / "cache", [0], {"gain": 1}

    def feats(id: str) -> NDArray[np.float32]:
        return np.full(3, int(id[4:]) * settings["gain"] * len(history), np.float32)

    read: Any = featcache.through(place, feats)
    read("utt-1")
    read.publish()
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    history[0] = deep  # type: ignore[call-overload]
    settings["gain"] = 100
    with pytest.raises(featcache.errors.ConfigError, match="nested too deep"):
        read("utt-2")
    while deep:
        deep = deep.pop()
    with contextlib.suppress(featcache.StaleCacheError):
        read.close()
    check_stored(place, {"utt-1": torch.ones(3)}, all_of_it=False)


def test_what_is_changed_after_an_interrupted_computing_is_refused(tmp_path: Path) -> None:
    """As in a notebook: Ctrl-C, another setting, the same call."""
    place, expected, world = tmp_path / "cache", as_at_first(), World()

    def inner(values: torch.Tensor) -> torch.Tensor:
        if world.computed[-1] == "utt-2" and world.offset != 9.0:
            raise KeyboardInterrupt
        return values

    world.inner = inner
    read: Any = featcache.through(place, world.features)
    read("utt-0"), read("utt-1")
    with pytest.raises(KeyboardInterrupt):
        read("utt-2")
    world.offset = 9.0
    with pytest.raises(featcache.StaleCacheError, match=r"offset: was 0\.5, now 9\.0"):
        read("utt-2")
    with contextlib.suppress(featcache.StaleCacheError):
        read.close()
    check_stored(place, expected, all_of_it=False)


@pytest.mark.parametrize("fails", [False, True])
def test_a_refused_function_that_is_called_again_does_not_pass_for_the_one_of_before(
    tmp_path: Path, fails: bool
) -> None:
    place, table = tmp_path / "cache", np.arange(1000, dtype=np.float32)

    def feats(id: str) -> NDArray[np.float32]:
        if fails and id == "utt-2" and table[1] != 1:
            raise ValueError
        return table[:4] + int(id[4:])

    read: Any = featcache.through(place, feats)
    read("utt-0")
    read.publish()
    read("utt-1")
    table[1] = 77  # which the quick comparison does not look at
    with contextlib.suppress(ValueError):
        read("utt-2")
    with pytest.raises(featcache.StaleCacheError):
        read.close()
    with pytest.raises(featcache.StaleCacheError, match="made from something else"):
        read("utt-3")
    with contextlib.suppress(featcache.StaleCacheError):
        read.close()
    cache = featcache.open(place)
    for id in cache.ids:
        assert np.array_equal(cache.read(id, "feats"), np.arange(4) + int(id[4:]))


def test_a_full_part_is_sealed_only_after_a_whole_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 2)
    place, expected, world = tmp_path / "cache", as_at_first(), World()
    read: Any = featcache.through(place, world.features)
    read("utt-0")
    world.encoder.layers[0].weight.data[5, 5] += 1  # which nothing quick shows
    with pytest.raises(featcache.StaleCacheError):
        read_all(read, world, None)
    assert check_stored(place, expected, all_of_it=False) == 0


BY_SPEAKER = {"utt-0": 1.0, "utt-4": 1.0}
MEANS = np.ones((200, 8), np.float32)


class Speakers(World):
    """What a speaker has, so that the first utterance tells nothing of the others."""

    def features(self, id: str) -> torch.Tensor:
        row = torch.from_numpy(MEANS[15 * int(id[4:])])
        return super().features(id) * BY_SPEAKER.get(id, 1.0) * row


def one_of_a_table(world: World) -> None:
    BY_SPEAKER["utt-4"] = 9.0


def one_row(world: World) -> None:
    MEANS[60] = 7


def same_weights_back(world: World) -> None:
    """An average of weights is loaded for one call, and these are put back."""
    state = {name: value.clone() for name, value in world.encoder.state_dict().items()}
    world.encoder.load_state_dict({name: value + 1 for name, value in state.items()})
    world.swapped_read("utt-3")  # type: ignore[attr-defined]
    world.encoder.load_state_dict(state)


@pytest.mark.parametrize("share", [1e-9, 0.005, float("inf")])
@pytest.mark.parametrize("change", [one_of_a_table, one_row, same_weights_back])
def test_a_change_that_the_first_utterance_does_not_show_is_not_stored(
    tmp_path: Path, change: Change, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_part, "SHARE", share)
    monkeypatch.setitem(BY_SPEAKER, "utt-4", 1.0)
    monkeypatch.setattr(sys.modules[__name__], "MEANS", np.ones((200, 8), np.float32))
    place, world = tmp_path / "cache", Speakers()
    expected = {id: Speakers().features(id) for id in IDS}
    read: Any = featcache.through(place, world.features)
    world.swapped_read = read  # type: ignore[attr-defined]
    with contextlib.suppress(featcache.StaleCacheError):
        read_all(read, world, change)
    with contextlib.suppress(featcache.StaleCacheError):
        read.close()
    BY_SPEAKER["utt-4"], MEANS[60] = 1.0, 1
    with featcache.through(place, Speakers().features) as again:
        for id in IDS:
            assert np.array_equal(np.asarray(again(id)), expected[id]), id


def test_a_call_that_fails_excuses_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    read: Any = featcache.through(tmp_path / "cache", world.features)
    read("utt-0"), read("utt-1")
    monkeypatch.setattr(process_part, "SHARE", 1e-9)
    read("utt-3")
    world.offset = 9.0
    with pytest.raises(ValueError, match="could not convert"):
        read("utt-x")
    with pytest.raises(featcache.StaleCacheError, match=r"offset: was 0.5, now 9"):
        read("utt-2")


@pytest.mark.parametrize("share", [1e-9, 0.005, float("inf")])
def test_a_mode_that_draws_at_random_is_refused_whenever_it_comes(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_part, "SHARE", share)
    world = World()
    world.inner = torch.nn.Dropout(0.5).eval()
    place, expected = tmp_path / "cache", as_at_first()
    read: Any = featcache.through(place, world.features)
    with pytest.raises(featcache.StaleCacheError):
        read_all(read, world, lambda world: world.inner.train())
    with contextlib.suppress(featcache.StaleCacheError):
        read.close()
    check_stored(place, expected, all_of_it=False)
