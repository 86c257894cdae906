"""Imports and exports Hugging Face models, and puts tmoe's experts into transformers' models."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.hf.export import export_hf
    from tmoe.hf.foreign import is_folder
    from tmoe.hf.importer import import_hf
    from tmoe.hf.load_weights import load_hf, load_weights
    from tmoe.hf.swap import swap_experts

__all__ = [
    "export_hf",
    "import_hf",
    "is_folder",
    "load_hf",
    "load_weights",
    "swap_experts",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "export_hf": "tmoe.hf.export",
        "import_hf": "tmoe.hf.importer",
        "is_folder": "tmoe.hf.foreign",
        "load_hf": "tmoe.hf.load_weights",
        "load_weights": "tmoe.hf.load_weights",
        "swap_experts": "tmoe.hf.swap",
    },
)
