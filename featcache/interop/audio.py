"""The audio of a data set's rows, decoded only where its samples are asked for."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.errors import ConfigError, FeatureError, MissingDependencyError
from featcache.format.files import digest

if TYPE_CHECKING:
    from datasets import Dataset
    from lhotse import Recording


class Clip(Mapping[str, object]):
    """The audio of a row, decoded when its samples are first asked for, and then kept.

    Has the keys of a row of `datasets`: "array" (float32 samples, channels averaged),
    "sampling_rate", "path", "bytes".

    Args:
        path: its file; only a name if there are `data`.
        data: the bytes of a file.
        sample_rate_hz: to which the samples are resampled; None leaves them.
    """

    def __init__(
        self, path: str | None, data: bytes | None, sample_rate_hz: int | None = None
    ) -> None:
        self.path, self.data = path, data
        self._sample_rate_hz = sample_rate_hz

    def recording(self, id: str) -> Recording:
        """Return the lhotse recording, in memory if it has no file; only the header is read."""
        try:
            from lhotse import Recording
        except ImportError as error:
            raise MissingDependencyError(
                f"audio is decoded by 'lhotse'; {error}; try: pip install 'featcache[lhotse]'"
            ) from error
        if self.data is not None:
            found = Recording.from_bytes(self.data, id)
        elif self.path is not None and Path(self.path).is_file():
            found = Recording.from_file(Path(self.path).resolve(), id)
        else:
            raise ConfigError(
                f"the row has no bytes of audio, and its path {self.path!r} is no file here; "
                "download it"
            )
        same = self._sample_rate_hz in (None, found.sampling_rate)
        return found if same else found.resample(self._sample_rate_hz)

    @cached_property
    def _opened(self) -> Recording:
        return self.recording("")

    @cached_property
    def array(self) -> NDArray[np.float32]:
        """Samples, float32 (samples,)."""
        return cast(NDArray[np.float32], self._opened.load_audio().mean(axis=0))

    @property
    def sampling_rate(self) -> int:
        """Samples per second."""
        return int(self._opened.sampling_rate)

    def written(self, folder: Path | None, number: int) -> Clip:
        """Write the bytes of the clip to a file, and return the clip of the file.

        A file that is there and whole is not written again.
        """
        if self.data is None:
            return self
        if folder is None:
            raise ConfigError(
                "the data set is in memory, and so is its audio; give an audio_folder for it"
            )
        import soundfile

        suffix = Path(self.path or "").suffix
        suffix = suffix or f".{soundfile.info(io.BytesIO(self.data)).format.lower()}"
        # few files a folder
        path = folder / f"{number // 1000:06}" / f"{number}-{digest(self.data)}{suffix}"
        # by its size: a sync for each of many small files would take long, and without one a power
        # cut may empty a file
        if not path.is_file() or path.stat().st_size != len(self.data):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
            try:
                aside.write_bytes(self.data)
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        return Clip(str(path), None, self._sample_rate_hz)

    def gave(self, samples: object) -> bool:
        """Whether these samples are those of the clip, untouched, or the clip itself."""
        return samples is self or ("array" in vars(self) and samples is self.array)

    def __getitem__(self, key: str) -> object:
        if key not in tuple(self):
            raise KeyError(key)
        return getattr(self, "data" if key == "bytes" else key)

    def __iter__(self) -> Iterator[str]:
        return iter(("path", "bytes", "array", "sampling_rate"))

    def __len__(self) -> int:
        return 4


class AudioRows:
    """The rows of a data set as dicts, with a `Clip` in each column of audio.

    Decodes with lhotse and soundfile: torchcodec, which `datasets` asks for, need not be installed.
    """

    def __init__(self, dataset: Dataset) -> None:
        from datasets import Audio

        audio = {name: kind for name, kind in dataset.features.items() if isinstance(kind, Audio)}
        for name in audio:
            dataset = dataset.cast_column(name, Audio(decode=False))
        self.encoded = dataset.with_format(None)
        rates = {name: kind.sampling_rate for name, kind in audio.items()}
        self.sample_rates_hz: dict[str, int | None] = rates

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> dict[str, object]:
        row = dict(self.encoded[index])
        for name, rate in self.sample_rates_hz.items():
            if row[name] is not None:
                row[name] = Clip(row[name]["path"], row[name]["bytes"], rate)
        return row


def as_float32(samples: object) -> NDArray[np.float32]:
    """Return samples as float32; of integers, the dtype's range becomes -1 to just below 1.

    Unsigned ones have their zero in the middle, as those of an 8-bit WAV file.

    >>> as_float32(np.array([0, 128, 192], np.uint8)).tolist()
    [-1.0, 0.0, 0.5]
    """
    array = np.asarray(samples)
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    if array.dtype.kind not in "iu":
        raise FeatureError(f"samples of audio are floats or integers, not {array.dtype.name!r}")
    half = 2.0 ** (8 * array.dtype.itemsize - 1)
    zero = half if array.dtype.kind == "u" else 0.0
    return ((array.astype(np.float64) - zero) / half).astype(np.float32)
