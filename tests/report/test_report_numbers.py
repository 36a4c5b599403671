"""Each number on the page is that which NumPy computes from the arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from report_caches import (
    DIMS,
    FRAME_S,
    Array,
    Page,
    Utterance,
    report,
    utterances,
    with_faults,
    write,
)

import featcache
from featcache.registry import get_codec
from featcache.report_page.facts import facts_of

BATCH = 32


@pytest.fixture(scope="module")
def made() -> dict[str, Utterance]:
    return with_faults()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, made: dict[str, Utterance]) -> Path:
    return write(tmp_path_factory.mktemp("report") / "cache", made, failed=("utt-lost",))


@pytest.fixture(scope="module")
def page(cache: Path) -> Page:
    return report(cache.with_name("report.html"), cache)[1]


def padding(lengths: Array, buckets: int) -> float:
    """Padding of random batches in buckets of as many frames each, by definition."""
    ordered = np.sort(lengths)
    sums = np.cumsum(ordered)
    borders = {
        int(ordered[np.argmax(sums >= sums[-1] * (k + 1) / buckets)]) for k in range(buckets)
    }
    stored = held = 0.0
    low = -1
    for border in sorted(borders | {int(ordered[-1])}):
        mine = ordered[(ordered > low) & (ordered <= border)]
        low = border
        if not len(mine):
            continue
        below = np.array([np.mean(mine <= length) for length in np.unique(mine)]) ** BATCH
        held += len(mine) * float((np.unique(mine) * np.diff(below, prepend=0)).sum())
        stored += float(mine.sum())
    return 1 - stored / held


def test_tiles_and_storage(page: Page, made: dict[str, Utterance], cache: Path) -> None:
    frames = sum(len(each.fbank) for each in made.values())
    units = sum(len(each.units) for each in made.values())
    opened = featcache.open(cache)
    sizes = {"fbank": frames * DIMS * 4, "units": units}
    files = [file for file in cache.rglob("parts/*/*") if file.suffix == ".npy"]
    expected = {
        "utterances": len(made),
        "expected": len(made) + 1,
        "missing": 0,
        "failed": 1,
        "generation": opened.generation,
        "hours": frames * FRAME_S / 3600,
        "frames of fbank": frames,
        "bytes": sum(sizes.values()),
        "bytes of fbank": sizes["fbank"],
        "bytes of units": units,
        "share of fbank": 1,
        "share of units": 1,
        "float16 bytes of fbank": sizes["fbank"] / 2,
        "zstd of fbank": compressed(made, "fbank", np.float32),
        "float16 zstd of fbank": compressed(made, "fbank", np.float16),
        "zstd of units": compressed(made, "units", np.uint8),
        "files": len(files),
        "parts": 1,
        "bytes of files": sum(file.stat().st_size for file in files),
        "bytes beside": sum(file.stat().st_size for file in files) - sum(sizes.values()),
    }
    assert {name: page.numbers[name] for name in expected} == pytest.approx(expected)


def compressed(made: dict[str, Utterance], name: str, dtype: type[np.generic]) -> int:
    """Bytes of all arrays, each by itself, with zstd at its usual level."""
    codec = get_codec("zstd")()
    arrays = [getattr(each, name).astype(dtype) for each in made.values()]
    return sum(len(codec.encode(array)) for array in arrays if array.size)


def test_lengths_and_padding(page: Page, made: dict[str, Utterance]) -> None:
    for name in ("fbank", "units"):
        lengths = np.array([len(getattr(each, name)) for each in made.values()])
        quantiles = {"shortest": 0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9,
                     "99 %": 0.99, "longest": 1}  # fmt: skip
        for what, share in quantiles.items():
            told = page.numbers[f"{name} {what}"]
            assert told == np.quantile(lengths, share, method="inverted_cdf"), what
        assert page.numbers[f"{name} mean"] == pytest.approx(lengths.mean())
        bins = {
            int(key.split(" bin ")[1].replace(",", "")): count
            for key, count in page.numbers.items()
            if key.startswith(f"{name} bin ")
        }
        edges = [*bins, 2 * max(bins) - sorted(bins)[-2]]
        assert [*bins.values()] == np.histogram(lengths, edges)[0].tolist()
        assert sum(bins.values()) >= 0.98 * len(lengths)
        for buckets in (1, 2, 4, 8, 16, 32):
            told = page.numbers[f"{name} padding {buckets}"]
            assert told == pytest.approx(padding(lengths, buckets), abs=1e-12)


def test_padding_is_that_of_batches_that_are_drawn(page: Page, made: dict[str, Utterance]) -> None:
    lengths = np.array([len(each.fbank) for each in made.values()])
    drawn = np.random.default_rng(0).choice(lengths, (20_000, BATCH))
    found = 1 - drawn.sum() / (BATCH * drawn.max(1).sum())
    assert page.numbers["fbank padding 1"] == pytest.approx(found, abs=0.01)


def test_values(page: Page, made: dict[str, Utterance]) -> None:
    finite = np.concatenate([e.fbank for e in made.values() if np.isfinite(e.fbank).all()])
    expected = {"fbank least": finite.min(), "fbank largest": finite.max(), "fbank not finite": 3}
    for dim in range(DIMS):
        expected[f"fbank mean {dim}"] = finite[:, dim].mean(dtype=float)
        expected[f"fbank deviation {dim}"] = finite[:, dim].std(dtype=float)
    assert {name: page.numbers[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_values_of_each_utterance(cache: Path, made: dict[str, Utterance]) -> None:
    """By which they are compared; far from zero, too, where squares swallow the deviation."""
    config = featcache.FeatureStorageConfig("x", dims=[DIMS])
    far = {id: each.fbank + np.float32(1e4) for id, each in made.items() if len(each.fbank)}
    far = {id: array for id, array in far.items() if np.isfinite(array).all()}
    with featcache.CacheWriter(cache.with_name("far"), [config]) as writer:
        for id, array in far.items():
            writer.write(id, {"x": array})
    facts = facts_of(featcache.open(cache.with_name("far")), {}, None, 0)
    found = facts.values[0].utterances
    for row, id in enumerate(facts.table.ids):
        array = far[id].astype(float)
        assert (found.least[row], found.most[row]) == (array.min(), array.max())
        assert found.at_least[row] == np.count_nonzero(array == array.min())
        assert found.at_most[row] == np.count_nonzero(array == array.max())
        assert found.mean[row] == pytest.approx(array.mean(), rel=1e-7)
        assert found.std[row] == pytest.approx(array.std(), rel=1e-4, abs=1e-4)


def test_the_scale_of_pictures_is_that_of_frames_evenly_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcache.report_page.values.SPREAD_FRAMES", 100)
    monkeypatch.setattr("featcache.report_page.values.AT_ONCE_BYTES", 5000)
    made = utterances()
    facts = facts_of(featcache.open(write(tmp_path / "cache", made)), {}, None, 0)
    every = np.concatenate([made[id].fbank for id in sorted(made)])  # as they lie
    some = every[:: -(-len(every) // 100)]
    assert np.array_equal(facts.values[0].frames, some)
    assert facts.values[0].scale == pytest.approx(np.percentile(some, [1, 99]), rel=1e-6)


def test_tokens(page: Page, made: dict[str, Utterance]) -> None:
    tokens = np.concatenate([each.units for each in made.values()])
    values, counts = np.unique(tokens, return_counts=True)
    expected: dict[str, float] = {
        "units used": len(values),
        "units unused": int(tokens.max()) + 1 - len(values),
        "units tokens": len(tokens),
    }
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        expected[f"units token {value}"] = count
        expected[f"units share {value}"] = count / len(tokens)
    assert {name: page.numbers[name] for name in expected} == pytest.approx(expected)


def test_annotations(page: Page, made: dict[str, Utterance]) -> None:
    total = sum(len(each.fbank) for each in made.values())
    expected: dict[str, float] = {"values of speaker": 4}
    shares = []
    for speaker in {each.speaker for each in made.values()}:
        mine = [len(each.fbank) for each in made.values() if each.speaker == speaker]
        shares.append(sum(mine) / total)
        expected |= {f"speaker {speaker} utterances": len(mine),
                     f"speaker {speaker} hours": sum(mine) * FRAME_S / 3600,
                     f"speaker {speaker} share": shares[-1]}  # fmt: skip
    snr = np.array([each.snr for each in made.values()])
    spoken = [(len(e.fbank), len(e.text)) for e in made.values() if e.text and len(e.fbank)]
    texts = [each.text for each in made.values() if each.text is not None]
    expected |= {"speaker largest share": max(shares), "snr least": snr.min(),
                 "snr most": snr.max(), "snr median": float(np.median(snr)), "snr mean": snr.mean(),
                 "text characters": sum(map(len, texts)),
                 "text rate": float(np.median([a / b for a, b in spoken]))}  # fmt: skip
    assert {name: page.numbers[name] for name in expected} == pytest.approx(expected)
    fields = [key for key in page.numbers if key.startswith("text bin ")]
    assert sum(page.numbers[key] for key in fields) == len(texts)
    assert sum(v for k, v in page.numbers.items() if k.startswith("snr bin ")) == len(made)


def robust(values: Array) -> Array:
    median = np.nanmedian(values)
    away = np.abs(values - median) / (1.4826 * np.nanmedian(np.abs(values - median)))
    return np.asarray(away - 1500 / np.isfinite(values).sum() ** 2)  # the limit is higher


def odd_ids(made: dict[str, Utterance]) -> dict[str, set[str]]:
    """The ids that each rule names, by its definition."""
    ids = list(made)
    whole = {id: each.fbank for id, each in made.items() if np.isfinite(each.fbank).all()}
    most = max(array.max(initial=-np.inf) for array in whole.values())
    least = min(array.min(initial=np.inf) for array in whole.values())
    constant = {id for id, a in whole.items() if a.size and np.ptp(a) == 0}
    varied = {id: a for id, a in whole.items() if a.size and id not in constant}
    means = robust(np.array([array.mean(dtype=float) for array in varied.values()]))
    spreads = robust(np.array([array.std(dtype=float) for array in varied.values()]))
    lengths = {name: np.array([len(getattr(each, name)) for each in made.values()])
               for name in ("fbank", "units")}  # fmt: skip

    def long(name: str) -> set[str]:
        logs = np.log(np.where(lengths[name] > 0, lengths[name], np.nan))
        return {id for id, away in zip(ids, robust(logs), strict=True) if away > 4}

    rates = np.array([len(e.fbank) / len(e.text) if e.text and len(e.fbank) else np.nan
                      for e in made.values()])  # fmt: skip
    return {
        "not finite": set(ids) - set(whole),
        "empty": {id for id in ids if not len(made[id].fbank) or not len(made[id].units)},
        "equal frames": {"utt-05", "utt-13"},
        "doubled": {"utt-09", "utt-11"},
        "out of step": {"utt-23"},
        "clipped": {id for id, a in varied.items()
                    if np.mean(a == most) > 0.01 or np.mean(a == least) > 0.01},
        "level": {id for id, away in zip(varied, means, strict=True) if away > 6},
        "spread": {id for id, away in zip(varied, spreads, strict=True) if away > 6},
        "length": long("fbank") | long("units"),
        "speech rate": {id for id, away in zip(ids, robust(np.log(rates)), strict=True)
                        if away > 4},
    }  # fmt: skip


def test_findings_name_the_utterances_that_the_rules_name(
    cache: Path, made: dict[str, Utterance]
) -> None:
    found, page = report(cache.with_name("findings.html"), cache)
    told = {each.kind: set(each.ids) for each in found.findings if each.ids}
    expected = odd_ids(made) | {"failed": {"utt-lost"}}
    expected["constant"] = {"utt-03", "utt-19"}  # of one the fbank, of one the tokens
    assert told == expected
    assert page.numbers["odd"] == len(set().union(*expected.values()) - {"utt-lost"})
    counts = {each.kind: each.count for each in found.findings}
    assert all(counts[kind] == len(ids) for kind, ids in expected.items())
    assert counts["dead dims"] == 1
    assert "frames 4 to 9 are equal" in page.words
    assert "3 of its values are NaN or infinite" in page.words
    for id in ("utt-09", "utt-11"):
        assert f"the same array as {id!r}" in page.words
    assert "units: it ends 10 frames after fbank" in page.words
    assert f"{len(made['utt-19'].fbank):,} frames, the median is" in page.words


def test_every_number_has_a_name_that_a_test_knows(page: Page, made: dict[str, Utterance]) -> None:
    """But for numbers of dims and tokens, which are the names of rows."""
    assert all(value == int(value) and 0 <= value < 256 for value in page.unnamed)
    known = ("fbank ", "units ", "bytes", "float16 ", "zstd ", "share of ", "speaker ", "snr ",
             "text ", "frames of ", "values of ")  # fmt: skip
    alone = {"utterances", "hours", "generation", "expected", "missing", "failed", "odd", "files",
             "parts"}  # fmt: skip
    others = {name for name in page.numbers if not name.startswith(known)}
    assert others == alone
    for id in made:
        if f"frames of {id}" in page.numbers:
            assert page.numbers[f"frames of {id}"] == len(made[id].fbank)


def test_a_cache_without_fault_is_said_to_be_fine(tmp_path: Path) -> None:
    found, page = report(tmp_path / "report.html", write(tmp_path / "cache", utterances()))
    assert {each.level for each in found.findings} == {"fine"}
    assert "no utterance is odd" in page.words
    assert "no dead, loud or clipped dimension" in page.words


def test_a_sample_says_so_beside_each_figure(tmp_path: Path) -> None:
    made = utterances(200)
    cache = write(tmp_path / "cache", made)
    found, page = report(tmp_path / "report.html", cache, sample=50, seed=3)
    assert (found.sampled, found.of) == (50, 200)
    assert page.numbers["sampled"] == 50
    assert page.words.count("from 50 of 200 utterances") >= 5
    assert "no utterance is odd, among 50 that were read" in page.words
    assert page.numbers["utterances"] == 200
    assert "≈" in page.words  # bytes with zstd
    lengths = [len(each.fbank) for each in made.values()]
    assert page.numbers["fbank longest"] == max(lengths)
    assert page.numbers["fbank mean"] == pytest.approx(np.mean(lengths))
    shorter = report(tmp_path / "again.html", cache, sample=50, seed=3)[1]
    assert shorter.numbers == page.numbers
    assert report(tmp_path / "all.html", cache, sample="all")[0].sampled == 200


def test_a_sample_is_the_same_for_two_versions_of_a_cache(tmp_path: Path) -> None:
    """So that the versions are compared on the same utterances."""
    made = utterances(100)
    few = {id: each for id, each in made.items() if id != "utt-50"}
    drawn = []
    for name, some in (("a", made), ("b", few)):
        cache = featcache.open(write(tmp_path / name, some))
        facts = facts_of(cache, {}, 20, 0)
        drawn.append({facts.table.id(row) for row in facts.chosen.drawn.tolist()})
    assert len(drawn[0] ^ drawn[1]) <= 2
