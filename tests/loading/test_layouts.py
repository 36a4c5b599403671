"""Layouts of a batch: packed and jagged hold what padded holds, and attention takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from store_helpers import arrays_of, id_of, make_cache
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader
from torch_loaders import read_all

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig, GlobalMVN
from featcache.errors import ConfigError, FeatureError
from featcache.espnet import CommonCollateFn
from featcache.loading import Packed, Padded
from featcache.samplers import BucketBatchSampler, PackedBatchSampler, ShuffledBatchSampler

NESTED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
if_nested = pytest.mark.skipif(not NESTED, reason="torch has few nested tensors before 2.5")
JAGGED = pytest.param("jagged", marks=if_nested)
NUMBERS = range(20)
BATCHES: list[list[str]] = [
    [id_of(n) for n in numbers] for numbers in ([3, 0, 7], [19], [0], [4, 1])
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), NUMBERS)


def of_feature(batch: dict[str, Any], name: str, numbers: Sequence[int]) -> list[NDArray[Any]]:
    """The arrays of a packed feature, cut apart by `cu_seqlens`."""
    ends = batch[f"{name}_cu_seqlens"]
    assert ends.dtype == torch.int32
    lengths = [len(arrays_of(n)[name]) for n in numbers]
    assert batch[f"{name}_lengths"].tolist() == lengths
    assert batch[f"{name}_max_seqlen"] == max(lengths)
    return [batch[name][b:e].numpy() for b, e in pairwise(ends)]


def numbers_of(batch: dict[str, Any]) -> list[int]:
    return [int(id.partition("-")[2]) for id in batch["id"]]


@pytest.mark.parametrize("transform", [None, lambda item, rng: item])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_packed_batch_holds_the_frames_of_all_features_one_after_the_other(
    cache: Path, threads: int, transform: Any
) -> None:
    loader = FeatureLoader(
        cache, batch_sampler=BATCHES, layout="packed", threads=threads, transform=transform
    )
    for batch, ids in zip(loader, BATCHES, strict=True):
        assert batch["id"] == ids
        for name in ("fbank", "units"):
            numbers = numbers_of(batch)
            found = of_feature(batch, name, numbers)
            assert len(batch[name]) == sum(map(len, found))
            for array, number in zip(found, numbers, strict=True):
                np.testing.assert_array_equal(array, arrays_of(number)[name], strict=True)


def test_the_sum_of_frames_is_rounded_up_with_zeros_and_positions_count_from_0(cache: Path) -> None:
    layout = Packed(multiple_of=16, position_ids=True)
    loader = FeatureLoader(cache, "fbank", batch_sampler=BATCHES, layout=layout)
    for batch in loader:
        values, end = batch["fbank"], int(batch["fbank_cu_seqlens"][-1])
        assert len(values) == -(-end // 16) * 16
        assert not values[end:].any()
        expected = [np.arange(n) for n in [*batch["fbank_lengths"].tolist(), len(values) - end]]
        positions = batch["fbank_position_ids"]
        assert positions.dtype == torch.int64
        assert positions.tolist() == np.concatenate(expected).tolist()
        for array, number in zip(
            of_feature(batch, "fbank", numbers_of(batch)), numbers_of(batch), strict=True
        ):
            np.testing.assert_array_equal(array, arrays_of(number)["fbank"])


@if_nested
def test_a_jagged_batch_is_a_nested_tensor_over_the_packed_frames(cache: Path) -> None:
    for batch, ids in zip(
        FeatureLoader(cache, batch_sampler=BATCHES, layout="jagged"), BATCHES, strict=True
    ):
        for name in ("fbank", "units"):
            nested, arrays = batch[name], [arrays_of(n)[name] for n in numbers_of(batch)]
            assert nested.layout == torch.jagged
            assert len(nested) == len(ids)
            assert nested.values().data_ptr() == batch[name]._values.data_ptr()
            for found, array in zip(nested.unbind(), arrays, strict=True):
                np.testing.assert_array_equal(found.numpy(), array, strict=True)
            assert batch[f"{name}_lengths"].tolist() == list(map(len, arrays))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_arrays_of_numpy_are_those_of_torch(cache: Path, layout: str) -> None:
    def checked(item: dict[str, Any], rng: object) -> dict[str, Any]:
        assert type(item["fbank"]) is np.ndarray
        return item

    for transform in (None, checked):
        options: dict[str, Any] = {"batch_sampler": BATCHES, "layout": layout}
        tensors = FeatureLoader(cache, **options)
        arrays = FeatureLoader(cache, arrays="numpy", transform=transform, **options)
        for ours, theirs in zip(arrays, tensors, strict=True):
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                if isinstance(value, torch.Tensor):
                    np.testing.assert_array_equal(ours[name], value.numpy(), strict=True)
                else:
                    assert ours[name] == value


def test_features_of_other_kinds_keep_their_shapes_in_all_layouts(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("map", dtype="bfloat16", dims=[2, 3]),
        FeatureStorageConfig("speaker", time_axis=None),
    ]
    arrays = {
        f"u{n}": {"map": np.full((n + 1, 2, 3), n), "speaker": np.full(4, n)} for n in range(3)
    }
    with CacheWriter(tmp_path / "cache", features) as writer:
        for id, each in arrays.items():
            writer.write(id, {name: array.astype(np.float32) for name, array in each.items()})
    for layout, shape in (("padded", (3, 3, 2, 3)), ("packed", (6, 2, 3))):
        for kind in ("torch", "numpy"):
            (batch,) = FeatureLoader(
                tmp_path / "cache",
                batch_sampler=[[0, 1, 2]],
                layout=layout,
                arrays=kind,
            )
            assert batch["map"].shape == shape
            assert str(batch["map"].dtype) == ("float32" if kind == "numpy" else "torch.bfloat16")
            assert float(batch["map"].sum()) == 6 * (1 * 2 + 2 * 3)
            assert batch["speaker"].tolist() == [[n] * 4 for n in range(3)]
            assert "speaker_lengths" not in batch


def test_what_a_transform_adds_is_laid_out_too(cache: Path) -> None:
    def with_text(item: dict[str, Any], rng: object) -> dict[str, Any]:
        text = torch.arange(len(item["id"]))
        return item | {"text": text, "text_lengths": len(text), "twice": 2 * item["fbank_lengths"]}

    (batch,) = FeatureLoader(
        cache, "fbank", batch_sampler=BATCHES[:1], layout="packed", transform=with_text
    )
    sizes = [len(id) for id in BATCHES[0]]
    assert batch["text"].tolist() == [number for size in sizes for number in range(size)]
    assert batch["text_cu_seqlens"].tolist() == [0, *np.cumsum(sizes)]
    assert batch["twice"].tolist() == [2 * n for n in batch["fbank_lengths"].tolist()]


def test_windows_and_converted_dtypes_are_packed(cache: Path) -> None:
    windows = [[(id_of(4), slice(2, 9)), (id_of(3), slice(0, 5))]]
    (batch,) = FeatureLoader(
        cache, "fbank", batch_sampler=windows, layout="packed", dtypes={"fbank": "float16"}
    )
    expected = np.concatenate([arrays_of(4)["fbank"][2:9], arrays_of(3)["fbank"][:5]])
    np.testing.assert_array_equal(batch["fbank"].numpy(), expected.astype(np.float16), strict=True)
    assert batch["fbank_cu_seqlens"].tolist() == [0, 7, 12]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["packed", JAGGED])
def test_torchs_loader_gives_the_batches_of_a_data_set_in_its_layout(
    tmp_path: Path, layout: str, workers: int
) -> None:
    frames = {f"u{n}": np.full((4000 + n, 8), n, np.float32) for n in range(4)}  # no small tensors
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("x")]) as writer:
        for id, array in frames.items():
            writer.write(id, {"x": array})
    dataset = FeatureDataset(tmp_path / "cache", layout=layout)
    loader = DataLoader(
        dataset, batch_sampler=[[0, 1], [2, 3]], collate_fn=dataset.collate, num_workers=workers
    )
    for batch, rows in zip(loader, ([0, 1], [2, 3]), strict=True):
        values = batch["x"].values() if layout == "jagged" else batch["x"]
        expected = np.concatenate([frames[f"u{row}"] for row in rows])
        np.testing.assert_array_equal(values.numpy(), expected)


def test_memory_of_packed_batches_is_used_again_and_never_written_over(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("x")]) as writer:
        for n in range(6):
            writer.write(f"u{n}", {"x": np.full((3000, 8), n, np.float32)})
    for layout in ("packed", "jagged")[: 1 + NESTED]:
        batches = [[n] for n in range(6)] * 5
        loader = FeatureLoader(
            tmp_path / "cache", batch_sampler=batches, layout=layout, prefetch_bytes=300_000
        )
        kept, places = [], set()
        for number, batch in enumerate(loader):
            values = batch["x"].values() if layout == "jagged" else batch["x"]
            places.add(values.data_ptr())
            if number % 7 == 0:
                kept.append((number % 6, values[10:]))
            del batch, values
        assert len(places) < 30
        assert all(bool((frames == n).all()) for n, frames in kept)


# attention over packed frames, against padded attention with a mask

HEADS, WIDTH = 2, 8


def heads_of(frames: torch.Tensor) -> torch.Tensor:
    """Queries (and keys, and values), (..., heads, frames, width), of (..., frames, dims)."""
    projection = torch.from_numpy(
        np.random.default_rng(0).standard_normal((4, HEADS * WIDTH)).astype(np.float32)
    )
    made: torch.Tensor = ((frames - 40) / 3) @ projection
    return made.view(*made.shape[:-1], HEADS, WIDTH).transpose(-3, -2)


def padded_attention(cache: Path, ids: list[str]) -> torch.Tensor:
    """The frames of all utterances after attention with a mask, one after the other."""
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[ids])
    q = heads_of(batch["fbank"])
    valid = torch.arange(q.shape[-2]) < batch["fbank_lengths"][:, None]
    out = scaled_dot_product_attention(q, q, q, attn_mask=valid[:, None, None, :])
    return out.transpose(1, 2)[valid]


LONG = [id_of(n) for n in (3, 4, 7, 12, 1)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_a_document_mask_is_padded_attention(cache: Path) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[LONG], layout=Packed(multiple_of=8))
    values, ends = batch["fbank"], batch["fbank_cu_seqlens"]
    document = torch.bucketize(torch.arange(len(values)), ends[1:], right=True)

    def same(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return document[q] == document[k]

    mask = flex.create_block_mask(same, None, None, len(values), len(values), device="cpu")
    q = heads_of(values)[None]
    out = flex.flex_attention(q, q, q, block_mask=mask)
    assert isinstance(out, torch.Tensor)
    found = out[0].transpose(0, 1)[: int(ends[-1])]
    torch.testing.assert_close(found, padded_attention(cache, LONG), rtol=1e-4, atol=1e-5)


@if_nested
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_attend_as_padded_ones_do(cache: Path) -> None:
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[LONG], layout="jagged")
    nested = batch["fbank"]
    q = torch.nested.nested_tensor_from_jagged(
        heads_of(nested.values()).transpose(0, 1).contiguous(), nested.offsets()
    ).transpose(1, 2)
    out = scaled_dot_product_attention(q, q, q).transpose(1, 2).values()
    torch.testing.assert_close(out, padded_attention(cache, LONG), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has varlen_attn on GPUs only")
def test_varlen_attention_takes_a_packed_batch_as_it_is(cache: Path) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[LONG], layout="packed", device="cuda")
    q = heads_of(batch["fbank"].cpu()).transpose(0, 1).contiguous().cuda().half()
    ends, most = batch["fbank_cu_seqlens"], batch["fbank_max_seqlen"]
    found = varlen.varlen_attn(q, q, q, ends, ends, most, most).float().cpu()
    torch.testing.assert_close(found, padded_attention(cache, LONG), rtol=1e-2, atol=1e-2)


def test_jax_takes_batches_without_a_copy(cache: Path) -> None:
    jax = pytest.importorskip("jax")
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[LONG], layout="packed")
    expected = batch["fbank"].numpy().copy()
    array = jax.dlpack.from_dlpack(batch["fbank"])
    assert array.unsafe_buffer_pointer() == batch["fbank"].data_ptr()
    del batch  # the memory stays that of the array
    np.testing.assert_array_equal(np.asarray(array), expected)
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[LONG], layout="packed", arrays="numpy")
    np.testing.assert_array_equal(np.asarray(jax.device_put(batch["fbank"])), expected)


# few shapes


def test_batches_are_padded_to_the_lengths_that_the_sampler_has(cache: Path) -> None:
    sampler = BucketBatchSampler(cache, max_frames=48, pad_to=[8, 16, 24])
    shapes = {
        tuple(batch["fbank"].shape[:2])
        for batch in FeatureLoader(cache, "fbank", batch_sampler=sampler)
    }
    assert {length for _, length in shapes} <= {8, 16, 24}
    assert shapes - {(6, 8), (3, 16), (2, 24)} <= {(n, 8) for n in range(6)}
    dataset = FeatureDataset(cache)
    with pytest.raises(ConfigError, match=r"layout=featcache.loading.Padded\(pad_to=\[8, 16"):
        FeatureLoader(dataset, batch_sampler=sampler)
    told = r"utterance 'spk./utt-\d+', feature 'fbank': 20 frames are more than all of pad_to"
    for transform in (None, lambda item, rng: item):
        short = FeatureDataset(cache, layout=Padded([5, 15]), transform=transform)
        with pytest.raises(ConfigError, match=told):
            list(FeatureLoader(short, batch_sampler=BATCHES, threads=0))
        lengths = short.table.lengths("fbank")
        assert len(short[int(lengths.argmax())]["fbank"]) == lengths.max()  # an item is not padded
    (batch,) = FeatureLoader(cache, batch_sampler=BATCHES[:1], layout=Padded(10))
    assert batch["fbank"].shape == (3, 20, 4)
    assert batch["units"].shape == (3, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "packd"}, "no layout 'packd'; did you mean 'packed'"),
        ({"layout": Packed}, "layout is one of 'padded', 'packed', 'jagged', or an object of"),
        ({"layout": 3}, "not 3"),
        ({"arrays": "jax"}, "arrays has no choice 'jax'"),
        ({"arrays": "numpy", "layout": "jagged"}, "NumPy has no nested tensors"),
        ({"arrays": "numpy", "layout": Padded, "device": "cpu"}, "layout is one of"),
        ({"arrays": "numpy", "device": "cpu"}, "device= is for tensors"),
        ({"arrays": "numpy", "dtypes": {"fbank": "bfloat16"}}, "NumPy has no bfloat16"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    cache: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FeatureLoader(cache, batch_sampler=BATCHES, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Packed(multiple_of=0),
        lambda: Padded([8, 4]),
        lambda: Padded([]),
        lambda: Padded("8"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_a_layout_are_checked_when_it_is_made(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_what_is_padded_to_may_be_any_numbers(cache: Path) -> None:
    for steps in ([8, 16, 24], (8, 16, 24), np.array([8, 16, 24])):
        assert Padded(steps) == Padded([8, 16, 24])  # type: ignore[arg-type]
        sampler = BucketBatchSampler(cache, max_frames=48, pad_to=steps)  # type: ignore[arg-type]
        assert FeatureLoader(cache, batch_sampler=sampler).dataset.layout == Padded([8, 16, 24])
    layout = Padded(np.int64(6))  # type: ignore[arg-type]
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=BATCHES[:1], layout=layout)
    assert batch["fbank"].shape[1] == 18


def test_a_data_set_keeps_its_layout(cache: Path) -> None:
    dataset = FeatureDataset(cache, layout=Packed(multiple_of=2))
    with pytest.raises(ConfigError, match="are those of the FeatureDataset; give them there"):
        FeatureLoader(dataset, batch_sampler=BATCHES, layout="padded")
    for source in (dataset, dataset.view(featcache.open(cache).select([id_of(3), id_of(5)]))):
        (batch,) = FeatureLoader(source, batch_sampler=[[0, 1]])
        assert len(batch["fbank"]) % 2 == 0
        assert "fbank_cu_seqlens" in batch
        items = [source[0], source[1]]
        made = FeatureLoader(source, batch_sampler=[[0, 1]]).collate_fn(items)
        torch.testing.assert_close(made["fbank"], batch["fbank"])


def test_packed_batches_of_the_sampler_fill_their_limit(cache: Path) -> None:
    sampler = PackedBatchSampler(cache, max_frames=60)
    seen = []
    for batch in FeatureLoader(cache, batch_sampler=sampler):  # packed without saying so
        assert len(batch["fbank"]) == batch["fbank_cu_seqlens"][-1] <= 60
        seen += batch["id"]
    assert sorted(seen) == sorted(map(id_of, NUMBERS))


def test_a_data_set_that_pads_what_a_sampler_packs_is_refused(cache: Path) -> None:
    sampler = PackedBatchSampler(cache, max_frames=60)
    with pytest.raises(ConfigError, match="give it layout='packed'"):
        FeatureLoader(FeatureDataset(cache), batch_sampler=sampler)
    loader = FeatureLoader(FeatureDataset(cache, layout="packed"), batch_sampler=sampler)
    assert all(len(batch["fbank"]) <= 60 for batch in loader)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("options", "fitting"),
    [
        ({"max_frames": 60}, {"layout": "packed"}),
        ({"max_frames": 60, "pad_to": [8, 16, 24]}, {"layout": Padded([8, 16, 24])}),
        ({"max_frames": 60, "pad_to": np.int64(8)}, {"layout": Padded(8)}),
    ],
)
def test_torchs_data_loader_refuses_batches_that_were_counted_for_another_layout(
    cache: Path, options: dict[str, Any], fitting: dict[str, Any], named: bool, workers: int
) -> None:
    make: Any = BucketBatchSampler if "pad_to" in options else PackedBatchSampler
    sampler = make(cache, ids=map(id_of, NUMBERS) if named else None, **options)
    in_order = ShuffledBatchSampler(sampler.epoch_batches(0), shuffle=False)

    def batches(batches: Any, **layout: Any) -> list[dict[str, Any]]:
        dataset = FeatureDataset(cache, "fbank", **layout)
        loader = DataLoader(
            dataset, batch_sampler=batches, collate_fn=dataset.collate, num_workers=workers
        )
        return [dict(batch) for batch in read_all(loader)]

    line = "layout='packed'" if make is PackedBatchSampler else r"Padded\(pad_to="
    for sampled in (sampler, in_order, [*sampler]):
        with pytest.raises(ConfigError, match=f"the batch sampler .*{line}"):
            batches(sampled)
        sizes = [len(batch["id"]) for batch in batches(sampled, **fitting)]
        assert sum(sizes) == len(NUMBERS)


@pytest.mark.parametrize("threads", [0, 2])
def test_packed_batches_go_on_from_the_state_of_a_loader(cache: Path, threads: int) -> None:
    def loader() -> FeatureLoader[dict[str, Any]]:
        sampler = PackedBatchSampler(cache, max_frames=40, seed=2)
        return FeatureLoader(cache, batch_sampler=sampler, layout="packed", threads=threads)

    first, second = loader(), loader()
    whole = [batch["fbank"].clone() for batch in loader()]
    for _ in zip(range(3), first, strict=False):
        state = first.state_dict()
    second.load_state_dict(json.loads(json.dumps(state)))
    rest = [batch["fbank"] for batch in second]
    assert len(rest) == len(whole) - 3
    for found, expected in zip(rest, whole[3:], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["packed", JAGGED])
def test_normalisation_takes_batches_without_padding(cache: Path, layout: str) -> None:
    mvn = GlobalMVN.from_cache(cache, "fbank")
    (batch,) = FeatureLoader(cache, "fbank", batch_sampler=[LONG], layout=layout)
    normalised = mvn(batch["fbank"])
    if layout == "packed":
        with pytest.raises(FeatureError, match="packed frames need none"):
            mvn(batch["fbank"], batch["fbank_lengths"])
    else:
        torch.testing.assert_close(mvn(batch["fbank"], batch["fbank_lengths"]), normalised)
    values = normalised.values() if layout == "jagged" else normalised
    frames = torch.from_numpy(np.concatenate([arrays_of(n)["fbank"] for n in numbers_of(batch)]))
    torch.testing.assert_close(values, mvn(frames))
    back = mvn.inverse(normalised)
    torch.testing.assert_close(back.values() if layout == "jagged" else back, frames)


def test_a_batch_shows_its_layout(cache: Path) -> None:
    for layout, word in (("packed", "fbank (50, 4) float32"), ("jagged", "fbank (3, j"))[
        : 1 + NESTED
    ]:
        (batch,) = FeatureLoader(cache, "fbank", batch_sampler=BATCHES[:1], layout=layout)
        assert word.replace("50", str(int(batch["fbank_lengths"].sum()))) in repr(batch)
        assert "0%" in batch._repr_html_()  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["packed", JAGGED])
def test_espnets_collate_function_leaves_alone_what_has_no_padding(
    cache: Path, layout: str
) -> None:
    (given,) = FeatureLoader(cache, batch_sampler=[LONG], layout=layout)
    ids, batch = CommonCollateFn(float_pad_value=7.0, int_pad_value=-1)(given)
    assert ids == LONG
    assert batch.keys() == given.keys() - {"id"}
    for name in ("fbank", "units"):
        arrays = [arrays_of(number)[name] for number in numbers_of(given)]
        value = batch[name].values() if layout == "jagged" else batch[name]
        np.testing.assert_array_equal(value.numpy(), np.concatenate(arrays))
