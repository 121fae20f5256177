"""An embedded Hugging Face Hub: the unmodified clients work against it with only ``HF_ENDPOINT`` set."""

from __future__ import annotations
