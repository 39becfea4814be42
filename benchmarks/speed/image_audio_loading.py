"""Loading pictures and recordings: samples a second on one core, over torch's plain DataLoader with the same decoding.

Files are read from a warm cache, decoded, brought to the model's form and put together into batches, in this process.
Ours also looks whether a file is the one that was prepared: at its content when it is read first, at its size, times
and inode later. Both go through all files in turn, several times; the fastest of each counts. JPEG files of 256 x 256
pixels for a ViT of 224; WAV files of two seconds at 22,050 samples a second for wav2vec 2.0 and for Whisper, at 16,000.

``python -m benchmarks.speed.image_audio_loading [files]``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import wave
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.support import finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.decode_audio import resample
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.loader import train_step_batches
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.topology import BatchPlan

FILES, BATCH, SIDE, RATE, ROUNDS = 256, 16, 256, 22050, 15
PICTURES = ("model=vit_b16", "data=image_folder", "objective=image_classification")
SPEECH = {
    "wav2vec 2.0": ("model=wav2vec2_base", "model.config.mask_time_prob=0", "data=audio_list", "objective=ctc"),
    "Whisper": ("model=whisper_tiny", "data=audio_list", "objective=speech_seq2seq"),
}
COLUMNS = ("what", "samples/s", "DataLoader's", "ratio")
Read = Callable[[Path], Any]
Collate = Callable[[list[Any]], Any]


class Files(Dataset[Any]):
    """What torch's loader is given."""

    def __init__(self, paths: list[Path], read: Read) -> None:
        self._paths, self._read = paths, read

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return self._read(self._paths[index])


@dataclass(frozen=True)
class Work:
    """Files that both read."""

    name: str
    config: RunConfig
    paths: list[Path]
    reader: Callable[[RunConfig], tuple[Read, Collate]]

    def loaders(self) -> tuple[Callable[[], Iterator[Any]], Callable[[], Iterator[Any]]]:
        """Each goes through all files once: ours by micro-batches, the other's by batches as the model takes them."""
        prepared = prepare(self.config)
        config, plan = prepared.complete(self.config), BatchPlan(BATCH, 1, BATCH)
        view, steps = objective_class(config.objective.name).samples, len(self.paths) // BATCH
        read, collate = self.reader(config)

        def ours() -> Iterator[Any]:
            for step_batch in train_step_batches(config, prepared, plan, 0, 0, steps, view):
                yield from step_batch.micro_batches

        return ours, lambda: iter(DataLoader(Files(self.paths, read), BATCH, shuffle=True, collate_fn=collate))


def picture_reader(config: RunConfig) -> tuple[Read, Collate]:
    from PIL import Image

    pixels = Pixels.from_config(cast(ImageConfig, config.data), config.model)

    def read(path: Path) -> Any:
        with Image.open(path) as image:
            return torch.from_numpy(pixels.array(pixels.scale(image.convert("RGB"))))

    return read, default_collate


def sound_reader(config: RunConfig) -> tuple[Read, Collate]:
    import soundfile

    sound = Sound.from_config(cast(AudioConfig, config.data), config.model)
    extract, window = None, LogMel.from_model(config.model, sound.rate)
    if window is not None:
        from transformers import WhisperFeatureExtractor

        whole = WhisperFeatureExtractor(**window.settings())

        def extract(waves: list[Any]) -> Any:
            return whole(waves, sampling_rate=sound.rate, return_tensors="np").input_features

    def read(path: Path) -> Any:
        channels, rate = soundfile.read(path, dtype="float32", always_2d=True)
        return sound.standardise(resample(channels.mean(1), sound.rate / rate))

    def collate(waves: list[Any]) -> Any:
        return torch.from_numpy(np.stack(waves) if extract is None else extract(waves))

    return read, collate


def works(folder: Path, files: int) -> list[Work]:
    """Makes the files."""
    from PIL import Image

    random, pictures, sounds = np.random.default_rng(0), folder / "pictures", folder / "sounds"
    sounds.mkdir()
    lines, images, recordings = ["path,text"], list[Path](), list[Path]()
    for number in range(files):
        kind = pictures / str(number % 2)
        kind.mkdir(parents=True, exist_ok=True)
        smooth = Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).resize((SIDE, SIDE))
        images.append(kind / f"{number}.jpg")
        smooth.save(images[-1], quality=90)
        recordings.append(sounds / f"{number}.wav")
        with wave.open(str(recordings[-1]), "wb") as file:
            file.setparams((1, 2, RATE, 2 * RATE, "NONE", ""))
            file.writeframes((3000 * random.standard_normal(2 * RATE)).astype("<i2").tobytes())
        lines.append(f"{number}.wav,one two")
    listed = sounds / "list.csv"
    listed.write_text("\n".join(lines) + "\n")
    common = (f"data.cache_dir={folder / 'cache'}", "data.validation_fraction=0", f"data.global_batch_size={BATCH}")
    config = compose([*PICTURES, f"data.paths=[{pictures}]", *common])[0]
    found = [Work("pictures, ViT", config, images, picture_reader)]
    for family, overrides in SPEECH.items():
        config = compose([*overrides, f"data.paths=[{listed}]", *common])[0]
        found.append(Work(f"recordings, {family}", config, recordings, sound_reader))
    return found


def seconds_of(load: Callable[[], Iterator[Any]]) -> float:
    """Processor seconds of one pass."""
    mark = time.process_time()
    deque(load(), 0)  # a queue of length 0 asks for all and keeps nothing
    return time.process_time() - mark


def main(files: int) -> None:
    torch.set_num_threads(1)
    rows, files = list[list[Any]](), max(1, files // BATCH) * BATCH
    with tempfile.TemporaryDirectory() as folder:
        for work in works(Path(folder), files):
            ours, other = work.loaders()
            taken = [(seconds_of(ours), seconds_of(other)) for _ in range(ROUNDS)]
            rates = [files / min(one) for one in zip(*taken, strict=True)]
            rows.append([work.name, *rates, rates[0] / rates[1]])
    notes = (
        f"{files} files, batches of {BATCH}, one thread of this process; processor seconds of the fastest of {ROUNDS} "
        "passes of each, in turn; ours hashes a file in the first alone. DataLoader's spectrograms are those of "
        "transformers' WhisperFeatureExtractor. The ratio is ours over DataLoader's; at least 1 is wanted. Load "
        f"average: {os.getloadavg()[0]:.1f}."
    )
    finish("image_audio_loading", "Loading over torch's DataLoader with the same decoding", COLUMNS, rows, notes)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else FILES)
