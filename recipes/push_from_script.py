"""Publish from the end of a script: any module, a plan before it, and an answer for whoever was faster.

    pip install ".[torch]"
    python recipes/push_from_script.py --repo my-org/my-net --max-shard-size 1MB

The same seed gives the same weights: run it twice, and the second run sends nothing and makes no commit.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import hubshard


class Net(nn.Module, hubshard.ShardedHubMixin):
    """A module of one's own; the mixin stores the arguments of `__init__` as its config."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def train(net: Net, steps: int) -> None:
    """Learn to negate."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        x = torch.randn(32, net.width)
        nn.functional.mse_loss(net(x), -x).backward()
        optimizer.step()
        optimizer.zero_grad()


def say(event: hubshard.Event) -> None:
    """Long calls tell what they do; here, what a log should keep."""
    if event.kind in {"retry", "warning", "commit", "tag"}:
        print(f"{event.kind}: {event.path} {event.detail}", file=sys.stderr)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--repo", required=True, help="org/name; made if it does not exist")
    options.add_argument("--max-shard-size", default="5GB")
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--expected-head", help="the commit that main must be at, such as that of the last run")
    chosen = options.parse_args()

    torch.manual_seed(chosen.seed)
    net = Net()
    train(net, chosen.steps)

    plan = hubshard.push_to_hub(net, chosen.repo, max_shard_size=chosen.max_shard_size, dry_run=True)
    print(f"shards of at most {chosen.max_shard_size}: {plan.shards}, bytes in all: {plan.total_bytes}")
    try:
        published = hubshard.push_to_hub(
            net,
            chosen.repo,
            max_shard_size=chosen.max_shard_size,
            expected_head=chosen.expected_head,
            on_event=say,
        )
    except hubshard.ConflictError as error:
        sys.exit(f"somebody was faster: {error}")
    # sent by Xet: compressed, and with a few bytes of its own, so rarely the bytes in all
    print(f"{'published' if published.changed else 'unchanged'} {published.commit}, bytes sent: {published.sent_bytes}")

    again = Net.from_pretrained(chosen.repo, revision=published.commit)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


if __name__ == "__main__":
    main()
