"""Mixers under FSDP2, in two gloo processes: as part of a unit, and as units of their own.

The processes are this file, executed, and are started once.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from axes.core.algorithms import Momentum
from axes.core.costs import Alignment
from axes.core.state_update import StateUpdate
from axes.depth import MHC, DepthMixer, Mixed, mixer
from tests.processes import joined, run

D, WORLD, LAYERS = 8, 2, 3
MIXERS = {"mhc": MHC, "momentum": mixer(StateUpdate(Alignment(), algorithm=Momentum(0.5, "sum")))}


class Network(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        mixers = [MIXERS[name](D, l, learned_reduce=l == LAYERS - 1, dtype=torch.float64) for l in range(LAYERS)]
        self.blocks = nn.ModuleList(Mixed(nn.Linear(D, D, dtype=torch.float64), m) for m in mixers)
        for p in self.parameters():
            nn.init.normal_(p, std=0.4)

    def forward(self, h: Tensor) -> Tensor:
        streams = self.blocks[0].mixer.expand(h)
        for block in self.blocks:
            streams = block(streams)
        return self.blocks[-1].mixer.reduce(streams)


def network(name: str) -> Network:
    torch.manual_seed(0)
    return Network(name)


def shard_alone(m: DepthMixer) -> None:
    fully_shard(m)
    for call in DepthMixer.calls:
        register_fsdp_forward_method(m, call)


def one_case(name: str, alone: bool) -> None:
    plain, sharded = network(name), network(name)
    for block in sharded.blocks:
        if alone:
            shard_alone(block.mixer)
    fully_shard(sharded)
    torch.manual_seed(1)
    data = torch.randn(WORLD, 5, D, dtype=torch.float64)
    upstream = torch.randn(WORLD, 5, D, dtype=torch.float64)
    (plain(data) * upstream).sum().div(WORLD).backward()
    rank = dist.get_rank()
    out = sharded(data[rank : rank + 1])
    torch.testing.assert_close(out, plain(data)[rank : rank + 1], rtol=0, atol=1e-12)
    (out * upstream[rank : rank + 1]).sum().backward()
    for (label, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if p.grad is None:
            continue
        assert isinstance(q, DTensor) and isinstance(q.grad, DTensor), label
        where = f"{name}, alone={alone}: {label}"
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0, atol=1e-12, msg=where)


def test_sharded_mixers_are_the_mixers(tmp_path: Path) -> None:
    run(__file__, tmp_path, WORLD)


if __name__ == "__main__":
    with joined():
        for case in MIXERS:
            for separate in (False, True):
                one_case(case, separate)
