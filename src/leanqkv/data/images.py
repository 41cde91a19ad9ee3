"""Labelled images, decoded once into memory-mapped arrays that are cached by content."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..compat import dataset_fingerprint
from ..errors import LeanError
from .cache import cache_directory, made_once

FORMAT = 1
DIGITS = "digits"
NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
# Of data without a test split, one image in this many is held out; the same ones for every seed.
TEST_SHARE = 3

Progress = Callable[[str, int], None]
# How many images, and each, uint8 [channels, height, width], with its class.
Split = tuple[int, Iterable[tuple[np.ndarray, int]]]
PARTS = ("images", "classes")


@dataclass(frozen=True)
class ImageData:
    """Arrays on disk: for each split its images, uint8 [n, channels, height, width], and their classes, int64 [n].

    Attributes:
        labels: the names of the classes.
        sha256: of the training images and classes, then those of the test split.
    """

    directory: Path
    description: str
    train_images: int
    test_images: int
    channels: int
    height: int
    width: int
    labels: tuple[str, ...]
    sha256: str

    def train(self) -> tuple[np.ndarray, np.ndarray]:
        return self._split("train")

    def test(self) -> tuple[np.ndarray, np.ndarray]:
        return self._split("test")

    def _split(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        images, classes = (np.load(self.directory / f"{name}-{part}.npy", mmap_mode="r") for part in PARTS)
        return images, classes

    def record(self) -> dict[str, Any]:
        """What a run record says about the data; no path of this machine."""
        about = {name: value for name, value in asdict(self).items() if name not in ("directory", "labels")}
        return {**about, "num_labels": len(self.labels)}


def prepare_images(source: str | None = None, *, progress: Progress = lambda stage, done: None) -> ImageData:
    """The images that `source` names, decoded on first use and found again afterwards.

    Args:
        source: None or "digits" for scikit-learn's 1,797 handwritten digits of 8x8 pixels; a folder in a format that
            `datasets` reads; "cifar10", "cifar100" or another Hugging Face dataset, `OWNER/NAME` or `NAME:CONFIG`. Of
            several class labels the one with the most classes is taken.
        progress: called with a stage and the number of images done.

    Raises:
        LeanError: nothing there, or no images of one size, each with its class.
    """
    progress("reading", 0)
    return _digits(progress) if source in (None, DIGITS) else _dataset(str(source), progress)


def image_batch(images: np.ndarray, classes: np.ndarray, chosen: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
    """One batch: `pixel_values`, uint8 [batch, channels, height, width], and `labels`, int64 [batch]."""
    return {"pixel_values": torch.from_numpy(images[chosen]), "labels": torch.from_numpy(classes[chosen])}


def scaled_pixels(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 [batch, channels, height, width] -> float32 in -1 ... 1, [batch, channels, size, size].

    Images of another size are enlarged or reduced (bilinear, antialiased). A step of its own, for after the pixels have
    been moved to the device: enlarged there, they are a hundred times fewer on the way.
    """
    scaled = pixels.float() / 127.5 - 1
    if scaled.shape[2:] != (size, size):
        scaled = F.interpolate(scaled, (size, size), mode="bilinear", antialias=True)
    return scaled


def processor_settings(channels: int, size: int) -> dict[str, Any]:
    """What `scaled_pixels` does to one image, as transformers' AutoImageProcessor reads it."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
    }


def _digits(progress: Progress) -> ImageData:
    from sklearn.datasets import load_digits

    found = load_digits()
    # Counts of 0 to 16 dark pixels in each field of 4x4, on the scale of other images.
    images = (found.images * 255 / 16).round().astype("uint8")[:, None]
    key = hashlib.sha256(images.tobytes() + found.target.astype("<i8").tobytes()).hexdigest()

    def split(chosen: np.ndarray) -> Split:
        return len(chosen), ((images[i], int(found.target[i])) for i in chosen)

    train, test = _held_out(len(images))
    names = [str(name) for name in found.target_names]
    return _cached(f"digits\0{key}", "digits (scikit-learn)", names, split(train), split(test), progress)


def _held_out(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the training and of the test split of data that has none."""
    shuffled = np.random.default_rng(0).permutation(count)
    return np.sort(shuffled[count // TEST_SHARE :]), np.sort(shuffled[: count // TEST_SHARE])


def _dataset(source: str, progress: Progress) -> ImageData:
    import datasets

    path = Path(source)
    local = path.exists()
    if not local and (path.suffix or source.startswith((".", "/", "~"))):
        raise LeanError(f"no images at {source}: there is no such folder")
    name, _, config = (source, "", "") if local else NAMES.get(source, source).partition(":")
    try:
        found: Any = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises a dozen kinds; each means that the data is not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = "the folder cannot be read" if local else "no such folder, and no dataset of that name can be loaded"
        raise LeanError(f"no images at {source}: {where} ({reason})") from None
    if "train" not in found:
        raise LeanError(f"{source} has no split called train (found: {', '.join(found)})")
    train = found["train"]
    image, label = _columns(source, train.features)
    if held_out := next((split for split in ("test", "validation", "valid") if split in found), None):
        test = found[held_out]
    else:
        train, test = (train.select(chosen) for chosen in _held_out(len(train)))
    if not len(train) or not len(test):
        raise LeanError(f"{source} has too few images: {len(train)} to train on, {len(test)} to test on")
    first = train[0][image]
    mode = "L" if first.mode in ("1", "L") else "RGB"
    classes = train.features[label].names

    def pairs(records: Any) -> Iterator[tuple[np.ndarray, int]]:
        for record in records:
            picture, number = record[image], record[label]
            if picture.size != first.size:
                sizes = " and ".join(f"{width}x{height}" for width, height in (first.size, picture.size))
                raise LeanError(f"{source} has images of different sizes, {sizes}; make them one size")
            if number is None or not 0 <= number < len(classes):
                raise LeanError(f"{source} has images without a class in {label!r}")
            pixels = np.asarray(picture.convert(mode))
            yield pixels[None] if mode == "L" else pixels.transpose(2, 0, 1), number

    description = (path.name if local else name) + (f":{config}" if config else "")
    return _cached(
        "\0".join(["datasets", source, label, dataset_fingerprint(train), dataset_fingerprint(test)]),
        description if label == "label" else f"{description}, {label}",
        classes,
        (len(train), pairs(train)),
        (len(test), pairs(test)),
        progress,
    )


def _columns(source: str, features: Any) -> tuple[str, str]:
    """The names of the column of images and of that of their classes."""
    import datasets

    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(images) != 1 or not labels:
        found = ", ".join(f"{name}: {type(kind).__name__}" for name, kind in features.items())
        raise LeanError(f"{source} is not one column of images and a class label for each (found: {found})")
    return images[0], max(labels, key=lambda name: features[name].num_classes)


def _cached(
    content: str, description: str, labels: Sequence[str], train: Split, test: Split, progress: Progress
) -> ImageData:
    def fill(directory: Path) -> dict[str, Any]:
        digest, done = hashlib.sha256(), 0
        shape: tuple[int, ...] = ()
        for name, (count, pairs) in (("train", train), ("test", test)):
            files = [directory / f"{name}-{part}.npy" for part in PARTS]
            images: Any = None
            classes = np.empty(count, dtype="<i8")
            for i, (pixels, number) in enumerate(pairs):
                if images is None:
                    shape = pixels.shape
                    images = np.lib.format.open_memmap(files[0], mode="w+", dtype="uint8", shape=(count, *shape))
                images[i], classes[i] = pixels, number
                done += 1
                if done % 256 == 0:
                    progress("decoding", done)
            images.flush()
            np.save(files[1], classes)
            digest.update(images.data)
            digest.update(classes.data)
        return {
            "description": description,
            "labels": list(labels),
            "train_images": train[0],
            "test_images": test[0],
            **dict(zip(("channels", "height", "width"), shape, strict=True)),
            "sha256": digest.hexdigest(),
        }

    key = hashlib.sha256(f"{FORMAT}\0{content}".encode()).hexdigest()[:24]
    directory = cache_directory() / "images" / key
    about = made_once(directory, fill)
    return ImageData(directory=directory, **{**about, "labels": tuple(about["labels"])})
