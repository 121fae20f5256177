"""All of the state of a training run, so that it goes on exactly.

```
model.<name>                  tensors of the model, under the names it has without wrappers
optimizer.state.<name>.<key>  optimizer.param_groups.<number>.<key> where that is a tensor
ema.…, scheduler.…, scaler.…, data.…, extras.<name>.…     their tensors, if any
rng.<rank>                    the generators of a rank (see `hubshard.resume.state.rng`)
values.<part>                 what is no tensor: a tuple of one item, which DCP does not take apart
values.progress               step, epoch, samples, seed, world_size
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hubshard.resume.state.replicas import Replica
    from hubshard.steps.step import Step

__all__ = ["TrainState"]


class TrainState:
    """What a run needs to go on exactly: give it to `ResumeBranch`, or to DCP with `hubshard.dcp`.

        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
        with ResumeBranch("org/run", local_dir="checkpoints") as resume:
            resume.restore(state)
            for epoch in range(loader.epoch, 3):
                for batch in loader:
                    ...
                    state.step += 1
                    resume.save(state, state.step)

    Save between two steps of the optimizer: gradients are no part of it. On the same number of ranks everything comes
    back bit by bit. On another number tensors are divided anew, bit by bit too; the data goes on in the same order
    where it is a `ResumableLoader` or `ResumableSampler`; and each rank's random generators are seeded from the seed of
    the run, its rank and the step, which is logged.

    What all ranks hold alike is stored once; where buffers, extras and what is no tensor differ from rank to rank, the
    first rank's are stored. Sharding with `fully_shard`, tensor parallelism by DTensor, DDP, `torch.compile` and
    activation checkpointing are known. Shares of layers in plain tensors are refused by `ResumeBranch`.

    So are ranks that hold different layers (pipeline parallelism). Give each stage a `ResumeBranch` of its own, and go
    on from the newest step that all stages have:

        groups = [dist.new_group(ranks) for ranks in ranks_of_stages]  # on every rank
        with ResumeBranch(
            "org/run", branch=f"resume-{stage}", local_dir=f"checkpoints/{stage}", process_group=groups[stage],
            every=500, keep_every=5000,
        ) as resume:
            saved = [None] * dist.get_world_size()
            dist.all_gather_object(saved, resume.steps())
            step = max(set.intersection(*map(set, saved)), default=None)
            if step is not None:
                resume.restore(state, step=step)
                resume.rollback(step)

    The stages do not know of each other. So save after a number of steps, not of seconds; where `should_stop` says so
    on any rank (an `all_reduce` tells), save that step and stop on all; and give a `keep_every`, since of the steps
    that wait for a slow Hub only the newest is sent, which may be another one on each stage, and those that stay.

    Args:
        model: the module, wrapped or not. Several in one: `torch.nn.ModuleDict`.
        optimizer: one, or a mapping or sequence of several, whose parameters are the model's.
        scheduler: of the learning rate, or of anything: with `state_dict` and `load_state_dict`; one or several.
        scaler: `torch.amp.GradScaler`; one or several.
        ema: averaged weights: a module, such as `torch.optim.swa_utils.AveragedModel`, a dict of tensors, or an object
            with `state_dict` and `load_state_dict`.
        data: the loader or sampler, or an adapter of `hubshard.resume.data.adapters`; one or several.
        extras: anything else: a module; an object with `state_dict` and `load_state_dict`, which each rank keeps for
            itself if its `per_rank` is True; or numbers, text, bytes and tensors, in dicts, lists and tuples if need
            be. After a restore dicts and lists are changed in place; all are in `extras`.

    Attributes:
        step: steps of the optimizer so far, for the loop to count; saved like `epoch` and `samples`.
        epoch: for the loop to use.
        samples: for the loop to use.
        seed: of the generators on another number of ranks; by default `torch.initial_seed()`.
        extras: the extras by name; assign a new number or text here.

    Raises:
        FormatError: an argument that has no state, or a model whose state cannot be taken.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        data: Any = None,
        **extras: Any,
    ) -> None:
        self.step = 0
        self.epoch = 0
        self.samples = 0
        self.extras: dict[str, Any] = extras
        from hubshard.resume.state.rng import initial_seed  # noqa: PLC0415  # it imports torch
        from hubshard.resume.state.train_parts import Parts  # noqa: PLC0415  # it imports torch

        self.seed = initial_seed()
        others = {"scheduler": scheduler, "scaler": scaler, "data": data}
        self._parts = Parts(model, optimizer, others, {"ema": ema}, extras)

    def among(self, rank: int, world_size: int) -> None:
        """Say which ranks hold this state together, where they are not all of torch.distributed; see `ResumeBranch`.

        Args:
            rank: of this process, among them.
            world_size: how many they are.
        """
        self._parts.ranks = rank, world_size

    def replica(self) -> Replica:
        """What this rank holds, in brief: tensors that are whole must be alike on all ranks."""
        return self._parts.replica()

    def state_dict(self) -> dict[str, Any]:
        """The live tensors of this rank and the values, nested, for DCP. Nothing is changed.

        Raises:
            FormatError: something cannot be stored: names its path.
        """
        return self._parts.save({"step": self.step, "epoch": self.epoch, "samples": self.samples, "seed": self.seed})

    def prepare_load(self, step: Step) -> dict[str, Any]:
        """What to load a step into: the live tensors, and those that do not exist yet, empty.

        Raises:
            FormatError: the step was saved from something else; says what differs. Nothing was changed.
        """
        return self._parts.wanted(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that was loaded into what `prepare_load` gave.

        Raises:
            FormatError: it is incomplete, or a part refuses it.
        """
        progress = self._parts.load(state)
        self.step, self.epoch, self.samples = (progress[name] for name in ("step", "epoch", "samples"))
        self.seed = progress["seed"]
