"""Another source's tensors in another floating dtype, cast as they are read. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

from hubshard.errors import FormatError
from hubshard.extras import to_install
from hubshard.protocols import Buffer, Source
from hubshard.sources.dtypes import CASTABLE
from hubshard.tensors import Box, TensorSpec

__all__ = ["CastSource"]


class CastSource:
    """Floating tensors of 16 bits and more in `dtype`; all others as they are."""

    def __init__(self, source: Source, dtype: str) -> None:
        """Wrap a source.

        Args:
            source: whose tensors.
            dtype: a code of `CASTABLE`.

        Raises:
            FormatError: torch is not installed.
        """
        if find_spec("torch") is None:
            raise FormatError("casting to another dtype needs torch", hint=to_install("torch"))
        self._source = source
        self._dtype = dtype
        self._inner = {spec.name: spec for spec in source.specs()}

    def specs(self) -> Sequence[TensorSpec]:
        """All tensors, floating ones in the new dtype."""
        return tuple(
            replace(spec, dtype=self._dtype) if spec.dtype in CASTABLE else spec for spec in self._inner.values()
        )

    def aliases(self) -> Mapping[str, str]:
        """Those of the source."""
        return self._source.aliases()

    def read(self, name: str, box: Box) -> Buffer:
        """The bytes of `box`, cast."""
        raw = self._source.read(name, box)
        dtype = self._inner[name].dtype
        if dtype not in CASTABLE or dtype == self._dtype or not box.numel:
            return raw
        import torch  # noqa: PLC0415  # slow, and optional

        tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, CASTABLE[dtype]))
        converted = tensor.to(getattr(torch, CASTABLE[self._dtype]))
        return memoryview(cast("Buffer", converted.view(torch.uint8).numpy()))
