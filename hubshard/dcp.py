"""PyTorch's distributed checkpoint on the Hub.

Example::

    import torch.distributed.checkpoint as dcp
    from hubshard.dcp import HubReader, HubWriter

    dcp.save(state, storage_writer=HubWriter("org/run", step=1000, local_dir="checkpoints"))
    dcp.load(state, storage_reader=HubReader("org/run", local_dir="checkpoints"))
"""

from __future__ import annotations

from hubshard.resume.dcp.hub_reader import HubReader
from hubshard.resume.dcp.hub_writer import HubWriter
from hubshard.resume.dcp.planners import LoadPlanner, SavePlanner

__all__ = ["HubReader", "HubWriter", "LoadPlanner", "SavePlanner"]
