"""A model of one's own, its residual additions replaced by mHC in one call: the same model at the start, then trained.

The blocks below know nothing of streams. A model of transformers is wrapped by the same line.
"""

import copy
import inspect

import torch
import torch.nn.functional as F
from torch import nn

from axes.depth import MHC, wrap

torch.manual_seed(0)
width, context = 32, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention()
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


text = torch.frombuffer(bytearray(inspect.getsource(inspect).encode()), dtype=torch.uint8).long()


def loss_of(model: nn.Module, starts: torch.Tensor) -> torch.Tensor:
    windows = torch.stack([text[s : s + context + 1] for s in starts])
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


plain = Model()
wrapped = wrap(copy.deepcopy(plain), MHC, streams=4)
added = wrapped.state_dict().keys() - plain.state_dict().keys()
print(f"names kept: {plain.state_dict().keys() < wrapped.state_dict().keys()}, for example new: {min(added)}")

for name, model in (("plain", plain), ("wrapped", wrapped)):
    batches = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = loss_of(model, torch.randint(len(text) - context - 1, (16,), generator=batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{name:<8} loss at the start {losses[0]:.6f}, after {len(losses)} steps {sum(losses[-10:]) / 10:.3f}")
