"""Name -> method, one line each."""

from .heads import Method
from .mean_v import mean_v
from .mean_vo import mean_vo
from .svd import svd
from .top_v import top_v
from .top_vo import top_vo

METHODS: dict[str, Method] = {
    "mean-v": mean_v,
    "mean-vo": mean_vo,
    "top-v": top_v,
    "top-vo": top_vo,
    "svd": svd,
}
CALIBRATED = "calibrated"
