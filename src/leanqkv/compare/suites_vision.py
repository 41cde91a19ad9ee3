"""P3 appendix C.6, Figure 16: a vision transformer with and without first-layer values, as a suite."""

from .suite import PAPER, SMALL, TINY, Entry, Group, Published, Setup, Suite

NOTE = (
    "Shape, data (a third of scikit-learn's digits held out for the test) and length of training are ours; optimizer, "
    "learning rate and the proportion of the warm-up are the paper's, the same for both models."
)
PAPER_NOTE = (
    "The paper names no patch size, no image size and no augmentation: images enlarged to 224 pixels in patches of 16 "
    "give the 5.5M parameters it states, and nothing is augmented. This is CIFAR-10; CIFAR-100 is `leanqkv compare "
    "vit-tiny+num_labels=100 vit-tiny+num_labels=100+skipv1 --data cifar100`."
)
SMALL_SHAPE = "+patch_size=1+hidden_size=128+intermediate_size=512+num_hidden_layers=6"


def _pair(base: str, label: str = "") -> Group:
    label = label or base
    return Entry(base, label, row="baseline"), Entry(f"{base}+skipv1", f"{label}+skipv1", row="skipv1")


VISION = Suite(
    "First-layer values in a vision transformer",
    {
        TINY: Setup((_pair("vit-digits"),), notes=(NOTE,), evaluate_every=50),
        SMALL: Setup((_pair(f"vit-digits{SMALL_SHAPE}", "vit-digits-1.2m"),), notes=(NOTE,), evaluate_every=50),
        PAPER: Setup(
            (_pair("vit-tiny"),),
            data="cifar10",
            evaluation_sequences=10_000,
            evaluate_every=500,
            notes=(PAPER_NOTE,),
        ),
    },
    "P3 Figure 16",
    (
        Published(
            "P3 Figure 16",
            "ViT-Tiny 5.5M, CIFAR-10 and CIFAR-100, 15k steps of 1,024 images",
            "test accuracy",
            ({"baseline": "baseline", "skipv1": "not above the baseline"},),
        ),
    ),
    ("P3 appendix C.6 gives curves and no numbers; it concludes that SkipV1Former is no better than MHA on images.",),
)

SUITES = {"vision": VISION}
