"""Labelled images, decoded once into memory-mapped arrays that are cached by content."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from leanqkv.data.cache import cached_directory
from leanqkv.errors import LeanError, first_line
from leanqkv.files import looks_like_path
from leanqkv.ranges import COUNT
from leanqkv.records import CACHED

FORMAT = 1
CACHED["images"] = {
    **dict.fromkeys(("description", "sha256"), str),
    **dict.fromkeys(("train_images", "test_images", "channels", "height", "width"), COUNT),
    "labels": [str],
}
DIGITS = "digits"
NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
# Of data without a test split, one image in this many is held out; the same ones for every seed.
TEST_SHARE = 3

# Pillow's modes of 8 bits a channel, and of fewer.
GRAY, COLOR = ("1", "L"), ("LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ImageData:
    """Arrays on disk: for each split its images, uint8 [n, channels, height, width], and their classes, int64 [n].

    Attributes:
        labels: the names of the classes.
        sha256: of the training images and classes, then those of the test split.
    """

    kind: ClassVar[str] = "images"

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
        """Return the training images and their classes."""
        return self._load("train")

    def test(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the test images and their classes."""
        return self._load("test")

    def _load(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        images, classes = (self.directory / f"{split}-{part}.npy" for part in ("images", "classes"))
        return np.load(images, mmap_mode="r"), np.load(classes, mmap_mode="r")

    def evaluations(self, context_length: int) -> int:
        """Return how many test images there are."""
        return self.test_images

    def sizes(self) -> str:
        """Return the sizes of the splits, in words."""
        return f"{self.train_images:,} training and {self.test_images:,} test images"

    def evaluation_size(self, sequences: int) -> int:
        """Return how many images an evaluation takes unless the user says otherwise: the test split."""
        return self.test_images

    def record(self) -> dict[str, Any]:
        """Return a record's entry on the data; no path of this machine."""
        about = {name: value for name, value in asdict(self).items() if name not in ("directory", "labels")}
        return {**about, "num_labels": len(self.labels)}


def prepare_images(source: str | None = None, *, progress: Progress = lambda doing: None) -> ImageData:
    """Return the images that `source` names, decoded on first use and read from the cache afterwards.

    Args:
        source: None or "digits" for scikit-learn's 1,797 handwritten digits of 8x8 pixels; a folder in a format that
            `datasets` reads; "cifar10", "cifar100" or another Hugging Face dataset, `OWNER/NAME` or `NAME:CONFIG`. Of
            several class labels the one with the most classes is taken.
        progress: called with the current phase and how much of it is done.

    Raises:
        LeanError: nothing there, or no images of one size, each with its class.
    """
    progress("reading the images")
    source = source or DIGITS
    description, splits = _digits() if source == DIGITS else _dataset(source)
    train, test = _train_and_test(source, splits)
    image, label = _columns(source, train.features)
    if not len(train) or not len(test):
        raise LeanError(f"{source} has too few images: {len(train)} to train on, {len(test)} to test on")
    key = "\0".join(["datasets", source, label, _fingerprint(train), _fingerprint(test)])

    def fill(directory: Path) -> dict[str, Any]:
        return {
            "description": description if label == "label" else f"{description}, {label}",
            "labels": train.features[label].names,
            "train_images": len(train),
            "test_images": len(test),
            **_write(directory, source, train, test, image, label, progress),
        }

    about = cached_directory("images", f"{FORMAT}\0{key}", fill)
    return ImageData(**{**about, "labels": tuple(about["labels"])})


def _fingerprint(dataset: Any) -> str:
    """A string that differs between datasets of different content; datasets does not promise its own."""
    from datasets.fingerprint import Hasher

    return getattr(dataset, "_fingerprint", None) or Hasher.hash(dataset)


def image_batch(images: np.ndarray, classes: np.ndarray, chosen: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
    """Return one batch: `pixel_values`, uint8 [batch, channels, height, width], and `labels`, int64 [batch]."""
    return {"pixel_values": torch.from_numpy(images[chosen]), "labels": torch.from_numpy(classes[chosen])}


def scaled_pixels(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Return uint8 pixels [batch, channels, height, width] as float32 in -1 ... 1, [batch, channels, size, size].

    Images of another size are resized (bilinear, antialiased). Call it on the device: bytes of the original size take a
    hundredth of the transfer there.
    """
    scaled = pixels.float() / 127.5 - 1
    if scaled.shape[2:] != (size, size):
        scaled = F.interpolate(scaled, (size, size), mode="bilinear", antialias=True)
    return scaled


def processor_settings(channels: int, size: int) -> dict[str, Any]:
    """Return settings with which transformers' AutoImageProcessor equals `scaled_pixels`."""
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


def _digits() -> tuple[str, dict[str, Any]]:
    import datasets
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Counts of 0 to 16 dark pixels in each field of 4x4, on the scale of other images.
    images = list((digits.images * 255 / 16).round().astype("uint8"))
    labels = datasets.ClassLabel(names=[str(name) for name in digits.target_names])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    records = datasets.Dataset.from_dict({"image": images, "label": digits.target}, features)
    return "digits (scikit-learn)", {"train": records}


def _dataset(source: str) -> tuple[str, Any]:
    """Return the description and the splits of a folder or of a Hugging Face dataset."""
    import datasets

    local = Path(source).exists()
    if not local and looks_like_path(source):
        raise LeanError(f"no images at {source}: there is no such folder")
    name, _, config = (source, "", "") if local else NAMES.get(source, source).partition(":")
    try:
        splits = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises a dozen kinds; each means that the dataset cannot be read
        reason = "the folder cannot be read" if local else "no such folder, and no dataset of that name can be loaded"
        raise LeanError(f"no images at {source}: {reason} ({first_line(error)})") from None
    return (Path(name).name if local else name) + (f":{config}" if config else ""), splits


def _train_and_test(source: str, splits: Any) -> tuple[Any, Any]:
    """Return the training and the test split; of data without a test split, a part is held out."""
    if "train" not in splits:
        raise LeanError(f"{source} has no split called train (found: {', '.join(splits)})")
    train = splits["train"]
    if held_out := next((split for split in ("test", "validation", "valid") if split in splits), None):
        test = splits[held_out]
    else:
        order, size = np.random.default_rng(0).permutation(len(train)), len(train) // TEST_SHARE
        train, test = (train.select(np.sort(chosen)) for chosen in (order[size:], order[:size]))
    return train, test


def _columns(source: str, features: Any) -> tuple[str, str]:
    """Return the names of the column of images and of that of their classes."""
    import datasets

    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(images) != 1 or not labels:
        columns = ", ".join(f"{name}: {type(kind).__name__}" for name, kind in features.items())
        raise LeanError(f"{source} is not one column of images and a class label for each (found: {columns})")
    return images[0], max(labels, key=lambda name: features[name].num_classes)


def _whole(source: str, records: Any) -> Iterator[Any]:
    """Yield the records; one that cannot be decoded is named."""
    for number in range(len(records)):
        try:
            record = records[number]
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises of a damaged file
            raise LeanError(f"{source}: image {number} cannot be decoded: {first_line(error)}") from None
        yield record


def _decoded(source: str, records: Any, image: str, label: str, first: Any) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the pixels of every record, of the size and the mode of `first`, and its class."""
    mode = "L" if first.mode in GRAY else "RGB"
    classes = records.features[label].num_classes
    for record in _whole(source, records):
        picture, number = record[image], record[label]
        if picture.mode not in GRAY + COLOR:
            raise LeanError(f"{source} has images of mode {picture.mode}; make them of 8 bits a channel")
        if mode == "L" and picture.mode not in GRAY:
            raise LeanError(f"{source} has images in gray and in colour; make them all one")
        if picture.size != first.size:
            sizes = " and ".join(f"{width}x{height}" for width, height in (first.size, picture.size))
            raise LeanError(f"{source} has images of different sizes, {sizes}; make them one size")
        if number is None or not 0 <= number < classes:
            raise LeanError(f"{source} has images without a class in {label!r}")
        pixels = np.asarray(picture.convert(mode))
        yield pixels[None] if mode == "L" else pixels.transpose(2, 0, 1), number


def _write(
    directory: Path, source: str, train: Any, test: Any, image: str, label: str, progress: Progress
) -> dict[str, Any]:
    """Write the arrays of both splits; return their hash and the shape of an image."""
    digest, done, first = hashlib.sha256(), 0, next(_whole(source, train))[image]
    for split, records in (("train", train), ("test", test)):
        classes = np.empty(len(records), dtype="<i8")
        for i, (pixels, number) in enumerate(_decoded(source, records, image, label, first)):
            if not i:
                file, shape = directory / f"{split}-images.npy", (len(records), *pixels.shape)
                images = np.lib.format.open_memmap(file, mode="w+", dtype="uint8", shape=shape)
            images[i], classes[i] = pixels, number
            done += 1
            if done % 256 == 0:
                progress(f"decoding, {done:,} images")
        images.flush()
        np.save(directory / f"{split}-classes.npy", classes)
        digest.update(images.data)
        digest.update(classes.data)
    channels, height, width = images.shape[1:]
    return {"channels": channels, "height": height, "width": width, "sha256": digest.hexdigest()}
