"""Our classes among transformers' Auto classes, so that a checkpoint loads without `trust_remote_code`.

They are registered as soon as transformers is imported, in whichever order: until then nothing of it is loaded.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Register configuration and models with the Auto classes."""
    import transformers

    from .model.causal_lm import LeanForCausalLM
    from .model.config import LeanConfig
    from .model.image_classification import LeanForImageClassification
    from .model.masked_lm import LeanForMaskedLM
    from .model.transformer import LeanModel

    transformers.AutoConfig.register("leanqkv", LeanConfig)
    transformers.AutoModel.register(LeanConfig, LeanModel)
    transformers.AutoModelForCausalLM.register(LeanConfig, LeanForCausalLM)
    transformers.AutoModelForMaskedLM.register(LeanConfig, LeanForMaskedLM)
    transformers.AutoModelForImageClassification.register(LeanConfig, LeanForImageClassification)


class RegisterAfterImport:
    """Finds transformers as the other finders do, and lets `register` follow its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of transformers, and None for every other module."""
        if fullname != "transformers":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Register after this loader has executed the module; the search for a specification alone imports nothing."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            register()

        loader.exec_module = exec_module


if "transformers" in sys.modules:
    register()
else:
    sys.meta_path.insert(0, RegisterAfterImport())
