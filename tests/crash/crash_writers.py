"""What is written, in which layouts; and the writer that every crash is followed by."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from crash_promises import TAG, Model, tell
from store_helpers import Arrays, arrays_of, id_of

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import NotACacheError
from featcache.format import Stamps
from featcache.store import open_features
from featcache.writing.part_writer import PartWriter

ALL = range(30)
PLACE = Path("exp", "train")  # of the cache, in the root of the disk; no writer is given its parent
LAYOUTS = {  # of `fbank` and of `units`
    "memmap": (("memmap", "raw"), ("memmap", "raw")),
    "hdf5": (("hdf5", "raw"), ("hdf5", "raw")),
    "hdf5-gzip": (("hdf5", "gzip"), ("hdf5", "raw")),
    "lilcom": (("lilcom", "lilcom"), ("memmap", "raw")),
    "webdataset": (("webdataset", "raw"), ("webdataset", "raw")),
    "zarr": (("zarr", "raw"), ("zarr", "raw")),
    "zarr-zstd": (("zarr", "zstd"), ("zarr", "raw")),
    "zarr-blosc": (("zarr", "blosc"), ("zarr", "raw")),
}
ENERGY = FeatureStorageConfig("energy")  # added later
PART_ROWS = 4  # of the part writers: small, so that parts follow one another


def features_of(layout: str) -> list[FeatureStorageConfig]:
    """Return the declarations of a layout."""
    fbank, units = LAYOUTS[layout]
    return [
        FeatureStorageConfig("fbank", backend=fbank[0], codec=fbank[1]),
        FeatureStorageConfig("units", dtype="int16", backend=units[0], codec=units[1]),
    ]


def made_from(model: Model) -> dict[str, object]:
    """Return the fingerprint of a model."""
    return {"model": model}


def utterance(number: int, model: Model = "new") -> Arrays:
    """Return the arrays that a model computes of an utterance."""
    return arrays_of(number + (0 if model == "new" else 1000))


def energy_of(number: int) -> Arrays:
    """Return the arrays of the feature that is added."""
    return {"energy": np.full((number, 1), number, np.float32)}


def stamps_of(number: int, model: Model = "new") -> Stamps:
    """Return the stamps of an utterance that were not changed."""
    return Stamps(number + (1 if model == "new" else 1001), 1)


def text_of(number: int, model: Model = "new") -> str:
    """Return the annotation with which an utterance is written."""
    return f"{model} {number}"


def annotate(path: Path, numbers: Iterable[int], given: str) -> None:
    """Give utterances an annotation, and one of the feature that is added; telling so."""
    cache = featcache.open(path)
    values = {"given": given} | ({"quality": given} if ENERGY.name in cache.features else {})
    tell("giving", [], file=given)
    cache.annotate({id_of(number): values for number in numbers})
    tell("given", [], file=given)


def add_energy(path: Path, quality: str) -> None:
    """Add a feature, and an annotation with it, in several commits."""
    writer = CacheWriter(path, [ENERGY], made_from("new"))
    for number in range(10):
        writer.write(id_of(number), energy_of(number), annotations={"quality": quality})
        if number in (3, 6):
            writer.commit()
    writer.close()


def open_writer(
    path: Path, layout: str, model: Model = "new", overwrite: bool = False
) -> CacheWriter:
    """Start a writer of a layout, telling what readers see once it has started."""
    if not overwrite:
        tell("opening", [])
    writer = CacheWriter(path, features_of(layout), made_from(model), overwrite=overwrite)
    cache = open_features(path, ["fbank"])
    tell("opened", numbers_in(cache), model_in(cache))
    return writer


def open_part_writer(path: Path, layout: str) -> PartWriter:
    """Start a part writer, with small parts."""
    sys.modules[PartWriter.__module__].PART_ROWS = PART_ROWS  # type: ignore[attr-defined]
    return PartWriter(path, features_of(layout), made_from("new"))


def write(writer: CacheWriter | PartWriter, numbers: Iterable[int], model: Model = "new") -> None:
    """Write utterances."""
    for number in numbers:
        arrays, stamps = utterance(number, model), stamps_of(number, model)
        told = {"text": text_of(number, model)}
        writer.write(id_of(number), arrays, annotations=told, stamps=stamps)


def commit(writer: CacheWriter | PartWriter, numbers: Iterable[int]) -> None:
    """Write utterances, and tell once they are committed."""
    write(writer, numbers)
    writer.commit()
    tell("committed", numbers)


def publish(
    writer: CacheWriter, numbers: Iterable[int], stamps: Mapping[int, int] | None = None
) -> None:
    """Publish, telling what is in the cache then; `stamps` are entry stamps by number."""
    tell("publishing", numbers, stamps=stamps)
    writer.publish()
    tell("published", numbers, stamps=stamps)


def restamp(writer: CacheWriter, stamps: Mapping[int, int]) -> None:
    """Give stored utterances other entry stamps."""
    writer.restamp(
        {id_of(number): Stamps(stamps_of(number).input, entry) for number, entry in stamps.items()}
    )


def delete(
    writer: CacheWriter, numbers: Iterable[int], left: Mapping[int, int] | None = None
) -> None:
    """Delete utterances, telling what is left for readers, with entry stamps.

    None: they see another build.
    """
    tell("deleting", numbers)
    if left is not None:
        tell("publishing", left, stamps=left)
    writer.delete(map(id_of, numbers))
    tell("deleted", numbers)
    if left is not None:
        tell("published", left, stamps=left)


def delete_from(cache: featcache.Cache, numbers: Iterable[int], left: Mapping[int, int]) -> None:
    """Delete utterances without a writer, telling what is left, with entry stamps."""
    tell("deleting", numbers)
    tell("publishing", left, stamps=left)
    cache.delete(map(id_of, numbers))
    tell("deleted", numbers)
    tell("published", left, stamps=left)
    cache.refresh()


def tag(cache: featcache.Cache) -> None:
    """Tag a generation, telling so."""
    cache.tag(TAG)
    tell("tagged", numbers_in(cache))


def compact(cache: featcache.Cache, erased: Iterable[int]) -> None:
    """Compact a cache, and give up its tag, telling what is erased."""
    tell("untagging", [])
    cache.compact(drop_tags=True)
    tell("erased", erased)


def keep_file(writer: CacheWriter, file: str) -> None:
    """Keep a probe, telling so."""
    tell("keeping", [], file=file)
    writer.keep_file("probe", file.encode())
    tell("kept", [], file=file)


def close(writer: CacheWriter, numbers: Iterable[int], model: Model = "new") -> None:
    """Close, telling what is in the cache then."""
    tell("publishing", numbers, model)
    writer.close()
    tell("published", numbers, model)


def model_in(cache: featcache.Cache) -> Model:
    """Return the model that a cache was made from."""
    return "new" if cache.fingerprint["model"] == "new" else "old"


def numbers_in(cache: featcache.Cache) -> set[int]:
    """Return the utterances of a cache."""
    numbers = {id_of(number): number for number in ALL}
    return {numbers[id] for id in cache}


def model_of(path: Path) -> Model | None:
    """Return the model of the cache that readers see; None if there is no cache."""
    try:
        return model_in(featcache.open(path))
    except NotACacheError:
        return None


def go_on(path: Path, layout: str) -> set[int]:
    """Write what a crash has left to do; returns the utterances that were there."""
    writer = open_writer(path, layout, overwrite=model_of(path) == "old")
    there = {number for number in ALL if id_of(number) in writer}
    missing = [number for number in ALL if number not in there]
    tell("again", missing)
    half = len(missing) // 2
    commit(writer, missing[:half])
    write(writer, missing[half:])
    close(writer, ALL)
    return there


def oracle(directory: Path, layout: str, model: Model) -> dict[int, Arrays]:
    """Return what readers must see of each utterance: as written, or as a lossy codec leaves it."""
    with CacheWriter(directory, features_of(layout), made_from(model)) as writer:
        write(writer, ALL, model)
    cache = featcache.open(directory)
    found = {number: cache[id_of(number)] for number in ALL}
    for number, arrays in found.items():
        for name, array in utterance(number, model).items():
            np.testing.assert_allclose(arrays[name], array, atol=0.05 if layout == "lilcom" else 0)
    return found
