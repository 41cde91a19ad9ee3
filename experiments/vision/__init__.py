"""Images: data, training and the comparison of P3's appendix C.6. Importing this teaches leanqkv to train classifiers.

    python -m experiments.vision compare vision --precision fp32 --out runs/vision
    python -m experiments.vision train vit-tiny+skipv1 --data cifar10 --out runs/cifar10

Every command of `leanqkv` is there. It needs `pip install 'leanqkv[vision]'`.
"""

from pathlib import Path

from leanqkv.compare.suites import SUITES, load_suite
from leanqkv.train.tasks import TASKS

from .task import ImageTask

TASKS["image_classification"] = ImageTask
SUITES["vision"] = load_suite(Path(__file__).with_name("vision.yaml"))
